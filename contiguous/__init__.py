"""The classical KV cache: one interval of a preallocated arena per sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .allocator import ContiguousAllocator

if TYPE_CHECKING:
    from .cache import ContiguousKVCache

__all__ = ["ContiguousAllocator", "ContiguousKVCache"]


def __getattr__(name: str) -> Any:
    # Accounting experiments use the allocator alone and need not wait for torch.
    if name == "ContiguousKVCache":
        from .cache import ContiguousKVCache

        return ContiguousKVCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
