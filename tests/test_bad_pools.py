"""What a program can get wrong about where the memory comes from: pools, drivers, sizes, flags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import Allocator, KVCache
from kvalloc.geometry import SLOTS, KVGeometry
from kvalloc.paged import PagedAllocator, PagedKVCache
from kvalloc.pages import PagePool
from kvalloc.vmm import VmmAllocator, VmmKVCache
from kvalloc.vmm.host import HostDriver
from kvalloc.vmm.physical import PhysicalPool

ONE = KVGeometry.uniform("one", layers=1, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")
PAGE = 4096
MIB = 1 << 20
integer = pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint16])


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(PAGE)
    yield driver
    driver.close()


@integer
def test_numbers_of_numpy_become_plain_ones(
    driver: HostDriver, integer: Callable[..., Any]
) -> None:
    """In the type that was given, products overflow and books cannot be written as JSON."""
    page, few, mib = integer(PAGE), integer(8), cast(int, np.int64(MIB))
    pool = PhysicalPool(driver, integer(8 * PAGE), page)
    own = HostDriver(page)
    caches: list[Allocator] = [
        VmmKVCache(ONE, MIB, page, max_rows=few, limit=few, ahead_tokens=few, ahead_pages=few),
        VmmKVCache(ONE, MIB, PAGE, driver=own),
        VmmKVCache(ONE, pool=pool),
        VmmAllocator(SLOTS, mib, page),
        PagedAllocator(SLOTS, None, few, pool=PagePool(few)),
        PagedKVCache(ONE, mib, few, limit=few),
        ContiguousKVCache(ONE, mib, limit=few),
    ]
    for cache in caches:
        cache.admit("a", few, max_new=0)
        json.dumps([cache.usage(), cache.spans("a"), cache.capacity, cache.limit])
        assert {type(number) for number in (*cache.usage(), cache.capacity)} == {int}
        if isinstance(cache, KVCache):
            cache.close()
    own.close()


@pytest.mark.parametrize("size", ["4096", 4096.0, True, None])
def test_sizes_are_whole_numbers(driver: HostDriver, size: Any) -> None:
    for name, make in (
        ("granularity", lambda: HostDriver(size)),
        ("page_bytes", lambda: PhysicalPool(driver, MIB, size)),
        ("page_bytes", lambda: VmmKVCache(ONE, MIB, size)),
        ("page_bytes", lambda: VmmKVCache(ONE, MIB, size, driver=driver)),
        ("num_pages", lambda: PagePool(size)),
    ):
        with pytest.raises(TypeError, match=f"{name} must be an integer, not {size!r}"):
            make()


@pytest.mark.parametrize("given", [None, 0, 1, "no"])
def test_scrub_is_true_or_false(given: Any) -> None:
    for make in (
        lambda: ContiguousKVCache(ONE, MIB, policy="exact", scrub=given),
        lambda: PagedKVCache(ONE, MIB, scrub=given),
        lambda: VmmKVCache(ONE, MIB, PAGE, scrub=given),
    ):
        with pytest.raises(TypeError, match="scrub must be True or False"):
            make()


@pytest.mark.parametrize("given", ["x", 3, HostDriver])
def test_a_driver_has_the_seven_verbs(given: Any) -> None:
    with pytest.raises(TypeError, match=r"driver must be a Driver, such as kvalloc\.vmm\.host"):
        VmmKVCache(ONE, MIB, PAGE, driver=given)
    with pytest.raises(TypeError, match="driver must be a Driver"):
        PhysicalPool(given, MIB, PAGE)


@pytest.mark.parametrize("given", ["x", 3, PagePool])
def test_a_pool_is_a_pool(given: Any) -> None:
    for make in (
        lambda: VmmAllocator(SLOTS, None, PAGE, pool=given),
        lambda: PagedAllocator(SLOTS, None, pool=given),
        lambda: VmmKVCache(ONE, pool=given),
        lambda: VmmKVCache(ONE, pool=PagePool(8)),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"pool must be a (PagePool|PhysicalPool) of kvalloc"):
            make()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ahead_pages": "x"}, "ahead_pages must be an integer"),
        ({"ahead_pages": -1}, "ahead_pages must not be negative"),
        ({"ahead_tokens": "x"}, "ahead_tokens must be an integer"),
        ({"ahead_tokens": 4, "ahead_pages": 0}, "give ahead_pages >= 1"),
    ],
)
def test_mapping_ahead_is_checked_whether_it_is_used_or_not(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        VmmKVCache(ONE, MIB, PAGE, **options)
