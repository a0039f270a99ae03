"""Bookkeeping of fixed-size, reference-counted pages: one set of books under paged and vmm.

One class in five files, each upon the one before: ``books`` (the numbers, and the hooks of a
backend), ``leaving`` (how rows lose pages), ``placing`` (how they come by them), ``moves`` (fork,
truncate, offload, restore), ``allocator`` (admit, grow, release, usage). Below them are ``pool``,
``table`` and ``prefix``; ``exchange`` is for beams.
"""

from .pool import PageIds, PagePool
from .prefix import PrefixIndex

__all__ = ["PageIds", "PagePool", "PrefixIndex"]
