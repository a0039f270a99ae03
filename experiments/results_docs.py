"""Tables of docs/experiments.md, written from the JSON of the runs and compared with it in a test.

Between ``<!-- results: NAME -->`` and ``<!-- end -->`` stand the table of an experiment, where and
with what it was measured, and its figure. ``python -m kvalloc.experiments.results_docs`` writes
them anew.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from . import bench_allocators
from .environment import in_short
from .errors import BadInput
from .output import write_atomic
from .registry import find
from .row_tables import Columns, markdown_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "experiments.md"
RESULTS = DOCS / "results" / "cpu"
_BLOCK = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
BENCHES: dict[str, Columns] = {"bench_allocators": bench_allocators.COLUMNS}


def render(text: str, results: Path = RESULTS) -> str:
    """The page with every block written anew.

    Raises
    ------
    BadInput
        A block without a JSON file of its name.
    """
    return _BLOCK.sub(lambda match: _block(match[1], results), text)


def _block(name: str, results: Path) -> str:
    if name in BENCHES:
        columns, stem, simulated = BENCHES[name], name, False
        command = f"kvalloc bench {name.removeprefix('bench_')}"
    else:
        experiment = find(name)
        columns, stem = experiment.module.COLUMNS, experiment.stem
        simulated, command = experiment.module.SIMULATED, f"kvalloc run {name}"
    path = results / f"{stem}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path.name} is missing: run {command} --out {results}") from error
    parts = [
        f"<!-- results: {name} -->",
        "**Simulated**, not measured.\n" if simulated else "",
        markdown_table(columns, document["rows"]) + "\n",
        f"`{command}` · {in_short(document['environment'])}{busy(document)}",
    ]
    if (results / f"{stem}.svg").exists():
        kind = "simulated" if simulated else "figure"
        parts.append(f"\n![{name}, {kind}](results/cpu/{stem}.svg)")
    return "\n".join([part for part in parts if part] + ["<!-- end -->"])


def busy(document: dict[str, Any]) -> str:
    """Says so where others wanted the cores as well; what only counts does not mind."""
    load, cores = document.get("load_average"), document["environment"].get("cores")
    if load is None or not cores or load < 1.5 * cores or not _is_timed(document):
        return ""
    return f". **Busy machine** (load {load:.0f}): compare within the table only"


def _is_timed(document: dict[str, Any]) -> bool:
    if document.get("simulated"):
        return False
    return any("us" in key.split("_") or "ms" in key.split("_") for key in document["rows"][0])


def main() -> None:
    """Write the page anew; exits with 2 if a result is missing."""
    try:
        write_atomic(PAGE, render(PAGE.read_text(encoding="utf-8")))
    except BadInput as error:
        sys.exit(f"kvalloc: {error}")


if __name__ == "__main__":
    main()
