"""The trace type: steps without float trouble, missing max_new, and what it refuses."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.trace import MAX_STEP, MAX_TOKENS, Trace, Unit


def at(*seconds: float) -> Trace:
    return Trace.from_rows("t", "s", [(t, 1, 1, None) for t in seconds])


def test_floor_of_decimal_times_is_the_decimal_one() -> None:
    """0.3 // 0.1 is 2.0 in floats; the third step of 100 ms starts at 0.3 s all the same."""
    assert at(0, 0.1, 0.2, 0.29999, 0.3, 0.6, 0.7).steps(100).tolist() == [0, 1, 2, 2, 3, 6, 7]


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=20),
    st.sampled_from([1, 5, 20, 25, 33.3, 0.1]),
)
def test_steps_are_exact(micros: list[int], step_ms: float) -> None:
    """⌊(arrival − first) / step⌋ in exact arithmetic, for microseconds up to eleven days."""
    micros.sort()
    trace = at(*(m / 1e6 for m in micros))
    step = Fraction(str(step_ms)) * 1000
    assert trace.steps(step_ms).tolist() == [(m - micros[0]) // step for m in micros]
    assert trace.steps(step_ms).dtype == np.int64


def test_seconds_count_from_the_first_arrival_and_steps_do_not() -> None:
    assert at(5.5, 5.5, 6.0).arrival.tolist() == [0.0, 0.0, 0.5]
    steps = Trace.from_rows("t", "step", [(3, 1, 0, 1), (MAX_STEP, 1, 0, 0)])
    assert steps.steps(1).tolist() == steps.steps(1e6).tolist() == [3, MAX_STEP]


@pytest.mark.parametrize("step_ms", [0, -1, float("nan"), float("inf"), 1e-5])
def test_a_step_that_is_no_step(step_ms: float) -> None:
    with pytest.raises(BadInput, match="step of"):
        at(0, 1).steps(step_ms)


def three() -> Trace:
    return Trace.from_rows("t", "step", [(0, 10, 7, None), (0, 20, 3, 5), (1, 90, 0, None)])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, [7, 5, 7]),
        (64, [64, 5, 64]),
        ("64", [64, 5, 64]),
        ("output", [7, 5, 0]),
        ("limit", [40, 5, 0]),  # the third prompt alone is over the limit of 50
    ],
)
def test_missing_max_new(rule: int | str | None, expected: list[int]) -> None:
    trace = three()
    filled = trace.with_max_new(rule, limit=50)
    assert filled.max_new.tolist() == expected
    assert trace.max_new.tolist() == [-1, 5, -1]
    assert filled.notices[len(trace.notices)].startswith("max_new is missing in 2 requests: ")
    short = filled.with_max_new(0), Trace.from_rows("s", "step", [(0, 3, 9, 4), (1, 3, 4, 4)])
    assert short[0] is filled
    assert "1 request got more tokens than max_new" in short[1].with_max_new().notices[-1]
    assert filled.with_max_new(1) is filled


@pytest.mark.parametrize("rule", ["many", "-1", -1, "1.5", "", MAX_TOKENS + 1, "9" * 400])
def test_max_new_rules_that_are_none(rule: int | str) -> None:
    with pytest.raises(BadInput, match="--max-new takes"):
        three().with_max_new(rule)


def test_limit_needs_a_model_with_one() -> None:
    with pytest.raises(BadInput, match="context limit"):
        three().with_max_new("limit")


def test_head() -> None:
    trace = three()
    assert len(trace.head(2)) == 2 and trace.head(2).prompt.tolist() == [10, 20]
    assert trace.head(3) is trace and trace.head(99) is trace
    with pytest.raises(BadInput, match="1 or more"):
        trace.head(0)


def test_head_keeps_prefixes_and_counts_failures_anew() -> None:
    trace = Trace(
        "t",
        "s",
        np.zeros(3),
        np.full(3, 9),
        np.array([0, 4, 0]),
        np.full(3, -1),
        ((("a", 4),), (), (("b", 9),)),
        failed=2,
    )
    assert trace.head(2).prefix == ((("a", 4),), ()) and trace.head(2).failed == 1


def test_columns_are_copies_and_read_only() -> None:
    prompt = np.array([1, 2])
    trace = Trace("t", "s", np.zeros(2), prompt, prompt, prompt)
    prompt[0] = 99
    assert trace.prompt.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt[0] = 5


def test_an_empty_trace_is_a_trace() -> None:
    assert len(Trace.from_rows("t", "s", [])) == 0
    assert Trace.from_rows("t", "s", []).with_max_new().steps(25).tolist() == []


@pytest.mark.parametrize(
    ("unit", "rows", "reason"),
    [
        ("s", [(1, 1, 1, 1), (0, 1, 1, 1)], "sorted"),
        ("s", [(0, 1, 1, 1), (float("nan"), 1, 1, 1)], "finite"),
        ("s", [(0, 0, 1, 1)], "prompt"),
        ("s", [(0, 1, -1, 1)], "output"),
        ("s", [(0, MAX_TOKENS + 1, 1, 1)], "prompt"),
        ("s", [(0, 1, 1, -2)], "max_new"),
        ("step", [(-1, 1, 1, 1)], "steps"),
        ("ms", [(0, 1, 1, 1)], "unit"),
    ],
)
def test_what_is_no_trace(unit: Unit, rows: list[tuple[float, int, int, int]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Trace.from_rows("t", unit, rows)


@pytest.mark.parametrize("runs", [(), ((), ()), ((("a", 6),),), ((("a", 0),),)])
def test_prefixes_that_do_not_fit(runs: tuple[tuple[tuple[str, int], ...], ...]) -> None:
    with pytest.raises(ValueError, match="prefix"):
        Trace.from_rows("t", "s", [(0, 5, 1, 1)], prefix=runs)


@pytest.mark.parametrize("last", [1e15, 1e300])
def test_times_that_no_tick_counts_are_refused(last: float) -> None:
    with pytest.raises(ValueError, match="within 100,000,000,000 seconds"):
        Trace.from_rows("late", "s", [(0.0, 1, 1, 1), (last, 1, 1, 1)])
    late = Trace.from_rows("late", "s", [(0.0, 1, 1, 1), (1e11, 1, 1, 1)])
    assert late.steps(0.0001).tolist() == [0, 10**18]
