"""What a program can hand to a replay and its parts by mistake: one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvalloc.experiments.compare import Settings, compare
from kvalloc.experiments.generators import generate
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.replay import replay
from kvalloc.experiments.scheduler import Scheduler
from kvalloc.experiments.specs import parse_spec
from kvalloc.experiments.trace import Trace
from kvalloc.geometry import SLOTS
from kvalloc.paged import PagedAllocator
from kvalloc.telemetry import Measured, MeasuredAllocator

ONE: Any = np.ones(1, np.int64)
TWO: Any = np.ones(2, np.int64)


def books() -> PagedAllocator:
    return PagedAllocator(SLOTS, 80)


def scheduled(
    prompt: Any = ONE, output: Any = ONE, max_new: Any = ONE, **options: Any
) -> Scheduler:
    return Scheduler(books(), prompt, output, max_new, **options)


def settings(*specs: Any) -> Settings:
    return Settings(specs, SLOTS, 80, run=False)


def trace_of(**columns: Any) -> Trace:
    return Trace(
        **{
            **{"name": "t", "unit": "step", "arrival": [0]},
            **{"prompt": [3], "output": [1], "max_new": [1]},
            **columns,
        }
    )


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "endless columns": (
        lambda: scheduled([float("inf"), 3], [1, 2], [1, 2]),
        "prompt must be whole numbers that int64 holds, not inf",
    ),
    "columns of large unsigned numbers": (
        lambda: scheduled(np.array([2**63, 3], np.uint64), [1, 2], [1, 2]),
        "prompt must be whole numbers that int64 holds, not 9223372036854775808",
    ),
    "a trace by name": (
        lambda: replay("article", books()),  # type: ignore[arg-type]
        "a trace is needed, not 'article': kvalloc.experiments.readers.read_trace reads one",
    ),
    "swapped": (
        lambda: replay(books(), read_trace("article")),  # type: ignore[arg-type]
        "a trace is needed, not <kvalloc.paged",
    ),
    "no allocator": (
        lambda: replay(read_trace("article"), None),  # type: ignore[arg-type]
        "an allocator or a cache is needed, not None: make one",
    ),
    "a class": (
        lambda: replay(read_trace("article"), PagedAllocator),  # type: ignore[arg-type]
        "an allocator or a cache is needed, not <class .*PagedAllocator'>: make one",
    ),
    "a comparison of a name": (
        lambda: compare("article", settings(parse_spec("paged:1", slots=True))),  # type: ignore[arg-type]
        "a trace is needed, not 'article'",
    ),
    "backends by name": (
        lambda: compare(read_trace("article"), settings("paged:16")),
        "a backend is a Spec .*, not 'paged:16': kvalloc.experiments.specs.parse_spec makes one",
    ),
    "no backend": (
        lambda: compare(read_trace("article"), settings()),
        "there is no backend to compare: give at least one Spec",
    ),
    "no step": (
        lambda: replay(read_trace("article"), books(), step_ms=None),  # type: ignore[arg-type]
        "step_ms must be a number, not None",
    ),
    "a step in words": (
        lambda: replay(read_trace("chat"), books(), step_ms="25"),  # type: ignore[arg-type]
        "step_ms must be a number, not '25'",
    ),
    "books under Measured": (
        lambda: Measured(books()),  # type: ignore[arg-type]
        "Measured takes a cache, not PagedAllocator: for books alone use MeasuredAllocator",
    ),
    "nothing measured": (
        lambda: MeasuredAllocator(None),  # type: ignore[arg-type]
        "what is measured is an allocator or a cache, not None",
    ),
    "requests in words": (
        lambda: generate("alpaca", requests="5"),  # type: ignore[arg-type]
        "requests must be an integer, not '5'",
    ),
    "half a request": (
        lambda: generate("alpaca", requests=1.5),  # type: ignore[arg-type]
        "requests must be an integer, not 1.5",
    ),
    "a seed in words": (
        lambda: generate("alpaca", seed="5"),  # type: ignore[arg-type]
        "seed must be an integer, not '5'",
    ),
    "no seed": (
        lambda: read_trace("chat", seed=None),  # type: ignore[arg-type]
        "seed must be an integer, not None",
    ),
    "a rate in words": (
        lambda: generate("alpaca", rate="4"),  # type: ignore[arg-type]
        "rate must be a number, not '4'",
    ),
    "at most nobody": (lambda: scheduled(max_running=0), "max_running must be at least 1, not 0"),
    "at most two in words": (
        lambda: scheduled(max_running="2"),
        "max_running must be an integer, not '2'",
    ),
    "unequal columns": (
        lambda: scheduled(output=TWO),
        "prompt, output and max_new must be columns of one length",
    ),
    "a table": (
        lambda: scheduled(TWO[None], TWO[None], TWO[None]),
        "prompt, output and max_new must be columns of one length",
    ),
    "a broken prompt": (
        lambda: trace_of(prompt=[3.9]),
        "prompt must be whole numbers, not 3.9: round them",
    ),
    "a broken output in rows": (
        lambda: Trace.from_rows("t", "s", [(0.5, 3, 1.5, None)]),  # type: ignore[list-item]
        "output must be whole numbers, not 1.5: round them",
    ),
    "no number": (lambda: trace_of(max_new=[np.nan]), "max_new must be whole numbers, not nan"),
    "a broken step": (lambda: trace_of(arrival=[0.5]), "arrival must be whole numbers, not 0.5"),
    "words": (lambda: trace_of(prompt=["3"]), "prompt must be whole numbers that int64 holds"),
    "far too many": (lambda: trace_of(prompt=[1 << 70]), "whole numbers that int64 holds"),
    **{
        f"a trace called {wrong!r}": (
            lambda wrong=wrong: read_trace(wrong),  # type: ignore[misc]
            "a trace is named by a string or a path, not by",
        )
        for wrong in (None, 3, ["a"])
    },
}


@pytest.mark.parametrize("what", WRONG)
def test_one_sentence(what: str) -> None:
    call, told = WRONG[what]
    with pytest.raises((TypeError, ValueError), match=told) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_columns_of_lists_and_of_whole_floats_are_taken() -> None:
    assert trace_of(prompt=[3.0]).prompt.tolist() == [3]
    scheduler = scheduled([3, 4], [1, 2], [1, 2])
    scheduler.step(range(2))
    while scheduler.active:
        scheduler.step(range(0))
    assert scheduler.counts.tokens == 3
