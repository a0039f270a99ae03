"""Zeros behind every sequence where the driver itself would fault: who meets them, and the cost.

The same over the host driver, made to fault, and over the cuda driver against the conformance
library; what may fault runs in processes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvalloc.tests.conformance.conformance import run_in_subprocess
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.guard_walk import LAYOUTS, PAGE, SMALL
from kvalloc.tests.host_children import run_to_death, run_well
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.driver import DriverError
from kvalloc.vmm.guard import GUARD_TOKENS
from kvalloc.vmm.host import HostDriver
from kvalloc.vmm.physical import PhysicalPool

PAGE_TOKENS = PAGE // 16  # of SMALL, in each of its four buffers
assert PAGE_TOKENS == GUARD_TOKENS


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver(PAGE)
    yield made
    made.close()


# ---------------------------------------------------------------------- what a kernel meets


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_never_fault_over_the_host_driver(layout: str) -> None:
    said = run_well(f"""
from kvalloc.tests import guard_walk
driver = HostDriver(guard_walk.PAGE)
say(guard_walk.walk({layout!r}, driver))
assert driver.bytes_in_use == driver.num_views == 0 and not driver._space._ranges
""")
    assert int(said) > 50


def _walks_under_kernels(layouts: list[str]) -> None:
    from kvalloc.tests import guard_walk
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    library = Library()
    for layout in layouts:
        driver = ConformanceDriver()
        print(guard_walk.walk(layout, driver, library.launch))
        driver.close()
        assert not any(library.alive().values()), library.alive()


@pytest.mark.parametrize("part", range(3))
def test_no_zero_is_replaced_under_a_kernel(part: int) -> None:
    """Kernels that read whole tiles stay queued until somebody waits; unmapping is a fault."""
    layouts = list(LAYOUTS)[part::3]
    said = run_in_subprocess(_walks_under_kernels, layouts, granularity=PAGE, memory=1 << 20)
    assert all(int(count) > 50 for count in said.split())


TOUCH = """
import torch
from kvalloc.tests.guard_walk import PAGE, SMALL
from kvalloc.vmm import VmmKVCache
cache = VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=HostDriver(PAGE), guard="zero")
cache.admit("a", 300)
k = cache.view(0, ["a"]).k
assert not k[2 * 256 : 3 * 256].any()
say("ready")
"""


@pytest.mark.parametrize("touch", ["k[2 * 256] = 1", "k[3 * 256].sum()", "k[5 * 256] = 1"])
def test_zeros_are_not_writable_and_end_behind_the_tile(touch: str) -> None:
    assert run_to_death(TOUCH + touch) == "ready\n"


def _touch_on_cuda(touch: str) -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver
    from kvalloc.tests.guard_walk import PAGE, SMALL
    from kvalloc.vmm import VmmKVCache

    cache = VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=ConformanceDriver(), guard="zero")
    cache.admit("a", 300)
    k = cache.view(0, ["a"]).k
    assert not k[2 * 256 : 3 * 256].any(), "fresh memory there is NaN"
    if touch == "write":
        k[2 * 256] = 1
    elif touch == "beyond":
        k[3 * 256].sum()
    print("alive")


@pytest.mark.parametrize("touch", ["read", "write", "beyond"])
def test_zeros_of_the_cuda_driver_are_not_writable(touch: str) -> None:
    if touch == "read":
        assert run_in_subprocess(_touch_on_cuda, touch, granularity=PAGE) == "alive\n"
    else:
        with pytest.raises(AssertionError, match="exit status -11"):
            run_in_subprocess(_touch_on_cuda, touch, granularity=PAGE)


@pytest.mark.parametrize("own", [True, False], ids=["the driver's zeros", "the cache's zeros"])
def test_a_tile_never_reads_the_row_behind(own: bool) -> None:
    """A sequence as long as a row may be, and a neighbour that is NaN from its first token."""
    limit = 2 * PAGE_TOKENS
    driver = HostDriver(PAGE, "zero" if own else "fault")
    with VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=driver, guard="zero", limit=limit) as cache:
        for seq, value in (("a", 1.0), ("b", torch.nan)):
            cache.admit(seq, limit)
            fill = torch.full((limit, 1, 4), value)
            cache.write(0, [seq], fill, fill, lens=[limit])
        view = cache.view(0, ["a", "b"])
        start, neighbour = view.starts.tolist()
        assert neighbour > start
        tile = view.v[start : start + limit + GUARD_TOKENS]
        assert float(tile.sum()) == limit * 4, "zeros alone are behind the ones"
        assert bool(view.v[neighbour].isnan().all())
        del view, tile
    driver.close()


# ---------------------------------------------------------------------- what it costs


def counted(driver: HostDriver, act: Callable[[], object]) -> dict[str, int]:
    before = dict(driver.num_calls)
    act()
    return {verb: n - before[verb] for verb, n in driver.num_calls.items() if n > before[verb]}


def costs(driver: HostDriver, guard: str) -> list[dict[str, int]]:
    """Calls of the making, an admission, a crossing, a growth inside, a release of all."""
    cache: list[VmmKVCache] = []

    def make() -> None:
        cache.append(
            VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=driver, guard=guard)  # type: ignore[arg-type]
        )

    found = [counted(driver, make)]
    found.append(counted(driver, lambda: cache[0].admit("a", PAGE_TOKENS)))
    found.append(counted(driver, lambda: cache[0].grow(["a"])))
    found.append(counted(driver, lambda: cache[0].grow(["a"])))
    cache[0].truncate("a", PAGE_TOKENS)
    found.append(counted(driver, cache[0].reclaim))
    found.append(counted(driver, cache[0].close))
    return found


def test_calls_per_crossing_are_as_documented(driver: HostDriver) -> None:
    """Of four buffers, where a tile reaches one page; the table in docs/gpu.md."""
    assert costs(driver, "fault") == [
        dict(reserve=4),
        dict(create=4, map=4, allow=4),
        dict(create=4, map=4, allow=4),
        {},
        dict(unmap=4, release=4),
        dict(unmap=4, release=4, free=4),
    ]
    assert costs(driver, "zero") == [
        dict(reserve=5, create=1, map=1, allow=2),
        dict(create=4, map=8, allow=8),
        dict(create=4, map=8, allow=8, unmap=4),
        {},
        dict(unmap=8, map=4, allow=4, release=4),
        dict(unmap=9, release=5, free=5),
    ]
    assert driver.bytes_in_use == 0


def test_zeros_count_in_no_figure(driver: HostDriver) -> None:
    usages = []
    for guard in ("fault", "zero"):
        with VmmKVCache(
            SMALL,
            40 * PAGE,
            PAGE,
            driver=driver,
            guard=guard,
        ) as cache:
            cache.admit("a", 300)
            cache.grow(["a"], 400)
            usages.append((cache.usage(), cache.spans("a"), cache.physical.num_created))
    assert usages[0] == usages[1]


def test_waits_only_where_zeros_are_replaced(driver: HostDriver) -> None:
    class Waiting(FailingDriver):
        num_waits = 0

        def wait(self, fence: object) -> None:
            self.num_waits += 1

    for guard, expected in (("fault", [0, 0, 0]), ("zero", [1, 0, 1])):
        waiting = Waiting(driver)
        with VmmKVCache(
            SMALL,
            40 * PAGE,
            PAGE,
            driver=waiting,
            guard=guard,  # type: ignore[arg-type]
        ) as cache:
            found = [waiting.num_waits]  # the page of zeros was written
            for act in (lambda: cache.admit("a", 1), lambda: cache.grow(["a"], PAGE_TOKENS)):
                before = waiting.num_waits
                act()
                found.append(waiting.num_waits - before)
        assert found == expected


def test_a_driver_that_reads_zeros_is_left_to_it() -> None:
    driver = HostDriver(PAGE, "zero")
    with VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=driver, guard="zero") as cache:
        assert counted(driver, lambda: cache.admit("a", 1)) == dict(create=4, map=4, allow=4)
    driver.close()


# ---------------------------------------------------------------------- refusals


def test_caches_of_one_pool_have_zeros_of_their_own(driver: HostDriver) -> None:
    pool = PhysicalPool(driver, 40 * PAGE, PAGE)
    with (
        VmmKVCache(SMALL, pool=pool, guard="zero") as first,
        VmmKVCache(SMALL, pool=pool) as second,
    ):
        for cache in (first, second):
            cache.admit("a", 1)
        assert driver.bytes_in_use == 9 * PAGE
        assert not first.view(0, ["a"]).k[PAGE_TOKENS].any()
    assert driver.bytes_in_use == 0


def test_mapping_ahead_is_refused_beside_zeros_of_the_cache(driver: HostDriver) -> None:
    with pytest.raises(ValueError, match="leave ahead_tokens at 0"):
        VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=driver, guard="zero", ahead_tokens=8)
    assert driver.bytes_in_use == 0
    with pytest.raises(ValueError, match="guard 'one' is unknown"):
        VmmKVCache(SMALL, 40 * PAGE, PAGE, guard="one")  # type: ignore[arg-type]
    VmmKVCache(SMALL, 40 * PAGE, PAGE, guard="zero", ahead_tokens=8).close()


def test_a_driver_that_cannot_map_read_only_says_so_when_the_cache_is_made(
    driver: HostDriver,
) -> None:
    class ReadWriteOnly(FailingDriver):
        def allow(self, address: int, num_bytes: int, *, write: bool = True) -> None:
            if not write:
                raise DriverError("allow: read-only access is not supported")
            super().allow(address, num_bytes)

    with pytest.raises(DriverError, match="read-only"):
        VmmKVCache(SMALL, 40 * PAGE, PAGE, driver=ReadWriteOnly(driver), guard="zero")
    assert driver.bytes_in_use == 0 and not driver._space._ranges
