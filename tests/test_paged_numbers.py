"""Numbers worked out by hand in the docs, on pages: tails, block tables, slots, requests."""

from __future__ import annotations

import pytest
import torch

from kvalloc.contract import OutOfMemory
from kvalloc.geometry import SLOTS, KVGeometry, LayerShape
from kvalloc.models import geometry
from kvalloc.paged import PagedAllocator, PagedKVCache
from kvalloc.vmm import VmmAllocator

KIB, GIB = 2**10, 2**30


@pytest.mark.parametrize(("context", "percent"), [(4096, 0.37), (8192, 0.18)])
def test_at_most_fifteen_tail_tokens_in_blocks_of_sixteen(context: int, percent: float) -> None:
    """0.37 % of a context of 4K, under 0.2 % of one of 8K."""
    allocator = PagedAllocator(SLOTS, context, 16)
    allocator.admit("a", context - 32)
    tails = []
    for _ in range(32):
        allocator.grow(["a"])
        usage = allocator.usage()
        assert usage.waste == usage.tail and usage.reservation == 0
        tails.append(usage.tail)
    assert tails == [*range(15, -1, -1)] * 2
    share = 100 * max(tails) / context
    assert round(share, 2) == percent and (context < 8192 or share < 0.2)


def test_a_block_table_grows_when_its_last_block_is_full() -> None:
    """Case 13: blocks of 4, [7, 2, 14] hold tokens 0 to 11; token 12 brings the block 9."""
    allocator = PagedAllocator(SLOTS, 64, 4)
    for block in range(16):  # never used blocks come in ascending order
        allocator.admit(block, 4)
        assert allocator.block_table(block) == [block]
    for block in (9, 14, 2, 7):  # last freed, first taken
        allocator.release(block)
    allocator.admit("a", 9)
    for tokens in (9, 10, 11, 12):
        assert allocator.length("a") == tokens
        assert allocator.block_table("a") == [7, 2, 14]
        allocator.grow(["a"])
    assert allocator.block_table("a") == [7, 2, 14, 9]
    slots = [allocator.slot(allocator.block_table("a"), token) for token in range(13)]
    assert slots == [28, 29, 30, 31, 8, 9, 10, 11, 56, 57, 58, 59, 36]


def test_layers_with_a_window_have_block_tables_of_their_own() -> None:
    """Blocks of 4, a window of 8: the 17th token no longer sees the first two blocks."""
    layers = (LayerShape(1, 1, window=8), LayerShape(1, 1))
    allocator = PagedAllocator(KVGeometry("mixed", layers, 1, "float8_e5m2"), 128, 4)
    allocator.admit("a", 8)
    for _ in range(9):
        assert not allocator.grow(["a"])
    local, whole = (allocator.block_table("a", layer) for layer in range(2))
    assert local[:2] == [-1, -1] and len(local) == len(whole) == 5
    assert len({*local[2:], *whole}) == 8 and min(local[2:] + whole) >= 0


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_tokens_lie_where_the_slot_equation_says(size: int) -> None:
    """``block_table[⌊t / B⌋] · B + t mod B`` is the row of the pool that holds token t."""
    small = KVGeometry("small", (LayerShape(1, 4),), 1, "float32")
    with PagedKVCache(small, 96 * small.bytes_per_token, size, layout="token-major") as cache:
        for seq in range(5):
            cache.admit(seq, 4 + seq)
        for seq in (3, 0, 4):  # leaves the free list in disorder
            cache.release(seq)
        cache.admit("a", 13)
        for _ in range(20):
            cache.grow(["a"])
        values = torch.arange(33.0)[:, None, None].expand(33, 1, 4)
        cache.write(0, ["a"], values, -values, lens=[33])
        table, view = cache.block_table("a"), cache.view(0, ["a"])
        assert table == view.block_table[0, : len(table)].tolist()
        rows = [cache.slot(table, token) for token in range(33)]
        assert rows == [table[token // size] * size + token % size for token in range(33)]
        assert len(set(rows)) == 33
        assert view.k.reshape(-1, 4)[rows, 0].tolist() == list(range(33))
        assert view.v.reshape(-1, 4)[rows, 3].tolist() == [-token for token in range(33)]


@pytest.mark.parametrize("size", [1, 4, 7, 16])
def test_a_sequence_reserves_whole_blocks(size: int) -> None:
    """``B · ⌈L / B⌉`` tokens for a sequence of L, however it came to that length."""
    longest = 64 // size * size
    for allocator in (PagedAllocator(SLOTS, 64, size), VmmAllocator(SLOTS, 64, size)):
        allocator.admit("grown", 0)
        for length in range(longest + 1):
            assert allocator.usage().reserved == size * -(-length // size)
            if length < longest:
                assert not allocator.grow(["grown"])
        allocator.release("grown")
        for length in range(longest + 1):
            allocator.admit("placed", length)
            assert allocator.usage().reserved == size * -(-length // size)
            allocator.release("placed")


def test_eight_times_the_requests_in_32_gibibytes() -> None:
    """512 requests of 500 tokens in blocks of 16, where static reservations hold 64: 97.7 % used.

    The 64, and their 12.2 %, are in test_contiguous_numbers.py.
    """
    llama = geometry("llama-3-8b")
    assert llama.bytes_per_token == 128 * KIB
    for page in (PagedAllocator(llama, 32 * GIB, 16), VmmAllocator(llama, 32 * GIB, 32 * KIB)):
        for name in range(512):
            page.admit(name, 500)
        with pytest.raises(OutOfMemory) as refusal:
            page.admit("one more", 1)
        assert not refusal.value.fragmented
        usage = page.usage()
        assert usage.reserved == usage.capacity and usage.free == 0
        assert round(100 * usage.live / usage.capacity, 1) == 97.7
        page.check_invariants()
