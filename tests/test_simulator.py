"""The yardstick itself: the slow simulator against numbers worked out by hand or published."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.tests.simulator import simulate

COUNTERS = {
    "admitted",
    "rejected",
    "never_fit",
    "completed",
    "growth_failures",
    "fragmentation_failures",
    "preemptions",
    "peak_live",
    "peak_reserved",
    "peak_waste",
    "peak_fragmentation",
    "steps",
    "tokens",
    "series",
}
POLICIES = ["max", "limit", "pow2", "oracle", "exact"]
PLACEMENTS = ["first-fit", "best-fit", "buddy"]
BACKENDS = [f"contiguous:{policy}:{place}" for policy in POLICIES for place in PLACEMENTS]
BACKENDS += ["paged:1", "paged:4", "vmm:3"]


def trace(*rows: tuple[int, int, int, int]) -> list[dict[str, int]]:
    """Requests from rows of (step, prompt, output, max_new)."""
    return [dict(zip(("step", "prompt", "output", "max_new"), row, strict=True)) for row in rows]


ARTICLE = trace(
    (1, 38, 1, 30),
    (3, 7, 10, 34),
    (4, 10, 1, 9),
    (8, 18, 1, 2),
    (10, 23, 3, 6),
    (11, 9, 40, 40),
    (12, 15, 9, 22),
    (15, 23, 2, 5),
    (15, 1, 20, 24),
)
HOLE = trace((0, 4, 20, 20), (0, 4, 2, 12), (0, 4, 12, 12), (0, 4, 4, 4), (2, 10, 10, 10))


@pytest.mark.parametrize(
    ("backend", "rejected", "growth_failures", "peak_reserved", "peak_waste"),
    [
        ("contiguous:max", 2, 0, 70, 33),
        ("contiguous:exact", 0, 4, 31, 0),
        ("paged:4", 0, 0, 64, 8),
        ("paged:8", 0, 1, 72, 13),
        ("paged:16", 1, 1, 80, 25),
    ],
)
def test_article_table(
    backend: str, rejected: int, growth_failures: int, peak_reserved: int, peak_waste: int
) -> None:
    got = simulate(ARTICLE, 80, backend, on_full="reject", on_failure="drop")
    assert got["rejected"] == rejected
    assert got["growth_failures"] == growth_failures
    assert got["peak_reserved"] == peak_reserved
    assert got["peak_waste"] == peak_waste
    assert got["completed"] == len(ARTICLE) - rejected - growth_failures
    assert got["never_fit"] == got["preemptions"] == 0


def test_article_exact_growth_fails_beside_free_slots() -> None:
    got = simulate(ARTICLE, 80, "contiguous:exact", on_full="reject", on_failure="drop")
    assert got["fragmentation_failures"] == 4


def test_hole_refuses_the_fifth_request() -> None:
    got = simulate(HOLE, 80, "contiguous:max", on_full="reject", on_failure="drop")
    assert (got["admitted"], got["rejected"], got["fragmentation_failures"]) == (4, 1, 1)
    at = got["series"]["step"].index(2)
    assert got["series"]["free"][at] == 32
    assert got["series"]["largest_free"][at] == 16
    assert got["peak_fragmentation"] == pytest.approx(0.5)


@pytest.mark.parametrize("backend", ["paged:4", "vmm:4"])
def test_hole_is_no_hole_for_pages(backend: str) -> None:
    got = simulate(HOLE, 80, backend, on_full="reject", on_failure="drop")
    assert (got["admitted"], got["completed"], got["peak_fragmentation"]) == (5, 5, 0)


def test_a_release_lets_the_neighbour_grow_in_the_same_step() -> None:
    requests = trace((0, 3, 1, 1), (0, 2, 3, 3))
    got = simulate(requests, 6, "paged:2", on_full="reject", on_failure="drop")
    assert (got["completed"], got["growth_failures"]) == (2, 0)
    assert got["series"]["live"] == [3, 4, 0]
    later = trace((0, 2, 3, 3), (0, 3, 1, 1))  # the other way round, all three pages are held
    got = simulate(later, 6, "paged:2", on_full="reject", on_failure="drop")
    assert (got["completed"], got["growth_failures"]) == (1, 1)


def test_the_youngest_gives_way_and_comes_back_with_what_it_produced() -> None:
    # Six slots: both grow to 3; at step 1 the first is refused, the second (3 tokens) leaves;
    # the first ends at 6 tokens in step 3; the second returns at step 4 with a prompt of 3.
    requests = trace((0, 2, 4, 4), (0, 2, 2, 2))
    got = simulate(requests, 6, "paged:1", on_full="queue", on_failure="recompute")
    assert (got["preemptions"], got["growth_failures"], got["completed"]) == (1, 1, 2)
    assert got["series"]["live"] == [6, 4, 5, 0, 0]
    assert got["tokens"] == 6


def test_the_preempted_one_returns_before_those_that_wait() -> None:
    requests = trace((0, 2, 4, 4), (0, 2, 4, 4), (1, 1, 1, 1))
    got = simulate(requests, 6, "paged:1", on_full="queue", on_failure="recompute")
    # Step 2: two slots would do for the third (one and room for one more), but the second, with
    # three tokens, is the head of the queue. Both start in step 4, after the first has ended.
    assert got["series"]["live"] == [6, 4, 5, 0, 4, 5, 0]
    assert (got["preemptions"], got["completed"]) == (1, 3)


def test_a_preempted_reservation_shrinks_by_what_was_produced() -> None:
    requests = trace((0, 2, 5, 3))
    got = simulate(requests, 12, "contiguous:max", on_full="queue", on_failure="recompute")
    # Reserves 2 + 3, is refused at 5 tokens, returns with 5 + 1, again with 6 + 1.
    assert got["series"]["reserved"] == [5, 5, 5, 0, 6, 0, 0]
    assert (got["preemptions"], got["growth_failures"], got["completed"]) == (2, 2, 1)


def test_exact_growth_blocked_by_a_neighbour_preempts_itself() -> None:
    requests = trace((0, 2, 3, 3), (0, 2, 3, 3))
    got = simulate(requests, 8, "contiguous:exact", on_full="queue", on_failure="recompute")
    # Slots of the first and of the second after each step, a refused one in brackets:
    # (0-1) 2-4, 5-7 (2-4), (5-7) 0-3, 4-7 (0-3), (4-7) waits, 0-4 ends, the second 0-4 ends.
    assert (got["preemptions"], got["growth_failures"], got["completed"]) == (5, 5, 2)
    assert got["series"]["live"] == [3, 3, 4, 4, 0, 0, 0]
    assert got["fragmentation_failures"] == 5  # of growth; the second waited for want of slots


def test_the_head_of_the_queue_blocks_those_behind_it() -> None:
    requests = trace((0, 6, 2, 2), (0, 5, 1, 1), (0, 1, 2, 2))
    got = simulate(requests, 11, "contiguous:max", on_full="queue", on_failure="drop")
    assert got["series"]["live"] == [7, 0, 2, 0]
    assert got["completed"] == 3


def test_a_waiting_request_counts_its_fragmented_refusal_once() -> None:
    rows = HOLE[:4] + trace((2, 10, 10, 10))
    got = simulate(rows, 80, "contiguous:max", on_full="queue", on_failure="drop")
    assert (got["fragmentation_failures"], got["completed"], got["rejected"]) == (1, 5, 0)


@pytest.mark.parametrize("on_full", ["queue", "reject"])
def test_what_never_fits_is_told_and_the_queue_moves_on(on_full: str) -> None:
    """Case 11."""
    requests = trace((0, 4, 1, 1), (0, 9, 1, 1), (0, 2, 1, 1))
    got = simulate(requests, 8, "paged:4", on_full=on_full, on_failure="recompute")
    assert (got["rejected"], got["never_fit"], got["completed"]) == (1, 1, 2)


@pytest.mark.parametrize(("on_failure", "never_fit"), [("drop", 0), ("recompute", 1)])
def test_growing_beyond_the_whole_memory_is_the_end(on_failure: str, never_fit: int) -> None:
    requests = trace((0, 3, 9, 9))
    got = simulate(requests, 8, "paged:4", on_full="reject", on_failure=on_failure)
    assert (got["admitted"], got["rejected"], got["completed"]) == (1, 0, 0)
    assert (got["growth_failures"], got["never_fit"], got["tokens"]) == (1, never_fit, 5)


def test_queue_and_recompute_admit_only_with_room_to_grow() -> None:
    requests = trace((0, 8, 1, 1), (0, 8, 0, 1))
    got = simulate(requests, 8, "paged:4", on_full="queue", on_failure="recompute")
    assert (got["never_fit"], got["completed"], got["steps"]) == (1, 1, 1)
    got = simulate(requests, 8, "paged:4", on_full="queue", on_failure="drop")
    assert (got["never_fit"], got["completed"], got["growth_failures"]) == (0, 1, 1)


def test_idle_steps_are_skipped_and_no_output_leaves_at_once() -> None:
    requests = trace((5, 3, 0, 1), (1000, 3, 2, 2))
    got = simulate(requests, 8, "contiguous:exact", on_full="queue", on_failure="recompute")
    assert got["series"]["step"] == [5, 1000, 1001]
    assert got["series"]["live"] == [0, 4, 0]
    assert (got["tokens"], got["peak_live"]) == (2, 4)


def test_buddy_cuts_a_crooked_capacity_into_powers_of_two() -> None:
    requests = trace((0, 33, 1, 1), (0, 9, 1, 1), (0, 17, 1, 1))
    got = simulate(requests, 80, "contiguous:oracle:buddy", on_full="reject", on_failure="drop")
    # 34 -> 64 at 0, 10 -> 16 at 64, 18 -> 32 finds nothing free.
    assert (got["admitted"], got["rejected"], got["fragmentation_failures"]) == (2, 1, 0)
    assert got["peak_fragmentation"] == pytest.approx(0.2)


def test_exact_growth_in_buddy_blocks() -> None:
    requests = trace((0, 3, 3, 3), (0, 1, 1, 1))
    got = simulate(requests, 16, "contiguous:exact:buddy", on_full="queue", on_failure="drop")
    # 4 at 0 and 1 at 4; the second ends beside the free buddy at 5, so the first grows to 8.
    assert (got["completed"], got["growth_failures"]) == (2, 0)
    assert got["series"]["reserved"] == [4, 8, 0]
    # A block whose buddy lies before it does not grow, though all behind it is free.
    requests = trace((0, 3, 1, 1), (0, 3, 3, 3))
    got = simulate(requests, 16, "contiguous:exact:buddy", on_full="queue", on_failure="drop")
    assert (got["completed"], got["fragmentation_failures"]) == (1, 1)
    # Nine slots are blocks of 8 and 1. The smaller one has room for the prompt, not for growth.
    alone = trace((0, 1, 1, 1))
    got = simulate(alone, 9, "contiguous:exact:buddy", on_full="queue", on_failure="recompute")
    assert (got["completed"], got["growth_failures"]) == (1, 0)
    got = simulate(alone, 9, "contiguous:exact:buddy", on_full="queue", on_failure="drop")
    assert (got["completed"], got["growth_failures"]) == (0, 1)


def test_beyond_the_context_limit_is_never() -> None:
    requests = trace((0, 10, 6, 6), (0, 10, 7, 7), (1, 3, 1, 1))
    got = simulate(requests, 40, "contiguous:limit", on_full="reject", on_failure="drop", limit=16)
    assert (got["never_fit"], got["rejected"], got["completed"]) == (1, 1, 2)
    assert got["peak_reserved"] == 16


@st.composite
def traces(draw: st.DrawFn) -> list[dict[str, int]]:
    row = st.tuples(st.integers(0, 12), st.integers(1, 20), st.integers(0, 14), st.integers(1, 16))
    return trace(*sorted(draw(st.lists(row, max_size=10)), key=lambda row: row[0]))


@settings(deadline=None, max_examples=150)
@given(
    traces(),
    st.sampled_from(BACKENDS),
    st.sampled_from(["queue", "reject"]),
    st.sampled_from(["recompute", "drop"]),
    st.integers(8, 48),
    st.integers(8, 48),
)
def test_counts_add_up_and_nothing_waits_for_ever(
    requests: list[dict[str, int]],
    backend: str,
    on_full: str,
    on_failure: str,
    capacity: int,
    limit: int,
) -> None:
    got: dict[str, Any] = simulate(
        requests, capacity, backend, on_full=on_full, on_failure=on_failure, limit=limit
    )
    assert set(got) == COUNTERS
    assert got["admitted"] + got["rejected"] == len(requests)
    assert got["completed"] <= got["admitted"]
    series = got["series"]
    assert {len(values) for values in series.values()} == {got["steps"]}
    if requests and got["steps"]:
        assert series["live"][-1] == series["reserved"][-1] == 0
    whole = {f + r for f, r in zip(series["free"], series["reserved"], strict=True)}
    assert len(whole) <= 1
    if on_failure == "drop":
        assert got["completed"] == got["admitted"] - got["growth_failures"]
        assert got["preemptions"] == 0
    elif on_full == "queue":
        assert got["completed"] + got["never_fit"] == len(requests)


@settings(deadline=None, max_examples=50)
@given(traces(), st.integers(1, 6), st.integers(8, 48), st.sampled_from(["recompute", "drop"]))
def test_mapped_pages_count_like_paged_ones(
    requests: list[dict[str, int]], page: int, capacity: int, on_failure: str
) -> None:
    paged, mapped = (
        simulate(requests, capacity, f"{kind}:{page}", on_full="queue", on_failure=on_failure)
        for kind in ("paged", "vmm")
    )
    assert paged == mapped
