"""Physical pages mapped under one virtual range per sequence, read by unmodified dense kernels."""

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
