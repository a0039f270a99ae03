"""docs/transformers.md is so: its example prints what it says, its claims were measured."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from kvalloc.tests.hf_models import one_thread

__all__ = ["one_thread"]

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "transformers.md"
TEXT = PAGE.read_text(encoding="utf-8")


def document(name: str) -> Any:
    return json.loads((DOCS / "results" / "cpu" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_example_prints_what_it_says() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)
    (said,) = re.findall(r"^```text\n(.*?)^```$", TEXT, re.M | re.S)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(example, str(PAGE), "exec"), {})
    assert printed.getvalue() == said


def test_what_the_page_claims_was_measured() -> None:
    """At 8,192 tokens in one run: updates, decode steps and memory beside transformers' own."""
    rows = {row["cache"]: row for row in document("bench_cache")["rows"] if row["context"] == 8192}
    ours, static, dynamic = (rows[f"{kind}Cache"] for kind in ("Vmm", "Static", "Dynamic"))
    assert ours["update_us"] * 100 <= dynamic["update_us"]
    assert ours["update_us"] <= 1.5 * static["update_us"]
    assert ours["decode_ms_per_token"] <= 1.03 * static["decode_ms_per_token"]
    live = 8192 * 2 * 2 * 8 * 128 * 4 / 2**20
    assert ours["resident_mib"] <= 1.15 * live + 2 * 2 * 8 / 16
