"""Books where driver, windows, sharing and threads meet."""

from __future__ import annotations

import threading

import pytest
import torch

from kvalloc.contract import NeverFits, OutOfMemory
from kvalloc.geometry import SLOTS, KVGeometry
from kvalloc.paged import PagedAllocator
from kvalloc.pages import PagePool
from kvalloc.vmm import VmmAllocator, VmmKVCache

WINDOWED = KVGeometry.uniform(
    "windowed", layers=1, q_heads=1, kv_heads=1, head_dim=1, dtype="fp8", window=4
)


class Refusing(VmmAllocator):
    """Books whose n-th attachment from now on fails as a driver does."""

    attaches = True
    countdown = 0
    error: Exception = OutOfMemory(1, 0, 0, unit="pages")

    def _attach(self, row: int, g: int, begin: int, end: int) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error


def test_truncating_into_a_shared_page_is_all_or_nothing() -> None:
    allocator = Refusing(SLOTS, 40, 4)
    allocator.admit("a", 8)
    allocator.fork("a", "b")
    before = allocator.usage()
    allocator.countdown = 1
    with pytest.raises(OutOfMemory):
        allocator.truncate("b", 6)
    assert allocator.usage() == before and allocator.length("b") == 8
    allocator.check_invariants()
    allocator.truncate("b", 6)
    allocator.check_invariants()


def test_a_batch_that_an_error_interrupts_is_booked_as_far_as_it_came() -> None:
    allocator = Refusing(SLOTS, 20, 4)
    for seq in "abc":
        allocator.admit(seq, 4)
    allocator.countdown, allocator.error = 2, RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        allocator.grow(["a", "b", "c"])
    allocator.check_invariants()
    assert [allocator.length(seq) for seq in "abc"] == [5, 4, 4]


@pytest.mark.parametrize("maker", [PagedAllocator, VmmAllocator])
def test_windows_serve_a_batch_as_they_serve_one_after_the_other(
    maker: type[PagedAllocator] | type[VmmAllocator],
) -> None:
    """The page that one leaves behind is there for the next one of the batch."""
    outcomes = []
    for batches in ([["a", "b"]], [["a"], ["b"]]):
        allocator = maker(WINDOWED, 32, 4)
        allocator.admit("a", 8)
        allocator.admit("b", 4)
        outcomes.append([list(allocator.grow(batch)) for batch in batches])
        allocator.check_invariants()
    assert outcomes[0] == [[]] and outcomes[1] == [[], []]


def test_a_windowed_sequence_comes_back_after_it_outgrew_the_memory() -> None:
    allocator = PagedAllocator(WINDOWED, 32, 4)
    allocator.admit("a", 4)
    for _ in range(60):
        assert not allocator.grow(["a"])
    allocator.offload("a")
    allocator.restore("a")
    allocator.check_invariants()
    assert allocator.length("a") == 64


def test_a_windowed_sequence_never_leaves_its_row() -> None:
    """Case 7: a row is never overrun."""
    windowed = KVGeometry.uniform(
        "w", layers=1, q_heads=1, kv_heads=1, head_dim=16, dtype="float32", window=64
    )
    with VmmKVCache(windowed, 8 * 4096, 4096) as cache:
        cache.admit("a", 1)
        while cache.length("a") < cache.capacity:
            assert not cache.grow(["a"])
        with pytest.raises(NeverFits):
            cache.grow(["a"])
        cache.admit("b", 60)
        cache.check_invariants()
    with VmmKVCache(windowed, 8 * 4096, 4096, limit=1000) as cache:
        cache.admit("a", 1)
        while cache.length("a") < 1000:
            assert not cache.grow(["a"])
        cache.admit("b", 60)
        cache.check_invariants()


def test_a_dropped_member_takes_nothing_from_the_others() -> None:
    pool = PagePool(10)
    first = PagedAllocator(SLOTS, None, 4, pool=pool)
    second = PagedAllocator(SLOTS, None, 4, pool=pool)
    first.admit("a", 16, prefix=[("x", 16)])
    first.release("a")
    del first
    with pytest.raises(OutOfMemory):
        second.admit("b", 40)
    second.admit("b", 24)
    assert second.usage().free == 0


def test_usage_on_a_shared_pool() -> None:
    """What is held is one's own; what is free, and warm, is the pool's."""
    pool = PagePool(10)
    first, second = (PagedAllocator(SLOTS, None, 4, pool=pool) for _ in range(2))
    first.admit("a", 6)
    second.admit("b", 16, prefix=[("x", 16)])
    second.release("b")  # its pages wait in the index
    second.admit("c", 4)
    one, other = first.usage(), second.usage()
    assert (one.live, one.reserved, other.live, other.reserved) == (6, 8, 4, 4)
    assert (one.free, one.warm) == (other.free, other.warm) == (28, 16)
    assert (one.capacity, other.capacity) == (36, 32)
    assert one.reserved + other.reserved + one.free == 40 == first.capacity == second.capacity


def test_a_prefix_without_hits_leaves_rows_warm() -> None:
    counting = Refusing(SLOTS, 64, 8)
    for turn in range(20):
        counting.admit(turn, 7, prefix=[(turn, 7)])
        counting.release(turn)
    assert counting.countdown == -1, "one attachment, then the warm page"


def test_reclaim_and_mapping_ahead_do_not_meet() -> None:
    """A page whose memory is going is not mapped: what was written is what is read."""
    plain = KVGeometry.uniform("p", layers=1, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")
    with VmmKVCache(plain, 64 * 4096, 4096, limit=512) as cache:
        cache.admit("a", 64)
        cache.admit("b", 64)
        cache.release("b")
        release = cache.physical.driver.release

        def meddling(handle: int) -> None:
            thread = threading.Thread(target=cache.map_ahead, args=(cache._seqs.row("a"), 64, 1))
            thread.start()
            thread.join(0.05)
            release(handle)

        cache.physical.driver.release = meddling  # type: ignore[method-assign]
        cache.reclaim()
        cache.physical.driver.release = release  # type: ignore[method-assign]
        assert not cache.grow(["a"], 64)
        ones = torch.ones(128, 1, 16)
        cache.write(0, ["a"], ones, ones, lens=[128])
        cache.fork("a", "b")
        view = cache.view(0, ["a", "b"])
        for start in view.starts.tolist():
            assert float(view.k[start : start + 128].sum()) == 128 * 16
        cache.check_invariants()
        del view


def test_integers_of_any_width_are_the_same_key() -> None:
    np = pytest.importorskip("numpy")
    allocator = PagedAllocator(SLOTS, 64, 4)
    allocator.admit("a", 8, prefix=[(5, 8)])
    assert allocator.admit("b", 8, prefix=[(np.uint32(5), 8)]) == 4


@pytest.mark.parametrize("maker", [PagedAllocator, VmmAllocator])
def test_negative_expectations_are_refused(
    maker: type[PagedAllocator] | type[VmmAllocator],
) -> None:
    with pytest.raises(ValueError, match="max_new"):
        maker(SLOTS, 64, 4).admit("a", 8, max_new=-5)


@pytest.mark.parametrize("batch", [{"a": 0}.keys(), {"a"}, iter(["a"])])
def test_a_batch_without_order_is_refused(batch: object) -> None:
    allocator = PagedAllocator(SLOTS, 64, 4)
    allocator.admit("a", 4)
    with pytest.raises(TypeError, match="batch"):
        allocator.grow(batch)  # type: ignore[arg-type]
    allocator.check_invariants()


def test_what_is_written_carries_no_gradient() -> None:
    plain = KVGeometry.uniform("p", layers=1, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")
    with VmmKVCache(plain, 64 * 4096, 4096, limit=512) as cache:
        cache.admit("a", 1)
        k = torch.randn(1, 1, 16, requires_grad=True)
        cache.write(0, ["a"], k * 2, k * 2)
        assert not cache.view(0, ["a"]).k.requires_grad


def test_a_batch_evicts_what_one_after_the_other_would() -> None:
    """What a window lets go of serves the next one of the batch: no prefix has to go for it."""
    hits = []
    for batches in ([["a", "b"]], [["a"], ["b"]]):
        allocator = PagedAllocator(WINDOWED, 48, 4)  # six pages
        allocator.admit("old", 8, prefix=[("x", 8)])
        allocator.release("old")
        allocator.admit("a", 8)
        allocator.admit("b", 4)
        for batch in batches:
            assert not allocator.grow(batch)
        allocator.check_invariants()
        hits.append(allocator.prefix_index.num_cached)
    assert hits == [2, 2]
