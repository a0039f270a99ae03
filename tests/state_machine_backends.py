"""Every allocator and every cache that the state machines are set upon, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvalloc.contiguous import ContiguousAllocator, ContiguousKVCache
from kvalloc.contiguous.placement import PLACEMENTS
from kvalloc.contiguous.policies import POLICIES
from kvalloc.contract import Allocator, KVCache
from kvalloc.geometry import SLOTS, KVGeometry, LayerShape
from kvalloc.paged import PagedAllocator, PagedKVCache
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.state_machine import Leaked, Walk
from kvalloc.vmm import VmmAllocator, VmmKVCache
from kvalloc.vmm.host import HostDriver

PAGE = 4096
PLAIN = KVGeometry("plain", (LayerShape(2, 16),) * 2, 4, "float32", max_context=400)
# 40 bytes per token and tensor: no power of two, tokens straddle pages of 4,096.
STRADDLING = KVGeometry("straddling", (LayerShape(1, 10),) * 2, 1, "float32", max_context=700)
WINDOWED = KVGeometry(
    "windowed",
    (LayerShape(2, 16, window=24), LayerShape(2, 16), LayerShape(2, 16, window=24)),
    2,
    "float32",
    max_context=400,
)
# 384 bytes: tokens straddle pages, and 32 of them fill the three that a window leaves as one.
WINDOWED_STRADDLING = KVGeometry(
    "windowed straddling",
    (LayerShape(1, 96, window=24), LayerShape(1, 96)),
    1,
    "float32",
    max_context=400,
)
UNEQUAL = KVGeometry(
    "unequal", (LayerShape(4, 8), LayerShape(1, 16, window=40)), 4, "float32", max_context=400
)
HALF = KVGeometry("half", (LayerShape(2, 16),), 4, "bfloat16", max_context=400)
# One layer, two bytes per token: what a window leaves is told by the spans alone.
WINDOW = KVGeometry.uniform(
    "window", layers=1, q_heads=1, kv_heads=1, head_dim=1, dtype="fp8", window=24
)


def vmm(geometry: KVGeometry, pages: int, **options: Any) -> Callable[[], KVCache]:
    return lambda: VmmKVCache(geometry, pages * PAGE, PAGE, **options)


def paged(geometry: KVGeometry, tokens: int, size: int, **options: Any) -> Callable[[], KVCache]:
    return lambda: PagedKVCache(geometry, tokens * geometry.bytes_per_token, size, **options)


def contiguous(geometry: KVGeometry, tokens: int, **options: Any) -> Callable[[], KVCache]:
    return lambda: ContiguousKVCache(geometry, tokens * geometry.bytes_per_token, **options)


CACHES = {
    "contiguous max": contiguous(PLAIN, 500),
    "contiguous max scrub": contiguous(UNEQUAL, 500, scrub=True, layout="token-major"),
    "contiguous pow2 best-fit": contiguous(PLAIN, 500, policy="pow2", placement="best-fit"),
    "contiguous exact": contiguous(PLAIN, 400, policy="exact"),
    "contiguous exact windowed": contiguous(WINDOWED, 400, policy="exact"),
    "contiguous max buddy": contiguous(UNEQUAL, 600, placement="buddy"),
    "contiguous exact buddy": contiguous(PLAIN, 500, policy="exact", placement="buddy"),
    "paged 1": paged(PLAIN, 300, 1),
    "paged 8": paged(PLAIN, 400, 8),
    "paged 16 bfloat16": paged(HALF, 400, 16),
    "paged 16 token-major scrub": paged(PLAIN, 400, 16, layout="token-major", scrub=True),
    "paged 8 windowed": paged(WINDOWED, 400, 8),
    "paged 4 unequal": paged(UNEQUAL, 400, 4),
    "vmm": vmm(PLAIN, 60),
    "vmm bfloat16": vmm(HALF, 20),
    "vmm fit-prompt": vmm(PLAIN, 60, adoption="fit-prompt"),
    "vmm scrub": vmm(PLAIN, 60, scrub=True),
    "vmm head-major": vmm(PLAIN, 90, layout="head-major"),
    "vmm interleaved": vmm(PLAIN, 40, layout="interleaved"),
    "vmm straddling": vmm(STRADDLING, 60),
    "vmm straddling interleaved": vmm(STRADDLING, 40, layout="interleaved"),
    "vmm windowed": vmm(WINDOWED, 60),
    "vmm windowed interleaved": vmm(WINDOWED, 60, layout="interleaved"),
    "vmm windowed straddling": vmm(WINDOWED_STRADDLING, 120),
    "vmm unequal": vmm(UNEQUAL, 60),
    "vmm unequal head-major": vmm(UNEQUAL, 90, layout="head-major"),
    "vmm few rows": vmm(PLAIN, 60, max_rows=3),
    "vmm mapping ahead": vmm(PLAIN, 60, ahead_tokens=16),
}


def reserving(policy: str, placement: str) -> Callable[[], Allocator]:
    limit = 120 if policy == "limit" else None
    return lambda: ContiguousAllocator(SLOTS, 500, policy=policy, placement=placement, limit=limit)


BOOKS: dict[str, Callable[[], Allocator]] = {
    **{
        f"books contiguous:{policy}:{placement}": reserving(policy, placement)
        for policy in POLICIES
        for placement in PLACEMENTS
    },
    "books paged:1": lambda: PagedAllocator(SLOTS, 300, 1),
    "books paged:4": lambda: PagedAllocator(SLOTS, 400, 4),
    "books paged:7": lambda: PagedAllocator(SLOTS, 400, 7, limit=200),
    "books paged:16": lambda: PagedAllocator(SLOTS, 400, 16),
    "books paged:4 window": lambda: PagedAllocator(WINDOW, 800, 4),
    "books vmm:4": lambda: VmmAllocator(SLOTS, 400, 4),
    "books vmm:7": lambda: VmmAllocator(SLOTS, 400, 7, limit=200),
    "books vmm:16 fit-prompt": lambda: VmmAllocator(SLOTS, 400, 16, adoption="fit-prompt"),
    "books vmm:16 fit-expected": lambda: VmmAllocator(SLOTS, 400, 16, adoption="fit-expected"),
    "books vmm:8 window": lambda: VmmAllocator(WINDOW, 800, 16, layout="interleaved"),
}

# Mapped caches whose driver calls fail now and then.
FAILING: dict[str, dict[str, Any]] = {
    "failing vmm": {"geometry": PLAIN},
    "failing vmm scrub": {"geometry": PLAIN, "scrub": True},
    "failing vmm head-major": {"geometry": PLAIN, "layout": "head-major"},
    "failing vmm straddling": {"geometry": STRADDLING},
    "failing vmm windowed": {"geometry": WINDOWED, "scrub": True},
    "failing vmm windowed interleaved": {"geometry": WINDOWED, "layout": "interleaved"},
}

NAMES = (*CACHES, *BOOKS, *FAILING)


@contextmanager
def walking(name: str, seed: Any, **options: Any) -> Iterator[Walk]:
    """A walk over the allocator or cache of a name; closed, and nothing left, at the end.

    Raises
    ------
    Leaked
        The driver beneath still has memory, mappings or addresses.
    """
    if name in BOOKS:
        yield Walk(BOOKS[name](), seed, **options)
        return
    faults = None
    if name in FAILING:
        faults = FailingDriver(HostDriver(PAGE))
        cache: KVCache = VmmKVCache(
            memory_bytes=60 * PAGE, page_bytes=PAGE, driver=faults, **FAILING[name]
        )
    else:
        cache = CACHES[name]()
    driver: Any = faults or getattr(cache, "_own_driver", None)
    with cache:
        yield Walk(cache, seed, faults=faults, **options)
    if driver is None:
        return
    mapped = sum(area.num_mapped for area in driver._space._ranges.values())
    left = (driver.bytes_in_use, driver.num_views, mapped, len(driver._space._ranges))
    driver.close()
    if any(left):
        raise Leaked(f"{name}: bytes, views, mappings, ranges that are left: {left}")
