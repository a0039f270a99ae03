"""Free intervals against a bitmap that is searched from end to end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contiguous.buddy import Buddy, next_power_of_two
from kvalloc.contiguous.placement import PLACEMENTS, BestFit, FirstFit
from kvalloc.tests.arena_bitmap import Bitmap

CAPACITIES = st.integers(1, 80)
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "extend", "trim", "give_back"]), st.integers(0, 20)),
    min_size=10,
    max_size=60,
)


@pytest.mark.parametrize("rule", PLACEMENTS)
@settings(deadline=None, max_examples=150)
@given(capacity=CAPACITIES, steps=STEPS)
def test_agrees_with_a_bitmap(rule: str, capacity: int, steps: list[tuple[str, int]]) -> None:
    arena, bitmap = PLACEMENTS[rule](capacity), Bitmap(capacity, rule)
    held: list[tuple[int, int]] = []
    assert arena.largest == arena.largest_free
    for verb, number in steps:
        if verb == "take" and number:
            size = arena.rounded(number)
            assert size == (next_power_of_two(number) if rule == "buddy" else number)
            start = arena.take(number)
            assert start == bitmap.choose(size)
            if start is not None:
                held.append((start, size))
                bitmap.mark(start, size, False)
        elif held and verb == "extend":
            start, size = held.pop(number % len(held))
            larger = size + 1 + number % 7
            now = arena.extend(start, size, larger)
            assert now == bitmap.extended(start, size, larger)
            if now is not None:
                bitmap.mark(start + size, now - size, False)
            held.append((start, now or size))
        elif held and verb == "trim":
            start, size = held.pop(number % len(held))
            wanted = number % (size + 1)
            if arena.rounded(wanted) < size:
                arena.trim(start, size, wanted)
                bitmap.mark(start + arena.rounded(wanted), size - arena.rounded(wanted), True)
                size = arena.rounded(wanted)
            if size:
                held.append((start, size))
        elif held and verb == "give_back":
            start, size = held.pop(number % len(held))
            arena.give_back(start, size)
            bitmap.mark(start, size, True)
        arena.check()
        assert list(arena.free_intervals()) == bitmap.intervals()
        assert arena.num_free == sum(bitmap.free)
        assert arena.largest_free == max((size for _, size in bitmap.intervals()), default=0)
    for start, size in held:
        arena.give_back(start, size)
    assert arena.num_free == capacity, "after a drain everything is free (case 16)"
    assert list(arena.free_intervals()) == list(PLACEMENTS[rule](capacity).free_intervals())


def with_holes(rule: str) -> FirstFit | BestFit | Buddy:
    """80 slots with free runs of 16 at 0, 8 at 20, 4 at 32 and 40 at 40."""
    arena = PLACEMENTS[rule](80)
    starts = [arena.take(size) for size in (16, 4, 8, 4, 4, 4)]
    assert starts == [0, 16, 20, 28, 32, 36]
    for start, size in ((0, 16), (20, 8), (32, 4)):
        arena.give_back(start, size)
    return arena


def test_first_fit_takes_the_lowest_address_and_best_fit_the_tightest_hole() -> None:
    assert [with_holes("first-fit").take(size) for size in (4, 8, 20)] == [0, 0, 40]
    assert [with_holes("best-fit").take(size) for size in (3, 4, 8, 9)] == [32, 32, 20, 0]


def test_best_fit_prefers_the_lower_of_two_equal_holes() -> None:
    arena = BestFit(12)
    for _ in range(6):
        arena.take(2)
    arena.give_back(8, 2)
    arena.give_back(4, 2)
    assert arena.take(1) == 4


def test_freed_neighbours_become_one_interval() -> None:
    """Case 15: two freed ranges meet."""
    arena = FirstFit(30)
    for size in (10, 10, 10):
        arena.take(size)
    arena.give_back(0, 10)
    arena.give_back(20, 10)
    assert arena.largest_free == 10
    arena.give_back(10, 10)
    assert list(arena.free_intervals()) == [(0, 30)]


@pytest.mark.parametrize("rule", PLACEMENTS)
def test_freeing_twice_is_noticed(rule: str) -> None:
    arena = PLACEMENTS[rule](16)
    assert arena.take(8) == 0
    arena.give_back(0, 8)
    with pytest.raises(AssertionError, match="freed twice"):
        arena.give_back(0, 8)


def test_buddy_cuts_a_capacity_into_its_powers_of_two() -> None:
    arena = Buddy(80)
    assert list(arena.free_intervals()) == [(0, 64), (64, 16)]
    assert arena.largest == 64
    assert arena.take(65) is None, "no block of 128"
    assert arena.take(9) == 64, "the tightest block that is large enough"
    assert arena.num_free == 64


def test_buddies_merge_within_the_block_they_were_cut_from() -> None:
    arena = Buddy(48)  # 32 and 16
    blocks = [arena.take(16) for _ in range(3)]
    assert blocks == [32, 0, 16]
    for start in (16, 32, 0):
        arena.give_back(start, 16)
    assert list(arena.free_intervals()) == [(0, 32), (32, 16)]


def test_buddy_grows_in_place_only_into_its_own_buddy() -> None:
    arena = Buddy(32)
    assert [arena.take(4), arena.take(4)] == [0, 4]
    assert arena.extend(0, 4, 5) is None, "the buddy is taken"
    arena.give_back(0, 4)
    assert arena.extend(4, 4, 5) is None, "the buddy lies before, not behind"
    arena.give_back(4, 4)
    assert arena.take(4) == 0
    assert arena.extend(0, 4, 9) == 16, "two free buddies in a row"
    assert arena.num_free == 16
    arena.check()


def test_buddy_does_not_grow_across_the_edge_of_its_parent() -> None:
    arena = Buddy(16)
    assert [arena.take(4) for _ in range(4)] == [0, 4, 8, 12]
    arena.give_back(8, 4)
    assert arena.extend(4, 4, 5) is None, "[8, 12) is free, but [4, 12) is no block"


@pytest.mark.parametrize("number, power", [(0, 0), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_next_power_of_two(number: int, power: int) -> None:
    assert next_power_of_two(number) == power
