"""Times as large as a trace may hold: exact to the last step, and idle time costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvalloc.experiments.replay import replay
from kvalloc.experiments.simulated_time import simulate
from kvalloc.experiments.specs import parse_spec
from kvalloc.experiments.step_model import step_model
from kvalloc.experiments.trace import MAX_SECONDS, MAX_STEP, Trace
from kvalloc.geometry import SLOTS
from kvalloc.tests.command import kvalloc

SPECS = ("contiguous:max", "contiguous:oracle:buddy", "paged:4", "vmm:4")


def outcome(trace: Trace, spec: str, step_ms: float) -> dict[str, Any]:
    """Counts and series of a replay in 80 slots, with the steps told apart."""
    allocator = parse_spec(spec, slots=True).allocator(SLOTS, 80)
    result = replay(trace, allocator, step_ms=step_ms, owners=True)
    assert result.owners is not None
    series = result.recorder.series
    return {
        "steps": result.owners.steps,
        "series steps": series["step"],
        "counts": result.counts,
        "rows": result.owners.rows,
        "series": {name: values for name, values in series.items() if name != "step"},
    }


@pytest.mark.parametrize(
    ("unit", "last", "step_ms", "last_step"),
    [
        ("step", MAX_STEP, 25.0, MAX_STEP),
        ("s", float(MAX_SECONDS), 0.0001, 10**18),
        ("s", float(MAX_SECONDS), 25.0, 4 * 10**12),
    ],
)
@pytest.mark.parametrize("spec", SPECS)
def test_a_replay_counts_the_latest_steps_exactly(
    spec: str, unit: Any, last: float, step_ms: float, last_step: int
) -> None:
    """The same requests as a little later, with other numbers of steps."""

    def trace(end: float) -> Trace:
        return Trace.from_rows("late", unit, [(0, 30, 9, 9), (0, 30, 9, 9), (end, 50, 9, 9)])

    late, soon = outcome(trace(last), spec, step_ms), outcome(trace(100.0), spec, step_ms)
    begun = int(trace(100.0).steps(step_ms)[-1])
    for steps_of in ("steps", "series steps"):
        expected = [n if n < begun else n - begun + last_step for n in soon.pop(steps_of)]
        assert late.pop(steps_of) == expected
    assert late == soon
    assert late["counts"].completed == 3


def test_simulated_times_are_those_of_an_early_request() -> None:
    model = step_model("llama-3-8b", "H100-SXM", 1)
    waited = []
    for end in (1e3, float(MAX_SECONDS)):
        trace = Trace.from_rows("late", "s", [(0.0, 100, 20, 20), (end, 100, 20, 20)])
        allocator = parse_spec("paged:16", slots=False).allocator(model.shard, 1 << 30)
        timed = simulate(trace, allocator, model, 25e9)
        waited.append((timed.finish - timed.arrival).tolist())
    # A float64 has 15 µs between neighbours there; 20 steps round as often.
    assert waited[1] == pytest.approx(waited[0], abs=20 * 16e-6)


@pytest.mark.parametrize(
    ("arrival", "told"),
    [("1e15", "arrival_s must lie between 0 and 100000000000"), ("1e400", "arrival_s")],
)
def test_times_beyond_are_refused_in_words(arrival: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "late.csv").write_text(
        f"arrival_s,prompt_tokens,output_tokens\n0,5,5\n{arrival},5,5\n"
    )
    for command in ("compare late.csv --account --slots 80", "trace describe late.csv"):
        code, out, err = kvalloc(*command.split(), folder=tmp_path)
        assert (code, out, err.count("\n")) == (2, "", 1) and told in err, err
    slow = "trace generate uniform --requests 200000 --rate 1e-6 --out slow.csv"
    code, out, err = kvalloc(*slow.split(), folder=tmp_path)
    assert (code, out) == (2, "") and "give a larger rate" in err
    assert [path.name for path in tmp_path.iterdir()] == ["late.csv"]
