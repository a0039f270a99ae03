"""Tables and numbers of README and docs, written from the JSON of the runs; a test compares them.

Between ``<!-- results: NAME -->`` and ``<!-- end -->`` stand the table of an experiment, where and
with what it was measured, and its figure; ``<!-- summary: NAME -->`` begins a table of some rows
and columns of one; numbers in sentences are those of ``quoted``.
``python -m kvalloc.experiments.results_docs`` writes them anew.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from .bench import allocators as bench_allocators
from .bench import cache as bench_cache
from .bench import driver as bench_driver
from .bench import mapped as bench_mapped
from .environment import in_short
from .errors import BadInput
from .output import write_atomic
from .quoted import requote
from .registry import find
from .row_tables import Column, Columns, markdown_table, percent

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "experiments.md"
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
RESULTS = DOCS / "results" / "cpu"
_BLOCK = re.compile(r"<!-- (results|summary): (\S+) -->\n.*?<!-- end -->", re.DOTALL)


class Bench(NamedTuple):
    """A table of a bench, and the library whose version matters as much as the machine."""

    columns: Columns
    command: str
    library: str | None = None


BENCHES = {
    "bench_allocators": Bench(bench_allocators.COLUMNS, "kvalloc bench allocators"),
    "bench_driver": Bench(bench_driver.COLUMNS, "kvalloc bench driver"),
    "bench_mapped": Bench(bench_mapped.COLUMNS, "kvalloc bench mapped"),
    "bench_cache": Bench(bench_cache.COLUMNS, "kvalloc bench cache", "transformers"),
    "bench_cache_gqa": Bench(
        bench_cache.COLUMNS, "kvalloc bench cache --kv-heads 2 --context 8192", "transformers"
    ),
}
SUMMARIES: dict[str, tuple[str, Columns, tuple[str, ...]]] = {
    "memory": (
        "policies",
        (
            Column("backend", "backend"),
            Column("holds tokens", "tokens", percent),
            Column("filled later", "later", percent),
            Column("never filled", "never", percent),
            Column("requests running", "running"),
        ),
        ("contiguous:limit:buddy", "contiguous:oracle:buddy", "paged:16", "vmm:64KiB", "vmm:2MiB"),
    ),
}
"""Tables outside of docs/experiments.md: of which experiment, which columns, which backends."""


def render(text: str, results: Path = RESULTS) -> str:
    """The page with every block and every quoted number written anew.

    Raises
    ------
    BadInput
        A block without a JSON file of its name, or a quotation of what is not there.
    """

    def block(match: re.Match[str]) -> str:
        return (_block if match[1] == "results" else _summary)(match[2], results)

    return requote(_BLOCK.sub(block, text), results)


def _summary(name: str, results: Path) -> str:
    """The rows and columns that SUMMARIES names."""
    stem, columns, backends = SUMMARIES[name]
    document = json.loads((results / f"{stem}.json").read_text(encoding="utf-8"))
    rows = {row["backend"]: row for row in document["rows"]}
    return "\n".join(
        [
            f"<!-- summary: {name} -->",
            markdown_table(columns, [rows[backend] for backend in backends]) + "\n",
            f"`kvalloc run {stem}` · {in_short(document['environment'])}{busy(document)}",
            "<!-- end -->",
        ]
    )


def _block(name: str, results: Path) -> str:
    library: str | None = None
    if name in BENCHES:
        (columns, command, library), stem, simulated = BENCHES[name], name, False
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
        f"`{command}` · {in_short(document['environment'])}"
        f"{_version(library, document)}{busy(document)}",
    ]
    if (results / f"{stem}.svg").exists():
        kind = "simulated" if simulated else "figure"
        parts.append(f"\n![{name}, {kind}](results/cpu/{stem}.svg)")
    return "\n".join([part for part in parts if part] + ["<!-- end -->"])


def _version(library: str | None, document: dict[str, Any]) -> str:
    versions = document["environment"].get("versions", {})
    return f", {library} {versions.get(library)}" if library else ""


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
    """Write the pages anew; exits with 2 if a result is missing."""
    try:
        for page in PAGES:
            write_atomic(page, render(page.read_text(encoding="utf-8")))
    except BadInput as error:
        print(f"kvalloc: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
