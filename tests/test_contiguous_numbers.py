"""The article's table, and numbers worked out by hand in the docs, on the contiguous allocator."""

from __future__ import annotations

from typing import Any

import pytest

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contract import OutOfMemory
from kvalloc.geometry import SLOTS, KVGeometry, LayerShape

LLAMA_3_8B = KVGeometry("llama-3-8b", (LayerShape(8, 128),) * 32, 32, "bfloat16", 8192)
KIB, MIB, GIB = 2**10, 2**20, 2**30

# Arrival step, prompt, output, max_new: nine requests over 80 slots.
ARTICLE = [
    (1, 38, 1, 30),
    (3, 7, 10, 34),
    (4, 10, 1, 9),
    (8, 18, 1, 2),
    (10, 23, 3, 6),
    (11, 9, 40, 40),
    (12, 15, 9, 22),
    (15, 23, 2, 5),
    (15, 1, 20, 24),
]


def slots(capacity: int, **options: Any) -> ContiguousAllocator:
    return ContiguousAllocator(SLOTS, capacity, **options)


def replay_article(allocator: ContiguousAllocator) -> tuple[int, list[OutOfMemory], int, int]:
    """Reject and drop. Rejections, refused growths, peak reserved, peak waste."""
    left: dict[int, int] = {}
    rejected, refusals, reserved, waste = 0, list[OutOfMemory](), 0, 0
    for step in range(1, 60):
        for name, (arrival, prompt, output, max_new) in enumerate(ARTICLE):
            if arrival == step:
                try:
                    allocator.admit(name, prompt, max_new=max_new, expected_new=output)
                    left[name] = output
                except OutOfMemory:
                    rejected += 1
        for name in list(left):
            refused = allocator.grow([name])
            refusals += refused.values()
            left[name] -= 1
            if refused or left[name] == 0:
                allocator.release(name)
                del left[name]
        allocator.check_invariants()
        usage = allocator.usage()
        reserved, waste = max(reserved, usage.reserved), max(waste, usage.waste)
    assert not left and allocator.usage().free == 80, "everything is free after a drain (case 16)"
    return rejected, refusals, reserved, waste


@pytest.mark.parametrize("placement", ["first-fit", "best-fit"])
def test_the_articles_rows(placement: str) -> None:
    rejected, refusals, reserved, waste = replay_article(
        slots(80, policy="max", placement=placement)
    )
    assert (rejected, len(refusals), reserved, waste) == (2, 0, 70, 33)
    rejected, refusals, reserved, waste = replay_article(
        slots(80, policy="exact", placement=placement)
    )
    assert (rejected, len(refusals), reserved, waste) == (0, 4, 31, 0)
    assert all(refusal.blocked and refusal.fragmented for refusal in refusals)


def test_the_hole() -> None:
    """32 of 80 slots are free, in two intervals of 16: a fifth request of 20 finds no place."""
    allocator = slots(80)
    for name, size in enumerate((24, 16, 16, 8)):
        allocator.admit(name, size, max_new=0)
    allocator.release(1)
    before = allocator.usage()
    assert (before.free, before.largest_free) == (32, 16)
    assert before.external_fragmentation == 0.5
    with pytest.raises(OutOfMemory) as refusal:
        allocator.admit("fifth", 12, max_new=8)
    error = refusal.value
    assert (error.needed, error.free, error.largest_free) == (20, 32, 16)
    assert error.fragmented and not error.blocked and error.unit == "tokens"
    assert "32" in str(error) and "16" in str(error)
    assert allocator.usage() == before
    allocator.check_invariants()


def test_a_long_reservation_for_a_short_answer() -> None:
    """4,096 reserved and 200 used leave 3,896 (95 %) idle."""
    allocator = slots(4096, policy="limit", limit=4096)
    allocator.admit("a", 150)
    allocator.grow(["a"], 50)
    usage = allocator.usage()
    assert usage.reservation == usage.waste == 3896 and usage.tail == 0
    assert round(100 * usage.waste / usage.reserved) == 95


def test_four_static_reservations() -> None:
    """Requests of 200, 600, 150 and 1,050 tokens waste 75.6 % of four times 2,048."""
    allocator = slots(4 * 2048, policy="limit", limit=2048)
    for tokens in (200, 600, 150, 1050):
        allocator.admit(tokens, tokens)
    usage = allocator.usage()
    assert usage.free == 0
    assert round(100 * usage.waste / usage.reserved, 1) == 75.6


def test_ten_gibibytes_in_small_gaps_refuse_two() -> None:
    """Kept and freed intervals of 500 MiB alternate; 128 KiB are one token of Llama-3-8B."""
    tokens = 500 * MIB // (128 * KIB)
    gaps = 10 * GIB // (500 * MIB) + 1
    geometry = KVGeometry(LLAMA_3_8B.name, LLAMA_3_8B.layers, 32, "bfloat16")
    allocator = ContiguousAllocator(geometry, 2 * gaps * 500 * MIB, policy="exact")
    for name in range(2 * gaps):
        allocator.admit(name, tokens)
    for name in range(0, 2 * gaps, 2):
        allocator.release(name)
    assert allocator.usage().free >= 10 * GIB
    assert allocator.usage().largest_free == 500 * MIB
    with pytest.raises(OutOfMemory) as refusal:
        allocator.admit("large", 2 * GIB // (128 * KIB))
    assert refusal.value.fragmented


def test_static_requests_in_32_gibibytes() -> None:
    """64 requests of Llama-3-8B with a limit of 4,096, at 500 tokens 12.2 % used."""
    assert LLAMA_3_8B.bytes_per_token == 128 * KIB
    allocator = ContiguousAllocator(LLAMA_3_8B, 32 * GIB, policy="limit", limit=4096)
    for name in range(64):
        allocator.admit(name, 500)
    with pytest.raises(OutOfMemory):
        allocator.admit("one more", 1)
    usage = allocator.usage()
    assert usage.live / usage.capacity == 500 / 4096
    assert round(100 * usage.live / usage.capacity, 1) == 12.2
    assert usage.table_bytes == 64 * 8
