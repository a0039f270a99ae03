"""What the mapped backend promises beyond the contract: warm rows, mapping ahead, one pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic

import pytest
import torch

from kvalloc.contract import OutOfMemory
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.host_memory import file_bytes, shared_bytes
from kvalloc.tests.state_machine import Walk
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.host import HostDriver
from kvalloc.vmm.physical import PhysicalPool

PAGE = 4096
TINY = KVGeometry("tiny", (LayerShape(1, 16),) * 2, 1, "float32", max_context=512)
WIDE = KVGeometry("wide", (LayerShape(2, 32),), 2, "float32", max_context=256)
PAGE_TOKENS = PAGE // 64  # of TINY, in each of its four buffers


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    made = HostDriver(PAGE)
    yield made
    made.close()


def calls(driver: HostDriver) -> int:
    return sum(driver.num_calls.values())


def serve(cache: VmmKVCache, num: int, prompt: int, output: int) -> None:
    """Eight at a time, each grown to its end."""
    for first in range(0, num, 8):
        batch = list(range(first, first + 8))
        for seq in batch:
            cache.admit(seq, prompt)
        for _ in range(output):
            assert not cache.grow(batch)
        for seq in batch:
            cache.release(seq)


def test_second_pass_over_a_uniform_trace_makes_no_driver_call(driver: HostDriver) -> None:
    with VmmKVCache(TINY, 300 * PAGE, driver=driver, page_bytes=PAGE) as cache:
        serve(cache, 24, 100, 80)
        before = calls(driver)
        serve(cache, 24, 100, 80)
        assert calls(driver) == before
        cache.check_invariants()


def test_growing_within_a_page_makes_no_driver_call(driver: HostDriver) -> None:
    with VmmKVCache(TINY, 40 * PAGE, driver=driver, page_bytes=PAGE) as cache:
        cache.admit("a", 1)
        before = calls(driver)
        for _ in range(PAGE_TOKENS - 1):
            cache.grow(["a"])
        assert calls(driver) == before
        cache.grow(["a"])
        assert calls(driver) > before


def test_one_access_grant_per_run_of_pages(driver: HostDriver) -> None:
    with VmmKVCache(TINY, 80 * PAGE, driver=driver, page_bytes=PAGE) as cache:
        cache.admit("a", 5 * PAGE_TOKENS)
        assert driver.num_calls["map"] == driver.num_calls["create"] == 20
        assert driver.num_calls["allow"] == 4


# ---------------------------------------------------------------------- memory that returns


def test_memory_returns_after_reclaim_and_after_close(driver: HostDriver) -> None:
    """Read from the system, not from our own books (case 31)."""
    taken, shared = file_bytes(driver), shared_bytes()
    cache = VmmKVCache(TINY, 400 * PAGE, driver=driver, page_bytes=PAGE)
    for seq in range(8):
        cache.admit(seq, 300)
    assert file_bytes(driver) >= taken + 8 * 5 * 4 * PAGE
    for seq in range(8):
        cache.release(seq)
    assert cache.usage().warm > 0
    cache.reclaim()
    assert file_bytes(driver) == taken and shared_bytes() == shared
    cache.admit("again", 300)
    cache.close()
    assert file_bytes(driver) == taken and shared_bytes() == shared
    assert driver.bytes_in_use == 0


def test_nothing_is_left_after_ten_thousand_rounds(driver: HostDriver) -> None:
    with VmmKVCache(TINY, 64 * PAGE, driver=driver, page_bytes=PAGE) as cache:
        for round_ in range(10_000):
            cache.admit(round_, 1 + round_ * 37 % 200)
            if round_ % 3 == 0:
                cache.grow([round_], 70)
            if round_ % 500 == 0:
                cache.reclaim()
            cache.release(round_)
        cache.check_invariants()
        assert cache.physical.num_created <= 64
        cache.reclaim()
        assert file_bytes(driver) == driver.bytes_in_use == 0


# ---------------------------------------------------------------------- one pool, two models


def test_two_caches_draw_on_one_pool(driver: HostDriver) -> None:
    """One model shrinks, the other grows; contents stay apart and every page is somewhere."""
    pool = PhysicalPool(driver, 40 * PAGE, PAGE)
    with VmmKVCache(TINY, pool=pool) as first, VmmKVCache(WIDE, pool=pool) as second:
        walks = Walk(first, 1, max_prompt=400), Walk(second, 2, max_prompt=200)
        for turn in range(60):
            walk = walks[turn % 2]
            for verb in (walk.admit, walk.grow if walk.tokens else walk.admit):
                verb()
            if turn % 3 == 2 and walk.tokens:
                walk.release()
            for each in walks:
                each.cache.check_invariants()
                each.read_back()
            first_pages, second_pages = first.count_refs(), second.count_refs()
            assert not (first_pages * second_pages).any(), "a page is seen by both models"
        assert walks[0].done["admit refused"] + walks[1].done["admit refused"]


def test_what_one_cache_gives_back_the_other_takes(driver: HostDriver) -> None:
    pool = PhysicalPool(driver, 40 * PAGE, PAGE)
    with VmmKVCache(TINY, pool=pool) as first, VmmKVCache(WIDE, pool=pool) as second:
        first.admit("a", 512)  # 8 pages in each of 4 buffers
        with pytest.raises(OutOfMemory):
            second.admit("b", 256)  # 16 in each of 2
        first.release("a")
        assert first.usage().warm == 32 * PAGE
        second.admit("b", 256)
        assert pool.num_created == 32, "the same memory"
        second.check_invariants()
        with pytest.raises(OutOfMemory):
            first.admit("c", 256)


@pytest.mark.parametrize("scrub", [False, True])
def test_a_cache_that_closes_leaves_its_pages_to_the_others(
    driver: HostDriver, scrub: bool
) -> None:
    pool = PhysicalPool(driver, 40 * PAGE, PAGE)
    first, second, third = (VmmKVCache(TINY, pool=pool, scrub=scrub) for _ in range(3))
    for seq in range(4):
        first.admit(seq, 64, prefix=[(seq, 64)])
    first.release(0)  # one in the index, warm ones, an offloaded one, and live ones
    first.admit("warm", 64)
    first.release("warm")
    first.offload(1)
    first.close()
    assert pool.num_created == 0, "their memory too"
    second.check_invariants()
    third.admit("a", 300)
    third.release("a")
    assert third.usage().warm
    second.admit("b", 512)  # takes the warm pages of the third, and asks no closed cache
    for cache in (second, third):
        cache.check_invariants()
    third.close()
    second.check_invariants()
    second.close()
    assert not pool.members() and pool.num_free == 40
    assert driver.bytes_in_use == 0


def test_a_pool_remembers_no_cache_that_is_gone(driver: HostDriver) -> None:
    pool = PhysicalPool(driver, 40 * PAGE, PAGE)
    with VmmKVCache(TINY, pool=pool) as cache:
        for _ in range(20):
            VmmKVCache(WIDE, pool=pool).close()
            with pytest.raises(ValueError):
                VmmKVCache(WIDE, pool=pool, max_rows=0)
            assert len(pool._members) == 1 and pool.members() == [cache]


def test_a_pool_excludes_memory_of_its_own(driver: HostDriver) -> None:
    pool = PhysicalPool(driver, 40 * PAGE, PAGE)
    with pytest.raises(ValueError, match="leave those out"):
        VmmKVCache(TINY, 40 * PAGE, pool=pool)
    with pytest.raises(ValueError, match="granularity"):
        PhysicalPool(driver, 40 * PAGE, PAGE + 1)


# ---------------------------------------------------------------------- mapping ahead


def test_pages_mapped_ahead_cost_grow_no_call(driver: HostDriver) -> None:
    with VmmKVCache(TINY, 200 * PAGE, driver=driver, page_bytes=PAGE, ahead_tokens=8) as cache:
        assert cache.mapper is not None
        for seq in range(4):
            cache.admit(seq, PAGE_TOKENS - 4)
        cache.mapper.wait()
        before = calls(driver)
        cache.grow([0, 1, 2, 3], 4)
        cache.mapper.wait()
        assert cache.mapper.num_pages == 16
        mapped = calls(driver)
        assert mapped == before, "the pages were there before the boundary"
        assert not cache.grow([0, 1, 2, 3])
        assert calls(driver) == mapped
        cache.check_invariants()


def test_pages_mapped_ahead_are_free_for_others(driver: HostDriver) -> None:
    with VmmKVCache(TINY, 16 * PAGE, driver=driver, page_bytes=PAGE, ahead_tokens=64) as cache:
        cache.admit("a", PAGE_TOKENS)
        assert cache.mapper is not None
        cache.mapper.wait()
        assert cache.usage().warm == 4 * PAGE
        cache.admit("b", 3 * PAGE_TOKENS)  # takes the pages mapped ahead back
        cache.mapper.wait()
        cache.check_invariants()
        assert set(cache.grow(["a"])) == {"a"}


def test_failure_while_mapping_ahead_is_a_later_refusal(driver: HostDriver) -> None:
    """The page is neither lost nor double; the sequence grows once the driver works again."""
    failing = FailingDriver(driver)
    with VmmKVCache(TINY, 60 * PAGE, driver=failing, page_bytes=PAGE, ahead_tokens=8) as cache:
        assert cache.mapper is not None
        cache.admit("a", PAGE_TOKENS - 16)
        cache.mapper.wait()
        failing.arm(1, OutOfMemory(1, 0, 0, unit="pages"), {"map"})
        cache.grow(["a"], 10)
        cache.mapper.wait()
        assert failing.failed and cache.mapper.num_failures == 1
        cache.check_invariants()
        assert not cache.grow(["a"], 10)
        cache.check_invariants()


def test_mapper_and_caller_at_full_speed_end(driver: HostDriver) -> None:
    """Case 33: no deadlock on the interpreter lock, no page lost, close joins."""
    cache = VmmKVCache(
        TINY, 120 * PAGE, driver=driver, page_bytes=PAGE, ahead_tokens=64, ahead_pages=2
    )
    walk = Walk(cache, 3, max_prompt=200)
    deadline = monotonic() + 3
    while monotonic() < deadline:
        walk.admit()
        for _ in range(6):
            if walk.tokens:
                walk.grow()
        walk.read_back()
        while len(walk.tokens) > 4:
            walk.release()
        cache.check_invariants()
    cache.close()
    assert not [t for t in threading.enumerate() if t.name == "kvalloc-mapper"]
    assert driver.bytes_in_use == 0


def test_a_cache_that_is_dropped_ends_its_mapper() -> None:
    cache = VmmKVCache(TINY, 60 * PAGE, PAGE, ahead_tokens=8)
    mapper = cache.mapper
    assert mapper is not None
    del cache
    mapper._thread.join(timeout=10)
    assert not mapper._thread.is_alive()


@pytest.mark.parametrize("options", [{"ahead_tokens": -1}, {"ahead_tokens": 4, "ahead_pages": 0}])
def test_senseless_distance_and_depth_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        VmmKVCache(TINY, 60 * PAGE, PAGE, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- guard and scrub


def test_guard_zero_reads_zeros_past_the_end() -> None:
    with VmmKVCache(TINY, 60 * PAGE, PAGE, guard="zero") as cache:
        cache.admit("a", 3)
        assert torch.equal(cache.view(0, ["a"]).k[PAGE_TOKENS * 2], torch.zeros(1, 16))


def test_scrubbed_pages_hold_no_secret(driver: HostDriver) -> None:
    """Written, released, adopted by another sequence: the first one's content is gone."""
    secret = torch.full((PAGE_TOKENS * 2, 1, 16), 1234.5)
    for scrub, seen in ((False, True), (True, False)):
        with VmmKVCache(TINY, 40 * PAGE, driver=driver, page_bytes=PAGE, scrub=scrub) as cache:
            cache.admit("secret", PAGE_TOKENS * 2)
            for layer in range(2):
                cache.write(layer, ["secret"], secret, secret, lens=[PAGE_TOKENS * 2])
            cache.release("secret")
            cache.admit("other", PAGE_TOKENS * 2)
            view = cache.view(0, ["other"])
            start = int(view.starts[0])
            assert bool((view.k[start : start + PAGE_TOKENS * 2] == 1234.5).any()) == seen
            del view


@pytest.mark.parametrize("change", ["begin_to_scrub", "provide", "trim", "join", "leave"])
def test_what_changes_a_pool_waits_for_its_lock(driver: HostDriver, change: str) -> None:
    """Pages are taken, and caches made and closed, in other threads meanwhile."""
    pool = PhysicalPool(driver, 8 * PAGE, PAGE)
    with VmmKVCache(TINY, pool=pool) as cache:
        arguments = (cache,) if change in ("join", "leave") else ()
        other = threading.Thread(target=getattr(pool, change), args=arguments)
        with pool.lock:
            other.start()
            other.join(0.2)
            assert other.is_alive(), "it did not wait"
        other.join(60)
        assert not other.is_alive()
