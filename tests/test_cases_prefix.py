"""Cases 1 to 5, which broke the prefix reuse of other KV-cache managers, one test each.

Each docstring names the project where it happened to somebody.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvalloc.contract import KVCache, OutOfMemory
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.backends import (
    Backend,
    every_backend,
    page_allocator,
    pages_of_4,
    slots_of,
    tokens_of,
)
from kvalloc.tests.state_machine import Walk
from kvalloc.tests.state_machine_backends import PLAIN, contiguous, paged, vmm

# Pages of 32 tokens in every layer: 4,096 bytes of 128 each where they are mapped.
CACHES = {
    "contiguous": contiguous(PLAIN, 400),
    "paged": paged(PLAIN, 400, 32),
    "vmm": vmm(PLAIN, 60),
}
WINDOW = KVGeometry(
    "window", (LayerShape(2, 16, window=40), LayerShape(2, 16)), 2, "float32", max_context=400
)
WINDOWED = {
    "contiguous": contiguous(WINDOW, 400),
    "paged": paged(WINDOW, 600, 8),
    "vmm": vmm(WINDOW, 60),
    "vmm interleaved": vmm(WINDOW, 60, layout="interleaved"),
}


@every_backend
@pytest.mark.parametrize("num_units", [1, 2, 3])
def test_case_01_a_prompt_of_whole_pages_leaves_one_token(backend: Backend, num_units: int) -> None:
    """vLLM 11186, 9972; nano-vllm 144: all of k·B tokens cached; reuse ⌊(n−1)/B⌋·B."""
    page = backend.page or 16
    n = num_units * page
    allocator = backend.make(256)
    assert allocator.admit("a", n, max_new=0, prefix=tokens_of("p", n)) == 0
    for seq in ("b", "c"):  # while the first lives, and again
        cached = allocator.admit(seq, n, max_new=0, prefix=tokens_of("p", n))
        assert cached == ((n - 1) // page * page if backend.page else 0)
        allocator.check_invariants()
    for seq in "abc":
        allocator.release(seq)
    cached = allocator.admit("d", n, max_new=0, prefix=tokens_of("p", n))  # out of the index
    assert cached == ((n - 1) // page * page if backend.page else 0)
    allocator.check_invariants()


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("name", CACHES)
def test_case_02_the_same_prompt_twice_gives_the_same_output(name: str, length: int) -> None:
    """vLLM 8268: B = 32, a prompt of 33 tokens twice (31 too)."""
    with CACHES[name]() as cache:
        queries = torch.randn(length, 4, 16, generator=torch.Generator().manual_seed(0))
        outputs = []
        for seq in (1, 2, 3):
            cached = cache.admit(seq, length, max_new=0, prefix=tokens_of("p", length))
            assert cached == (0 if seq == 1 or name == "contiguous" else (length - 1) // 32 * 32)
            write_rest(cache, seq, length, cached)
            outputs.append(reference_attention(queries, cache.view(1, [seq]), q_lens=[length]))
            cache.check_invariants()
            if seq == 2:
                cache.release(1)
                cache.release(2)
        assert outputs[0].abs().sum() > 0
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def write_rest(cache: KVCache, seq: int, length: int, cached: int) -> None:
    """Write the tokens of a prompt that were not cached; the same values for every sequence."""
    for layer in range(2):
        source = torch.Generator().manual_seed(layer)
        k, v = torch.randn(2, length, 2, 16, generator=source)
        cache.write(layer, [seq], k[cached:], v[cached:], lens=[length - cached])


@pages_of_4
def test_case_03_claimed_pages_then_too_little_memory(name: str) -> None:
    """vLLM 11562: refused; refcounts, order of eviction and free pages are as before."""
    allocator = page_allocator(name, 32)
    for seq in ("x", "y"):
        allocator.admit(seq, 8, prefix=tokens_of(seq, 8))
    for seq in ("x", "y"):
        allocator.release(seq)
    allocator.admit("hog", 12)  # 3 of 8 pages; x and y wait in the index with 2 each
    allocator.admit("reader", 9, prefix=tokens_of("y", 8))  # y is in use, and no page is free

    def state() -> tuple[Any, ...]:
        pool, index = allocator.pool, allocator.prefix_index
        refs = pool.refs(np.arange(8, dtype=np.intp)).tolist()
        return refs, list(index._idle), pool._free[: pool.num_free].tolist(), allocator.usage()

    before = state()
    for prompt in ("x", "y"):  # x would be claimed out of the index, y shared with its reader
        runs = [*tokens_of(prompt, 8), *tokens_of("new", 12)]
        with pytest.raises(OutOfMemory):
            allocator.admit("late", 20, prefix=runs)
        allocator.check_invariants()
        assert state() == before
    allocator.release("hog")
    runs = [*tokens_of("x", 8), *tokens_of("new", 12)]
    assert allocator.admit("late", 20, prefix=runs) == 8, "later it may succeed, x still cached"
    allocator.check_invariants()


@pytest.mark.parametrize("name", WINDOWED)
def test_case_04_a_fork_behind_a_window_sees_live_pages_only(name: str) -> None:
    """vLLM 20512: fork after the window dropped leading pages."""
    with WINDOWED[name]() as cache:
        walk = Walk(cache, 0)
        walk.tokens[1] = list(range(100))
        cache.admit(1, 100, max_new=60)
        walk.write([1], [100])
        for token in range(100, 140):
            cache.grow([1])
            walk.tokens[1].append(token)
            walk.write([1], None)
        first = [len(walk.tokens[1]) - readable(cache, layer, 1) for layer in (0, 1)]
        assert first[1] == 0 and (first[0] > 0) == (name != "contiguous")
        cache.fork(1, 2)
        walk.tokens[2] = list(walk.tokens[1])
        cache.check_invariants()
        walk.read_back()
        assert [140 - readable(cache, layer, 2) for layer in (0, 1)] == first
        cache.release(1)
        cache.grow([2], 3)
        walk.tokens = {2: [*walk.tokens[2], 7, 8, 9]}
        walk.write([2], [3])
        cache.check_invariants()
        walk.read_back()
        cache.release(2)
        cache.check_invariants()
        assert cache.usage().free == cache.usage().capacity


def readable(cache: KVCache, layer: int, seq: int) -> int:
    """Tokens of a sequence that a view of a layer still shows."""
    view = cache.view(layer, [seq])
    return int(view.lengths[0]) - int(getattr(view, "first", torch.zeros(1))[0])


@pages_of_4
def test_case_05_a_page_that_waits_in_the_index_is_pinned_once(name: str) -> None:
    """TensorRT-LLM 12667: a page pinned while it sits in the free list, then listed twice."""
    allocator = page_allocator(name, 32)
    allocator.admit("x", 8, prefix=tokens_of("x", 8))
    pages = slots_of(allocator, "x")[::4]
    for round_ in range(3):
        allocator.release("x")
        free = allocator.pool.free_pages().tolist()
        assert len(set(free)) == len(free), "never twice"
        assert not {page // 4 for page in pages} & set(free), "waiting pages are not in the list"
        assert allocator.admit("x", 9 + round_, prefix=tokens_of("x", 8)) == 8
        assert slots_of(allocator, "x")[:8:4] == pages[:2]
        allocator.check_invariants()
    allocator.release("x")
    allocator.admit("hog", 32)  # takes every page, those of the index too
    assert len(set(slots_of(allocator, "hog"))) == 32
    allocator.release("hog")
    allocator.check_invariants()
    assert allocator.usage().free == 32
