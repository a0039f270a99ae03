"""Cases 6, 8 and 17 to 19, which broke the books of other KV-cache managers, one test each.

Each docstring names the project where it happened to somebody.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from kvalloc.contract import Allocator
from kvalloc.pages import PagePool
from kvalloc.pages.prefix import unit_keys
from kvalloc.tests.backends import (
    BACKENDS,
    Backend,
    every_backend,
    page_allocator,
    pages_of_4,
    slots_of,
    tokens_of,
)


def test_case_06_the_order_of_reuse_is_pinned() -> None:
    """vLLM 48489: the order in which freed pages are reused changed by accident."""
    pool = PagePool(8)
    assert pool.take(3).tolist() == [0, 1, 2], "never used pages in ascending order"
    assert pool.take(2).tolist() == [3, 4]
    pool.put(pool.drop(np.array([1, 0], np.intp)))
    pool.put(pool.drop(np.array([4], np.intp)))
    assert pool.take(4).tolist() == [4, 1, 0, 5], "last freed first; of one list, its first"

    order = {
        "contiguous:max": [*range(12, 24), *range(4)],  # the lowest hole that is large enough
        "contiguous:exact:buddy": [*range(16, 32), *range(12, 16)],  # the tightest block
        "paged:4": [*range(12, 20), *range(4), *range(4, 8)],  # c's pages, then a's
        "vmm:4": [*range(8), *range(20, 24), *range(12, 16)],  # a's row and one more, c's row
    }
    for name, places in order.items():
        assert placed_again(BACKENDS[name].make(32)) == places, name


def placed_again(allocator: Allocator) -> list[int]:
    """Where 12 and 4 tokens go after the outer two of 8, 4 and 8 were freed, the first first."""
    for seq, size in (("a", 8), ("b", 4), ("c", 8)):
        allocator.admit(seq, size, max_new=0)
    for seq in ("a", "c"):
        allocator.release(seq)
    allocator.admit("d", 12, max_new=0)
    allocator.admit("e", 4, max_new=0)
    return slots_of(allocator, "d") + slots_of(allocator, "e")


@pytest.mark.parametrize("by_need", [False, True])
@pages_of_4
def test_case_06_the_order_of_eviction_is_pinned(name: str, by_need: bool) -> None:
    """Of prompts that nobody holds the longest unused goes first, of one prompt its last unit."""
    allocator = page_allocator(name, 32)
    for seq in "xyz":
        allocator.admit(seq, 8, prefix=tokens_of(seq, 8))
    for seq in "yxz":
        allocator.release(seq)
    allocator.admit("late", 9, prefix=tokens_of("y", 8))  # makes y the last that was used
    allocator.release("late")
    allocator.admit("hog", 8)  # no page is free now
    keys = [unit_keys(tokens_of(seq, 8), 8, 4) for seq in "xzy"]
    hits = []
    for _ in range(6):
        if by_need:
            assert not allocator.grow(["hog"], 4)
        else:
            allocator.give_back(1)
        allocator.check_invariants()
        hits.append([allocator.prefix_index.match(of_seq, 1) for of_seq in keys])
    assert hits == [[1, 2, 2], [0, 2, 2], [0, 1, 2], [0, 0, 2], [0, 0, 1], [0, 0, 0]]


@every_backend
def test_case_08_a_page_is_freed_once(backend: Backend) -> None:
    """vLLM 42571: the same page twice in one release batch."""
    allocator = backend.make(256)
    allocator.admit("a", 33, max_new=0, prefix=tokens_of("p", 33))
    allocator.fork("a", "b")
    allocator.admit("c", 33, max_new=0, prefix=tokens_of("p", 33))
    for seq in "bac":  # all hold the same pages where there are pages
        allocator.release(seq)
        allocator.check_invariants()
    assert allocator.usage().free == 256

    pool = PagePool(4)
    pages = pool.take(3)
    pool.share(pages[:1])
    for batch in ([0, 1, 0], [1, 1], [3], [2, 3]):
        with pytest.raises(ValueError, match="nothing was changed"):
            pool.drop(np.array(batch, np.intp))
        assert pool.refs(np.arange(4, dtype=np.intp)).tolist() == [2, 1, 1, 0]
    assert pool.drop(pages).tolist() == [1, 2], "a page that somebody else holds stays"


@every_backend
def test_case_17_no_two_sequences_alias_a_slot(backend: Backend) -> None:
    """SGLang 38840: the page decision ignored an offset. Sharing on purpose is full pages only."""
    page = backend.page
    allocator = backend.make(512)
    allocator.admit("a", 37, max_new=8, prefix=tokens_of("p", 37))
    cached = allocator.admit("b", 50, max_new=8, prefix=tokens_of("p", 37))  # from an offset on
    allocator.fork("b", "c")
    allocator.admit("d", 5, max_new=8)
    shared = {
        frozenset("ab"): cached,
        frozenset("ac"): cached,
        frozenset("bc"): 50 // page * page if page else 0,
    }
    for _ in range(8):
        allocator.grow(["c", "a", "d", "b"])
        allocator.check_invariants()
        held = {seq: slots_of(allocator, seq) for seq in "abcd"}
        for seq, slots in held.items():
            length = allocator.length(seq)
            assert len(set(slots)) == len(slots) >= length
            assert page is None or len(slots) == -(-length // page) * page
        for pair in combinations("abcd", 2):
            common = set(held[pair[0]]) & set(held[pair[1]])
            assert len(common) == shared.get(frozenset(pair), 0), pair


@every_backend
def test_case_18_releasing_twice_raises(backend: Backend) -> None:
    """LMDeploy 1263d5c: a second release silently made a reference count −1."""
    allocator = backend.make(256)
    allocator.admit("a", 32, max_new=0, prefix=tokens_of("p", 32))
    allocator.fork("a", "fork")
    allocator.admit("b", 33, max_new=0, prefix=tokens_of("p", 32))
    allocator.admit("away", 5, max_new=0)
    allocator.offload("away")
    for seq in ("fork", "a", "away"):
        allocator.release(seq)
        before = allocator.usage()
        with pytest.raises(KeyError, match=f"'{seq}'"):
            allocator.release(seq)
        assert allocator.usage() == before
        allocator.check_invariants()
    assert allocator.length("b") == 33


def negative_counts() -> dict[str, Callable[[Allocator], object]]:
    return {
        "admit": lambda x: x.admit("new", -1, max_new=0),
        "admit headroom": lambda x: x.admit("new", 1, max_new=0, headroom=-1),
        "grow": lambda x: x.grow(["a"], -1),
        "truncate": lambda x: x.truncate("a", -1),
        "restore": lambda x: x.restore("away", headroom=-1),
    }


@pytest.mark.parametrize("verb", negative_counts())
@every_backend
def test_case_19_a_negative_count_raises(backend: Backend, verb: str) -> None:
    """vLLM: asking for −1 pages returned [] and added one to the free counter."""
    allocator = backend.make(64)
    allocator.admit("a", 9, max_new=0)
    allocator.admit("away", 9, max_new=0)
    allocator.offload("away")
    before = allocator.usage()
    with pytest.raises(ValueError, match="must not be negative"):
        negative_counts()[verb](allocator)
    assert allocator.usage() == before
    allocator.check_invariants()


def test_case_19_a_pool_hands_out_no_negative_number_of_pages() -> None:
    pool = PagePool(4)
    for num_pages in (-1, 5):
        with pytest.raises(ValueError, match="asked for, 4 are free"):
            pool.take(num_pages)
        assert pool.num_free == 4
