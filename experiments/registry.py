"""Experiments by name: the question of each, what would have refuted its answer, its module.

A module of an experiment offers ``CONFIG`` and ``QUICK`` (frozen dataclasses), ``SIMULATED``
(some numbers come from a model and were not measured), ``COLUMNS`` (of its table),
``run(config, report) -> rows`` and ``plot(rows, out) -> paths``. The first paragraph of its
docstring is the question; the one that begins with "Refuted if" says what would have been seen
had the answer been wrong.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from .errors import BadInput
from .row_tables import Columns, Row

REFUTED = "Refuted if"

NAMES = {
    "policies": 20,
    "fragmentation": 40,
    "block-size": 25,
    "page-size": 15,
    "concurrency": 15,
    "allocation-latency": 90,
    "prefix": 40,
    "pressure": 35,
    "scaling": 65,
    "timeline": 5,
    "serve": 140,
    "adoption": 3,
}
"""Name → about how many seconds a whole run takes on two cores, to know what one waits for."""


@dataclass
class Report:
    """Where a run tells how far it is and what the reader has to know."""

    notices: list[str] = field(default_factory=list)
    progress: Callable[[int, int], None] = lambda num_done, num_total: None
    """Called with steps done and steps in all."""

    def notice(self, sentence: str) -> None:
        """Tell something that the result depends on, once."""
        if sentence not in self.notices:
            self.notices.append(sentence)


class Module(Protocol):
    """What a module of an experiment offers."""

    CONFIG: Any
    QUICK: Any
    SIMULATED: bool
    COLUMNS: Columns

    def run(self, config: Any, report: Report) -> list[Row]:
        """Answer the question; no plotting."""
        ...

    def plot(self, rows: list[Row], out: Path) -> list[Path]:
        """Draw the rows."""
        ...


@dataclass(frozen=True)
class Experiment:
    """A question that ``kvalloc run`` answers."""

    name: str
    question: str
    refuted_if: str
    module: Module

    @property
    def stem(self) -> str:
        """Name of its files: what was not measured says so."""
        return f"{self.name}-simulated" if self.module.SIMULATED else self.name


def find(name: str) -> Experiment:
    """An experiment by its name.

    Raises
    ------
    BadInput
        Unknown name; the message names the nearest ones.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(NAMES)}"
        raise BadInput(f"there is no experiment {name!r}; {hint}")
    module: Any = import_module(f".questions.{name.replace('-', '_')}", __package__)
    paragraphs = [" ".join(part.split()) for part in module.__doc__.split("\n\n")]
    refuted = [part for part in paragraphs if part.startswith(REFUTED)]
    assert len(refuted) == 1, f"{name} does not say what would refute it"
    return Experiment(name, paragraphs[0], refuted[0], module)


def load_average() -> float | None:
    """Processes that wanted a core over the last minute: above the cores, times are inflated."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def result(experiment: Experiment, settings: Row, report: Report, rows: list[Row]) -> Row:
    """The JSON document of a run."""
    from .environment import environment

    return {
        "schema": 1,
        "experiment": experiment.name,
        "question": experiment.question,
        "refuted_if": experiment.refuted_if,
        "simulated": experiment.module.SIMULATED,
        "environment": environment(),
        "load_average": load_average(),
        "settings": settings,
        "notices": report.notices,
        "rows": rows,
    }


def bench_result(name: str, settings: Row, rows: list[Row]) -> Row:
    """The JSON document of ``kvalloc bench NAME``."""
    from .environment import environment

    return {
        "schema": 1,
        "experiment": f"bench_{name}",
        "environment": environment(),
        "load_average": load_average(),
        "settings": settings,
        "rows": rows,
    }
