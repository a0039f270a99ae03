"""Physical pages mapped under one virtual range per sequence, read by unmodified dense kernels.

The cache is one class in four files, each upon the one before: ``allocator`` (the books alone),
``locked`` (for two threads), ``backed`` (what the books ask of the driver), ``cache`` (write, view,
close). Its addresses are ``space`` over ``reservation``, its pages ``physical``, both over a
``driver``: ``host`` with ``addresses``, ``mappings``, ``memfile`` and ``system``, or ``cuda`` with
``cuda_device`` and ``cuda_library``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .allocator import VmmAllocator
from .driver import Driver, DriverError

if TYPE_CHECKING:
    from .cache import VmmKVCache

__all__ = ["Driver", "DriverError", "VmmAllocator", "VmmKVCache"]


def __getattr__(name: str) -> Any:
    if name == "VmmKVCache":  # imported on demand: the allocators need no torch
        from .cache import VmmKVCache

        return VmmKVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
