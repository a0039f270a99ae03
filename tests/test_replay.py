"""The replay loop: equal to the slow simulator on any trace, and what a real run is asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contract import Allocator
from kvalloc.experiments.built_in_traces import hole
from kvalloc.experiments.recorder import MAX_POINTS, in_tokens
from kvalloc.experiments.replay import MAX_OWNER_ENTRIES, Result, owners_json, replay
from kvalloc.experiments.scheduler import Scheduler
from kvalloc.experiments.scheduling import OnFailure, OnFull, Placed
from kvalloc.experiments.specs import parse_spec, token_geometry
from kvalloc.experiments.trace import Trace
from kvalloc.geometry import SLOTS
from kvalloc.models import geometry
from kvalloc.paged import PagedAllocator
from kvalloc.tests.simulator import simulate

Row = tuple[int, int, int, int]
POLICIES = ("max", "limit", "pow2", "oracle", "exact")
PLACEMENTS = ("first-fit", "best-fit", "buddy")
SPECS = [f"contiguous:{policy}:{place}" for policy in POLICIES for place in PLACEMENTS]
SPECS += ["paged:1", "paged:4", "paged:7", "vmm:1", "vmm:3", "vmm"]
FULL: list[OnFull] = ["queue", "reject"]
FAILURE: list[OnFailure] = ["recompute", "drop"]


def trace(*rows: Row) -> Trace:
    """Requests from rows of (step, prompt, output, max_new)."""
    return Trace.from_rows("test", "step", rows)


def slots(spec: str, num_slots: int, limit: int | None = None) -> Allocator:
    return parse_spec(spec, slots=True).allocator(*token_geometry(num_slots), limit=limit)


def replayed(
    rows: Sequence[Row], spec: str, num_slots: int, on_full: OnFull, on_failure: OnFailure
) -> Result:
    allocator = slots(spec, num_slots)
    return replay(trace(*rows), allocator, on_full=on_full, on_failure=on_failure)


def figures(result: Result, token_bytes: int = 1) -> dict[str, Any]:
    """What the simulator answers, by the real thing."""
    counts, recorder = result.counts, result.recorder
    return {
        "admitted": counts.admitted,
        "rejected": counts.rejected,
        "never_fit": counts.never_fit,
        "completed": counts.completed,
        "growth_failures": counts.growth_failures,
        "fragmentation_failures": counts.fragmentation_failures,
        "preemptions": counts.preemptions,
        "peak_live": in_tokens(recorder.peak_live, token_bytes),
        "peak_reserved": in_tokens(recorder.peak_reserved, token_bytes),
        "peak_waste": in_tokens(recorder.peak_waste, token_bytes),
        "peak_fragmentation": recorder.peak_fragmentation,
        "steps": recorder.num_steps,
        "tokens": counts.tokens,
        "series": {
            name: values if name == "step" else [in_tokens(v, token_bytes) for v in values]
            for name, values in recorder.series.items()
        },
    }


class Audited:
    """An engine that looks at the books; ``told``, every 64 steps, makes a livelock fail."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.num_told = 0

    def told(self, num_done: int) -> None:
        self.num_told += 1
        assert self.num_told < 16, "livelock"

    def begin_step(self, arrivals: range) -> None:
        pass

    def prefill(self, placed: list[Placed]) -> None:
        for request, tokens, cached in placed:
            assert cached == 0
            assert self.allocator.length(request) == tokens

    def decode(self, requests: list[int]) -> None:
        self.allocator.check_invariants()
        held = [span for request in requests for span in self.allocator.spans(request)]
        usage = self.allocator.usage()
        assert sum(stop - start for start, stop in held) == usage.reserved
        assert usage.live + usage.reservation + usage.tail == usage.reserved
        assert usage.reserved + usage.free == usage.capacity


rows = st.lists(
    st.tuples(st.integers(0, 10), st.integers(1, 20), st.integers(0, 16), st.integers(0, 18)),
    min_size=1,
    max_size=14,
).map(lambda drawn: sorted(drawn, key=lambda row: row[0]))


@pytest.mark.parametrize("on_failure", FAILURE)
@pytest.mark.parametrize("on_full", FULL)
@settings(deadline=None, max_examples=60)
@given(rows=rows, capacity=st.integers(16, 60), limit=st.sampled_from([None, 9, 18, 30]))
def test_any_trace_gives_the_simulators_figures(
    on_full: OnFull, on_failure: OnFailure, rows: list[Row], capacity: int, limit: int | None
) -> None:
    """All counters and the whole series, on every policy, placement and page size."""
    names = ("step", "prompt", "output", "max_new")
    requests: list[dict[str, int]] = [dict(zip(names, row, strict=True)) for row in rows]
    for spec in SPECS:
        most = limit or 25 if ":limit" in spec else limit
        allocator = slots(spec, capacity, most)
        audit = Audited(allocator)
        result = replay(
            trace(*rows),
            allocator,
            on_full=on_full,
            on_failure=on_failure,
            engine=audit,
            progress=audit.told,
        )
        expected = simulate(
            requests, capacity, spec, on_full=on_full, on_failure=on_failure, limit=most
        )
        assert figures(result) == expected, spec
        usage = allocator.usage()
        assert usage.free == usage.capacity and usage.live == usage.reserved == 0, spec


@settings(deadline=None, max_examples=40)
@given(
    rows=rows,
    capacity=st.integers(16, 60),
    page=st.integers(1, 9),
    on_full=st.sampled_from(FULL),
    on_failure=st.sampled_from(FAILURE),
)
def test_mapped_pages_count_like_paged_ones(
    rows: list[Row], capacity: int, page: int, on_full: OnFull, on_failure: OnFailure
) -> None:
    """``vmm:P`` equals ``paged:P`` in every accounting figure, warm pages and all."""
    paged = replayed(rows, f"paged:{page}", capacity, on_full, on_failure)
    mapped = replayed(rows, f"vmm:{page}", capacity, on_full, on_failure)
    assert figures(paged) == figures(mapped)
    assert paged.counts == mapped.counts, "calls of the allocator too"


@settings(deadline=None, max_examples=40)
@given(
    rows=rows,
    capacity=st.integers(16, 60),
    spec=st.sampled_from(["contiguous:max", "contiguous:exact:buddy", "paged:4", "vmm:3"]),
    on_full=st.sampled_from(FULL),
)
def test_swapping_counts_like_computing_again(
    rows: list[Row], capacity: int, spec: str, on_full: OnFull
) -> None:
    """What waits in host memory takes no room here, and returns to as much as it left."""
    again = replayed(rows, spec, capacity, on_full, "recompute")
    swapped = replayed(rows, spec, capacity, on_full, "swap")
    assert figures(again) == figures(swapped)
    assert swapped.counts.recomputed_tokens == again.counts.swapped_tokens == 0
    assert swapped.counts.swapped_tokens == again.counts.recomputed_tokens


@settings(deadline=None, max_examples=30)
@given(rows=rows, num_pages=st.integers(3, 12), on_failure=st.sampled_from(FAILURE))
def test_mapped_pages_of_a_model_count_like_paged_ones(
    rows: list[Row], num_pages: int, on_failure: OnFailure
) -> None:
    """8 KiB hold 16 tokens of one tensor of ``tiny``; four tensors cross pages together."""
    tiny, memory = geometry("tiny"), num_pages * 16 * 2048
    paged, mapped = (
        replay(
            trace(*rows),
            parse_spec(spec, slots=False).allocator(tiny, memory),
            on_failure=on_failure,
        )
        for spec in ("paged:16", "vmm:8KiB")
    )
    assert figures(paged, 2048) == figures(mapped, 2048)


class Diary:
    """An engine that writes down what it is asked, and what is live then."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.entries: list[tuple[str, Any, int]] = []

    def begin_step(self, arrivals: range) -> None:
        self.entries.append(("begin", list(arrivals), self.allocator.usage().live))

    def prefill(self, placed: list[Placed]) -> None:
        prompts = [(request, tokens) for request, tokens, _ in placed]
        self.entries.append(("prefill", prompts, self.allocator.usage().live))

    def decode(self, requests: list[int]) -> None:
        self.entries.append(("decode", list(requests), self.allocator.usage().live))


def diary(spec: str, num_slots: int, requests: Trace, **options: Any) -> list[tuple[str, Any, int]]:
    allocator = slots(spec, num_slots)
    engine = Diary(allocator)
    replay(requests, allocator, engine=engine, **options)
    return engine.entries


def test_a_real_run_is_asked_in_the_order_of_a_step() -> None:
    """What was placed, then one batch of those still active; the last token is not written."""
    assert diary("paged:1", 40, trace((0, 5, 2, 2), (0, 3, 1, 1), (1, 4, 3, 3), (1, 6, 0, 0))) == [
        ("begin", [0, 1], 0),
        ("prefill", [(0, 5), (1, 3)], 8),
        ("decode", [0], 6),  # request 1 produced its last token and left
        ("begin", [2, 3], 6),
        ("prefill", [(2, 4), (3, 6)], 16),  # 3 has nothing to produce, but is there
        ("decode", [2], 5),  # 0 is done, 3 left
        ("begin", [], 5),
        ("prefill", [], 5),
        ("decode", [2], 6),
        ("begin", [], 6),
        ("prefill", [], 6),
    ]


def test_a_preempted_request_returns_with_what_it_produced() -> None:
    asked = diary("paged:1", 6, trace((0, 2, 4, 4), (0, 2, 2, 2)))
    assert [entry for entry in asked if entry[0] != "begin" and entry[1]] == [
        ("prefill", [(0, 2), (1, 2)], 4),
        ("decode", [0, 1], 6),
        ("decode", [0], 4),  # no slot is left for request 0: the youngest gives way
        ("decode", [0], 5),
        ("prefill", [(1, 3)], 3),
    ]


def test_a_release_lets_the_next_one_grow_in_the_same_step() -> None:
    def failures(spec: str, num_slots: int, *rows: Row) -> int:
        return replayed(rows, spec, num_slots, "reject", "drop").counts.growth_failures

    # Three pages of two; the one with three tokens ends with its fourth and frees two.
    assert failures("paged:2", 6, (0, 3, 1, 1), (0, 2, 3, 3)) == 0
    assert failures("paged:2", 6, (0, 2, 3, 3), (0, 3, 1, 1)) == 1
    # The second request ends behind the third, which was placed where the first had been.
    assert failures("contiguous:exact", 8, (0, 2, 0, 0), (0, 3, 2, 2), (1, 2, 3, 3)) == 0
    assert failures("contiguous:exact", 8, (0, 2, 0, 0), (0, 3, 3, 3), (1, 2, 3, 3)) == 1


def test_seconds_become_steps_and_idle_ones_are_skipped() -> None:
    requests = Trace.from_rows("test", "s", [(7.0, 2, 2, 2), (7.1, 2, 1, 1), (9000.0, 2, 1, 1)])
    result = replay(requests, slots("paged:1", 9), step_ms=50)
    assert result.recorder.series["step"] == [0, 1, 2, 179_860]
    assert result.recorder.num_steps == 4


@pytest.mark.parametrize("spec", ["contiguous:limit", "paged:4", "vmm:4"])
def test_beyond_the_models_limit_never_fits_and_the_queue_moves_on(spec: str) -> None:
    """Case 11."""
    requests = trace((0, 4, 9, 9), (0, 8, 5, 5), (0, 4, 2, 2))
    counts = replay(requests, slots(spec, 40, limit=12)).counts
    assert (counts.never_fit, counts.rejected, counts.completed) == (2, 2, 1)


def test_the_hole_refuses_with_both_numbers_in_the_error() -> None:
    """32 slots are free, the largest interval has 16, and 20 are needed."""
    requests = hole()
    scheduler = Scheduler(
        slots("contiguous:max", 80), requests.prompt, requests.output, requests.max_new
    )
    for arrivals in (range(4), range(0), range(4, 5)):
        scheduler.step(arrivals)
    [(request, refusal)] = scheduler.refusals
    assert request == 4
    assert (refusal.needed, refusal.free, refusal.largest_free) == (20, 32, 16)
    assert refusal.fragmented
    assert str(refusal) == "20 tokens needed, 32 free, the largest free run is 16"
    for spec in ("paged:4", "vmm:4"):
        counts = replay(requests, slots(spec, 80), on_full="reject", on_failure="drop").counts
        assert (counts.admitted, counts.completed, counts.fragmentation_failures) == (5, 5, 0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"on_full": "drop"}, "unknown on_full 'drop'; choose one of queue, reject"),
        ({"on_failure": "reject"}, "unknown on_failure 'reject'; choose one of recompute, swap"),
    ],
)
def test_a_word_that_no_choice_has_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        replay(hole(), PagedAllocator(SLOTS, 80, 4), **options)


def test_a_trace_that_does_not_say_max_new_is_refused() -> None:
    trace = Trace.from_rows("t", "step", [(0, 3, 2, None)])
    with pytest.raises(ValueError, match=r"1 requests do not say .* trace.with_max_new"):
        replay(trace, PagedAllocator(SLOTS, 80, 4))
    assert replay(trace.with_max_new(), PagedAllocator(SLOTS, 80, 4)).counts.completed == 1


def test_an_allocator_in_use_is_refused() -> None:
    """Its sequences may never leave, and then a request would wait for ever."""
    allocator = PagedAllocator(SLOTS, 80, 4)
    allocator.admit("mine", 70)
    with pytest.raises(ValueError, match="holds 72 bytes of other sequences"):
        replay(hole(), allocator)
    allocator.release("mine")
    assert replay(hole(), allocator).counts.completed == 5


def test_owners_tell_who_holds_which_slots() -> None:
    requests = trace((0, 2, 2, 3), (0, 3, 2, 2), (1, 4, 1, 4))
    result = replay(requests, slots("contiguous:max", 12), on_full="reject", owners=True)
    assert owners_json(result.owners, 12) == {
        "slots": 12,
        "steps": [0, 1],
        "rows": [[[0, 5, 0, 3], [5, 10, 1, 4]], []],
        "refusals": [[1, 2, 8, 2, 2]],
        "numbers": {
            "live": [7, 0],
            "reserved": [10, 0],
            "free": [2, 12],
            "largest_free": [2, 12],
            "waiting": [0, 0],
        },
    }
    assert owners_json(None, 12) is None
    many = trace(*[(0, 1, MAX_OWNER_ENTRIES // 200 + 1, 1)] * 200)
    assert replay(many, slots("paged:1", 60_000), owners=True).owners is None


def test_owners_keep_the_numbers_of_every_step_and_who_waits() -> None:
    """More steps than a series has points; the second request waits until the first has ended."""
    num = MAX_POINTS + 10
    owned = replay(
        trace((0, 2, num, num), (0, 4, 3, 3)), slots("contiguous:max", num + 2), owners=True
    )
    assert owned.owners is not None and len(owned.recorder.series["step"]) < num
    numbers = owned.owners.numbers
    assert {len(values) for values in numbers.values()} == {len(owned.owners.steps)}
    assert len(owned.owners.steps) == owned.recorder.num_steps > MAX_POINTS
    assert numbers["live"][:3] == [3, 4, 5]
    assert set(numbers["waiting"][: num - 1]) == {1} and numbers["waiting"][-1] == 0


def test_progress_ends_at_the_number_of_requests() -> None:
    told: list[int] = []
    replay(trace((0, 2, 200, 200), (150, 2, 9, 9)), slots("paged:1", 300), progress=told.append)
    assert told[-1] == 2 and told == sorted(told) and 0 in told and 1 in told
