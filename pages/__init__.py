"""Bookkeeping of fixed-size, reference-counted pages: one set of books under paged and vmm."""

from .pool import PageIds, PagePool
from .prefix import PrefixIndex

__all__ = ["PageIds", "PagePool", "PrefixIndex"]
