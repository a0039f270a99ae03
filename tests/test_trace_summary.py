"""The figures of ``trace describe``, against a count by pages that shares no code with it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.generators import generate
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.trace import Runs, Trace
from kvalloc.experiments.trace_summary import prefix_hits, summarise

FOLDER = Path(os.environ.get("KVALLOC_TRACES", Path(__file__).parents[2] / "shared" / "traces"))


def with_runs(*prompts: Runs, private: int = 0) -> Trace:
    sizes = [sum(tokens for _, tokens in runs) + private for runs in prompts]
    return Trace.from_rows("t", "s", [(0, n, 1, None) for n in sizes], prefix=prompts)


def tokens_of(runs: Runs, request: int, prompt: int) -> list[object]:
    """Every token spelled out: its run, and all runs before it; then private ones."""
    tokens: list[object] = [
        (runs[: i + 1], at) for i, (_, size) in enumerate(runs) for at in range(size)
    ]
    return tokens + [(request, at) for at in range(len(tokens), prompt)]


def hits_by_pages(trace: Trace, page: int) -> list[int]:
    """Slow and obvious: a set of all full pages seen so far, spelled out from the start."""
    seen: set[tuple[object, ...]] = set()
    hits = []
    for i, prompt in enumerate(trace.prompt.tolist()):
        assert trace.prefix is not None
        tokens = tokens_of(trace.prefix[i], i, prompt)
        found = 0
        while found + page <= prompt - 1 and tuple(tokens[: found + page]) in seen:
            found += page
        hits.append(found)
        seen.update(tuple(tokens[:stop]) for stop in range(page, prompt + 1, page))
    return hits


RUNS = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(RUNS, min_size=1, max_size=8), st.integers(1, 20), st.integers(0, 9))
def test_hits_equal_the_count_by_pages(
    prompts: list[list[tuple[int, int]]], page: int, private: int
) -> None:
    trace = with_runs(*map(tuple, prompts), private=private)
    assert prefix_hits(trace, page).tolist() == hits_by_pages(trace, page)


def test_turns_of_conversations() -> None:
    trace = generate("shared-prefix", requests=40, seed=2)
    assert prefix_hits(trace, 64).tolist() == hits_by_pages(trace, 64)


@pytest.mark.parametrize(("prompt", "page", "hit"), [(32, 16, 16), (33, 32, 32), (31, 32, 0)])
def test_at_least_one_token_is_left_to_compute(prompt: int, page: int, hit: int) -> None:
    """Cases 1 and 2: a prompt seen whole reuses ⌊(n−1)/B⌋·B."""
    runs: Runs = (("a", prompt),)
    assert prefix_hits(with_runs(runs, runs), page).tolist() == [0, hit]


def test_tokens_after_the_runs_and_unknown_prefixes_are_never_shared() -> None:
    runs: Runs = (("a", 16),)
    assert prefix_hits(with_runs(runs, runs, private=16), 32).tolist() == [0, 0]
    assert prefix_hits(read_trace("chat"), 1).sum() == 0


def test_a_third_of_mooncake_is_repeated() -> None:
    """33.9 % of the prompt tokens at pages of 512, counted with sets of ids."""
    path = FOLDER / "mooncake_conversation_first5000.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path.name} in {FOLDER} (set KVALLOC_TRACES)")
    summary = summarise(read_trace(path), page_size=512)
    assert summary["prefix_hit_fraction"] == pytest.approx(0.339, abs=5e-4)
    assert (summary["requests"], summary["max_context"]) == (5000, 124_741)


def test_figures() -> None:
    trace = Trace.from_rows(
        "t", "s", [(1, 10, 7, None), (1, 20, 3, 5), (3.5, 90, 0, 9)], notices=("n",)
    )
    summary = summarise(trace, page_size=8)
    assert summary == {
        "name": "t",
        "requests": 3,
        "unit": "s",
        "span_s": 2.5,
        "prompt_tokens": 120,
        "output_tokens": 10,
        "max_context": 90,
        "prompt": {"mean": 40.0, "min": 10, "p50": 20, "p90": 90, "p99": 90, "max": 90},
        "output": {"mean": 10 / 3, "min": 0, "p50": 3, "p90": 7, "p99": 7, "max": 7},
        "max_new": {"mean": 7.0, "min": 5, "p50": 5, "p90": 9, "p99": 9, "max": 9},
        "max_new_missing": 1,
        "page_size": 8,
        "prefix_hit_fraction": 0.0,
        "has_prefixes": False,
        "failed": 0,
        "skipped": 0,
        "notices": ["n"],
    }


def test_steps_become_seconds_at_the_named_length() -> None:
    assert summarise(read_trace("article"), step_ms=50)["span_s"] == pytest.approx(0.7)
    for step_ms in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="--step-ms"):
            summarise(read_trace("article"), step_ms=step_ms)
    with pytest.raises(BadInput, match="--page-size"):
        summarise(read_trace("article"), page_size=0)


def test_an_empty_trace_has_figures_too() -> None:
    summary = summarise(Trace.from_rows("t", "s", []))
    assert summary["requests"] == summary["span_s"] == summary["prefix_hit_fraction"] == 0


def test_totals_do_not_overflow() -> None:
    rows = [(0, 2**40, 2**40, None)] * 3
    assert summarise(Trace.from_rows("t", "s", rows))["prompt_tokens"] == 3 * 2**40
    assert np.int64 == Trace.from_rows("t", "s", rows).prompt.dtype
