"""A system with less memory than the pool has pages: what nobody holds is used before a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np
import pytest

from kvalloc.contract import OutOfMemory
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.replay import replay
from kvalloc.experiments.trace import Trace
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.paged import PagedAllocator
from kvalloc.pages import PagePool
from kvalloc.tests.failing_driver import ShortDriver
from kvalloc.tests.state_machine import Walk
from kvalloc.vmm import VmmAllocator, VmmKVCache
from kvalloc.vmm.host import HostDriver
from kvalloc.vmm.physical import PhysicalPool

PAGE = 4096
TINY = KVGeometry("tiny", (LayerShape(1, 16),) * 2, 1, "float32", max_context=2048)
PAGE_TOKENS = PAGE // 64  # of TINY, in each of its four buffers
POOL = 400
SHORT = 16
"""Pages that the system has: four in each buffer."""


@pytest.fixture
def driver() -> Iterator[ShortDriver]:
    inner = HostDriver(PAGE)
    yield ShortDriver(inner, SHORT)
    inner.close()


@pytest.fixture
def cache(driver: ShortDriver) -> Iterator[VmmKVCache]:
    with VmmKVCache(TINY, POOL * PAGE, PAGE, driver=driver) as made:
        yield made
        made.check_invariants()


def test_an_admission_takes_the_pages_of_those_who_left(cache: VmmKVCache) -> None:
    for seq in range(2):
        cache.admit(seq, 2 * PAGE_TOKENS)
    for seq in range(2):
        cache.release(seq)
    assert cache.usage().warm == SHORT * PAGE
    cache.admit("long", 4 * PAGE_TOKENS)  # half of it is under its row, half under another
    assert cache.physical.num_created == SHORT
    assert set(cache.grow(["long"])) == {"long"}
    with pytest.raises(OutOfMemory):
        cache.admit("more", 1)


def test_a_growth_takes_the_pages_of_those_who_left(cache: VmmKVCache) -> None:
    for seq in range(4):
        cache.admit(seq, PAGE_TOKENS)
    cache.release(1)
    cache.release(3)
    assert not cache.grow([0, 2])
    assert set(cache.grow([0, 2], PAGE_TOKENS)) == {0, 2}
    assert cache.length(0) == cache.length(2) == PAGE_TOKENS + 1


def test_a_prefix_that_waits_makes_room(cache: VmmKVCache) -> None:
    cache.admit("old", 4 * PAGE_TOKENS, prefix=[("old", 4 * PAGE_TOKENS)])
    cache.release("old")
    assert cache.prefix_index.num_cached == SHORT
    cache.admit("new", 3 * PAGE_TOKENS)
    assert cache.prefix_index.num_cached < SHORT


def test_a_refusal_for_good_leaves_what_waits(cache: VmmKVCache) -> None:
    """Else whoever tries again and again empties the prefix index, and gets nothing for it."""
    cache.admit("old", 2 * PAGE_TOKENS, prefix=[("old", 2 * PAGE_TOKENS)])
    cache.release("old")
    cache.admit("warm", PAGE_TOKENS)
    cache.release("warm")
    before = cache.usage(), cache.prefix_index.num_cached
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            cache.admit("long", 5 * PAGE_TOKENS)
    assert (cache.usage(), cache.prefix_index.num_cached) == before


def test_a_refusal_tells_what_was_asked_for(cache: VmmKVCache) -> None:
    """Not the one page that the driver could not create."""
    cache.admit("a", PAGE_TOKENS)
    with pytest.raises(OutOfMemory) as caught:
        cache.admit("b", 4 * PAGE_TOKENS)
    refusal = caught.value
    assert (refusal.needed, refusal.free, refusal.unit) == (16, SHORT - 4, "pages")
    assert not refusal.fragmented


def test_another_cache_of_the_pool_makes_room(driver: ShortDriver) -> None:
    pool = PhysicalPool(driver, POOL * PAGE, PAGE)
    with VmmKVCache(TINY, pool=pool) as first, VmmKVCache(TINY, pool=pool) as second:
        first.admit("a", 4 * PAGE_TOKENS)
        with pytest.raises(OutOfMemory):
            second.admit("b", 1)
        first.release("a")
        second.admit("b", 4 * PAGE_TOKENS)
        assert not first.usage().warm and pool.num_created == SHORT


def test_mapping_ahead_takes_nothing_back(driver: ShortDriver) -> None:
    """What was mapped ahead for one would be unmapped for the next, for ever."""
    with VmmKVCache(TINY, POOL * PAGE, PAGE, driver=driver, ahead_tokens=8) as cache:
        assert cache.mapper is not None
        for seq in range(2):
            cache.admit(seq, 2 * PAGE_TOKENS - 20)
        cache.mapper.wait()  # it would find the next growth too, else
        cache.release(1)
        cache.grow([0], 16)
        cache.mapper.wait()
        assert cache.mapper.num_failures == 1
        assert cache.usage().warm == SHORT * PAGE // 2
        assert not cache.grow([0], 16), "who has to grow may"
        cache.check_invariants()


@pytest.mark.parametrize("scrub", [False, True])
def test_random_verbs_on_a_short_system(driver: ShortDriver, scrub: bool) -> None:
    driver.num_pages = 40
    with VmmKVCache(TINY, POOL * PAGE, PAGE, driver=driver, scrub=scrub) as cache:
        walk = Walk(cache, 5, max_prompt=400)
        for turn in range(150):
            verbs = [walk.admit, walk.grow, walk.fork, walk.truncate, walk.release]
            verbs[turn % len(verbs) if walk.tokens else 0]()
            cache.check_invariants()
            walk.read_back()
        assert walk.done["admit refused"] and driver.inner.bytes_in_use  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- memory ahead of need


def test_memory_provided_ahead_is_what_admissions_take(driver: ShortDriver) -> None:
    with VmmKVCache(TINY, 12 * PAGE, PAGE, driver=driver) as cache:
        assert cache.physical.provide(4) == 4
        assert cache.physical.provide() == 8
        assert cache.physical.provide() == 0
        created = driver.calls.count("create")
        cache.admit("a", 3 * PAGE_TOKENS)
        assert driver.calls.count("create") == created == 12
        with pytest.raises(ValueError, match="1 pages asked for, 0 are free"):
            cache.physical.provide(1)
        cache.release("a")
        cache.reclaim()
        assert cache.physical.num_created == 0


def test_what_a_short_system_provided_can_be_returned(cache: VmmKVCache) -> None:
    with pytest.raises(OutOfMemory):
        cache.physical.provide()
    assert cache.physical.num_created == SHORT
    assert cache.physical.trim() == SHORT and cache.physical.num_created == 0


@pytest.mark.parametrize("books", [PagedAllocator, VmmAllocator])
def test_books_alone_take_no_real_pages(
    driver: ShortDriver, books: type[PagedAllocator] | type[VmmAllocator]
) -> None:
    pool: PagePool = PhysicalPool(driver, POOL * PAGE, PAGE)
    with pytest.raises(TypeError, match="give books alone a PagePool"):
        books(TINY, None, PAGE, pool=pool)
    assert not pool.members()


# ---------------------------------------------------------------------- replays


def trace() -> Trace:
    generator = np.random.default_rng(4)
    prompt, output = generator.integers(1, 150, 30), generator.integers(1, 150, 30)
    return Trace("short", "step", np.arange(30) // 4, prompt, output, output)


@pytest.mark.parametrize("on_failure", ["recompute", "swap"])
def test_a_replay_on_a_short_system_is_one_in_less_memory(
    driver: ShortDriver, on_failure: str
) -> None:
    """The scheduler preempts and goes on: who leaves makes room, though pages were free before."""
    driver.num_pages = 32
    counts = []
    for pages in (POOL, 32):
        with VmmKVCache(TINY, pages * PAGE, PAGE, driver=driver) as cache:
            done = replay(trace(), cache, on_failure=on_failure)  # type: ignore[arg-type]
            cache.check_invariants()
        counts.append(asdict(done.counts))
    assert counts[0] == counts[1]
    assert counts[0]["completed"] == 30 and counts[0]["preemptions"]


def test_a_replay_that_the_system_cannot_hold_ends(driver: ShortDriver) -> None:
    driver.num_pages = 8
    with (
        VmmKVCache(TINY, POOL * PAGE, PAGE, driver=driver) as cache,
        pytest.raises(BadInput, match=r"nothing runs, and request .* give the cache less"),
    ):
        replay(trace(), cache)
