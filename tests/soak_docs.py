"""The table of docs/reliability.md, written from the soak's JSON and compared with it in a test."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kvalloc.experiments.output import write_atomic
from kvalloc.tests.soak import REPORT

PAGE = REPORT.parents[2] / "reliability.md"
_BLOCK = re.compile(r"<!-- soak -->\n.*?<!-- end -->", re.DOTALL)
KINDS = {"books": "books alone", "cache": "caches", "failing": "failing drivers"}
COLUMNS = {
    "operations": "operations",
    "checks": "checks",
    "tokens_read": "tokens read back",
    "refused": "refused",
    "misuses": "wrong calls",
    "faults": "driver faults",
}


def render(text: str, document: dict[str, Any]) -> str:
    """The page with the figures of a report."""
    lines = [
        "| " + " | ".join(["", *COLUMNS.values()]) + " |",
        "|---" + "|--:" * len(COLUMNS) + "|",
    ]
    for kind, shown in KINDS.items():
        rows = [r for r in document["rows"] if r["kind"] == kind and r["backend"] != "readers"]
        sums = [f"{sum(row.get(column, 0) for row in rows):,}" for column in COLUMNS]
        lines.append("| " + " | ".join([f"{shown} ({len(rows)})", *sums]) + " |")
    total, environment = document["totals"], document["environment"]
    commit = (environment["commit"] or "unknown")[:7]
    told = (
        f"**{total['operations']:,} operations** in all, {total['files_read']:,} mutated files "
        f"read and {total['files_refused']:,} refused among them, {total['bad_inputs']:,} bad "
        f"inputs, {total['faults']:,} faults injected. **Lost: {total['lost']:,}. "
        f"Leaked: {total['leaked']:,}.** Readers that failed: {total['readers_failed']:,}."
    )
    where = (
        f"`{environment['command']}` · {environment['cpu']}, {environment['cores']} cores, commit "
        f"{commit}, {environment['date'][:10]}, {document['seconds'] / 60:.1f} minutes"
    )
    block = "\n".join(["<!-- soak -->", *lines, "", told, "", where, "<!-- end -->"])
    return _BLOCK.sub(lambda _: block, text)


def load(path: Path = REPORT) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


if __name__ == "__main__":
    write_atomic(PAGE, render(PAGE.read_text(encoding="utf-8"), load()))
