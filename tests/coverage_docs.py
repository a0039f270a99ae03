"""The lines that no test reaches, each with a reason: from what `make coverage` left to the docs.

``python -m kvalloc.tests.coverage_docs`` writes docs/results/cpu/coverage.json and the table of
docs/reliability.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kvalloc.experiments.environment import environment
from kvalloc.experiments.output import emit_json, write_atomic
from kvalloc.tests.soak import REPORT as SOAK
from kvalloc.tests.soak_docs import PAGE, load

REPORT = SOAK.with_name("coverage.json")
DATA = PAGE.parents[1] / "build" / "coverage" / "data"
_BLOCK = re.compile(r"<!-- coverage -->\n.*?<!-- end -->", re.DOTALL)
REASONS = {
    "compiled": "run as machine code by Numba, in which no line is counted",
    "gpu": "need a GPU, or torch's kernels for one",
    "by hand": "write the committed documents; run by hand",
    "rare": "no test brings them about: refusals of a system, races, other platforms, wrong calls",
}
FILES = {
    "compiled": r"kernels/numba_(items|plan)\.py",
    "gpu": r"experiments/gpu/\w+\.py|kernels/(attention|dense|torch_varlen|paged_triton)\.py"
    r"|experiments/bench/attention_(points|rounds)\.py|vmm/cuda\w*\.py",
    "by hand": r"experiments/results_(docs|figures)\.py|kernels/triton_compile\.py",
}


def reason_of(file: str) -> str:
    """Why lines of a file are not reached."""
    return next((name for name, files in FILES.items() if re.fullmatch(files, file)), "rare")


def measured(data: Path = DATA) -> dict[str, Any]:
    """What the tests reached, file by file, tests apart."""
    import coverage

    found = coverage.Coverage(data_file=str(data), config_file=False)
    found.load()
    files = sorted(found.get_data().measured_files())
    root = os.path.commonpath(files)
    rows: list[dict[str, Any]] = []
    num_statements = 0
    for path in files:
        file = os.path.relpath(path, root)
        if file.startswith("tests/"):
            continue
        _, statements, _, missing, shown = found.analysis2(path)
        num_statements += len(statements)
        if missing:
            rows.append(
                {"file": file, "missing": len(missing), "lines": shown, "reason": reason_of(file)}
            )
    return {
        "schema": 1,
        "experiment": "coverage",
        "environment": environment(),
        "statements": num_statements,
        "missing": sum(row["missing"] for row in rows),
        "rows": rows,
    }


def render(text: str, document: dict[str, Any]) -> str:
    """The page with the lines of a report."""
    lines = ["| why | lines | where |", "|---|--:|---|"]
    for reason, told in REASONS.items():
        rows = [row for row in document["rows"] if row["reason"] == reason]
        where = "; ".join(f"`{row['file']}` {row['lines']}" for row in rows)
        lines.append(f"| {told} | {sum(row['missing'] for row in rows):,} | {where} |")
    statements, missing = document["statements"], document["missing"]
    told = f"**{statements - missing:,} of {statements:,} statements** are reached. The others:"
    commit = (document["environment"]["commit"] or "unknown")[:7]
    where = f"`make coverage` · commit {commit}, {document['environment']['date'][:10]}"
    block = "\n".join(["<!-- coverage -->", told, "", *lines, "", where, "<!-- end -->"])
    return _BLOCK.sub(lambda _: block, text)


if __name__ == "__main__":
    emit_json(measured(), REPORT)
    write_atomic(PAGE, render(PAGE.read_text(encoding="utf-8"), load(REPORT)))
