"""Cases 7, 13 and 15, which broke the rows and pages of growing sequences elsewhere.

Each docstring names the project where it happened to somebody.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contract import Allocator, NeverFits
from kvalloc.geometry import SLOTS
from kvalloc.paged import PagedAllocator
from kvalloc.tests.backends import page_allocator, pages_of_4, slots_of, tokens_of
from kvalloc.tests.state_machine import Walk
from kvalloc.tests.state_machine_backends import (
    PAGE,
    PLAIN,
    STRADDLING,
    WINDOWED,
    WINDOWED_STRADDLING,
    contiguous,
    paged,
    vmm,
)
from kvalloc.vmm import VmmAllocator, VmmKVCache

LIMIT = 90  # tokens; no multiple of a page
LIMITED: dict[str, Callable[[], Allocator]] = {
    "books contiguous:max": lambda: ContiguousAllocator(SLOTS, 300, limit=LIMIT),
    "books contiguous:exact": lambda: ContiguousAllocator(SLOTS, 300, policy="exact", limit=LIMIT),
    "books contiguous:exact:buddy": lambda: ContiguousAllocator(
        SLOTS, 300, policy="exact", placement="buddy", limit=LIMIT
    ),
    "books paged:4": lambda: PagedAllocator(SLOTS, 300, 4, limit=LIMIT),
    "books paged:16": lambda: PagedAllocator(SLOTS, 300, 16, limit=LIMIT),
    "books vmm:4": lambda: VmmAllocator(SLOTS, 300, 4, limit=LIMIT),
    "books vmm:16": lambda: VmmAllocator(SLOTS, 300, 16, limit=LIMIT),
    "contiguous": contiguous(PLAIN, 300, limit=LIMIT),
    "paged": paged(PLAIN, 400, 16, limit=LIMIT),
    "paged windowed": paged(WINDOWED, 400, 8, limit=LIMIT),
    "vmm": vmm(PLAIN, 60, limit=LIMIT),
    "vmm straddling": vmm(STRADDLING, 60, limit=LIMIT),
    "vmm windowed": vmm(WINDOWED, 60, limit=LIMIT),
    "vmm interleaved": vmm(PLAIN, 40, limit=LIMIT, layout="interleaved"),
    "vmm mapping ahead": vmm(PLAIN, 60, limit=LIMIT, ahead_tokens=16),
}


def begun(cache: Allocator, lengths: dict[int, int]) -> Walk:
    """A walk that has written sequences of these lengths."""
    walk = Walk(cache, 0)
    for seq, length in lengths.items():
        cache.admit(seq, length, max_new=LIMIT - length, expected_new=0)
        walk.tokens[seq] = walk.contents(0, length)
        walk.write([seq], [length])
    return walk


@pytest.mark.parametrize("name", LIMITED)
def test_case_07_a_growth_past_the_end_of_the_row_changes_nothing(name: str) -> None:
    """vLLM 10730: look-ahead tokens pushed a sequence past its row."""
    cache = LIMITED[name]()
    walk = begun(cache, {1: 5, 2: LIMIT - 2})
    for batch in ([2], [1, 2], [2, 1]):
        before = walk.books(), walk.lengths(), [cache.spans(seq) for seq in (1, 2)]
        with pytest.raises(NeverFits):
            cache.grow(batch, 3)
        assert (walk.books(), walk.lengths(), [cache.spans(seq) for seq in (1, 2)]) == before
        walk.check()
    assert not cache.grow([2], 2)
    walk.tokens[2] += walk.contents(LIMIT - 2, LIMIT)
    walk.write([2], [2])
    walk.check()
    with pytest.raises(NeverFits):
        cache.grow([2])
    walk.drain()
    getattr(cache, "close", int)()


@pytest.mark.parametrize("layout", ["token-major", "head-major", "interleaved"])
def test_case_07_mapping_ahead_ends_with_the_row(layout: str) -> None:
    """More pages ahead than the row has left: none of them lies in the row behind."""
    cache = VmmKVCache(
        PLAIN, 120 * PAGE, PAGE, limit=LIMIT, layout=layout, ahead_tokens=LIMIT, ahead_pages=9
    )
    with cache:
        walk = begun(cache, {1: 40, 2: LIMIT, 3: LIMIT - 1})
        assert cache.mapper is not None
        cache.mapper.wait()
        assert cache.mapper.num_failures == 0
        most = cache._pages_for(LIMIT, 0)
        assert cache._ready[0][:3].tolist() == [most] * 3
        walk.check()


@pytest.mark.parametrize("history", ["fresh", "cut", "hit", "fork", "restored"])
@pages_of_4
def test_case_13_the_length_decides_on_a_new_page(name: str, history: str) -> None:
    """SGLang 6671: tokens computed here were counted, not those that are there."""
    allocator = page_allocator(name, 64)
    prompt = tokens_of("p", 9)
    if history == "cut":
        allocator.admit("a", 20)
        allocator.truncate("a", 9)
    elif history == "hit":
        allocator.admit("other", 9, prefix=prompt)
        assert allocator.admit("a", 9, prefix=prompt) == 8, "one token is left to compute"
    elif history == "fork":
        allocator.admit("other", 9)
        allocator.fork("other", "a")
    else:
        allocator.admit("a", 9)
        if history == "restored":
            allocator.offload("a")
            allocator.restore("a")
    held = []
    for length in range(9, 18):
        assert allocator.length("a") == length
        held.append(len(slots_of(allocator, "a")) // 4)
        assert not allocator.grow(["a"])
        allocator.check_invariants()
    assert held == [3, 3, 3, 3, 4, 4, 4, 4, 5], "a new one iff the last one was full"


@pytest.mark.parametrize("layout", ["token-major", "head-major", "interleaved"])
def test_case_15_what_a_window_left_and_a_release_meet_inside_a_page(layout: str) -> None:
    """SGLang 38941, 39387: two freed ranges met inside one page, which was freed twice."""
    with vmm(WINDOWED_STRADDLING, 120, layout=layout)() as cache:
        walk = begun(cache, {1: 50})
        cache.fork(1, 2)
        walk.tokens[2] = list(walk.tokens[1])
        for length in range(50, 100):  # both leave the same unit behind, then one of their own
            for seq in (1, 2):
                assert not cache.grow([seq])
                walk.tokens[seq] += walk.contents(length, length + 1)
                walk.write([seq], [1])
            walk.check()
        assert isinstance(cache, VmmKVCache)
        assert (cache._gone[0][:2] * PAGE // cache.groups[0].token_bytes).tolist() == [64, 64]
        walk.drain()
