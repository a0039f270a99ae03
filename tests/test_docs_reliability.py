"""docs/reliability.md and tests/README.md say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvalloc.tests import coverage_docs
from kvalloc.tests.soak_docs import PAGE, load, render

TESTS = Path(__file__).resolve().parent
SOURCES = "\n".join(file.read_text(encoding="utf-8") for file in TESTS.glob("*.py"))
README = (TESTS / "README.md").read_text(encoding="utf-8")


def test_the_figures_are_those_of_the_soak() -> None:
    """docs/reliability.md says how to refresh them."""
    text, document = PAGE.read_text(encoding="utf-8"), load()
    assert render(text, document) == text
    document["rows"][0]["operations"] += 1
    assert render(text, document) != text, "a changed digit is found"


def test_the_lines_that_no_test_reaches_are_those_measured() -> None:
    text, document = PAGE.read_text(encoding="utf-8"), load(coverage_docs.REPORT)
    assert coverage_docs.render(text, document) == text
    document["rows"][0]["missing"] += 1
    assert coverage_docs.render(text, document) != text, "a changed digit is found"


def test_nothing_was_lost_or_leaked() -> None:
    totals = load()["totals"]
    assert totals["lost"] == totals["leaked"] == totals["readers_failed"] == 0
    assert min(totals[name] for name in ("faults", "misuses", "refused", "files_refused")) > 0


@pytest.mark.parametrize("text", [README, PAGE.read_text()], ids=["tests", "reliability"])
def test_every_test_that_is_named_exists(text: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", text))
    assert [name for name in sorted(named) if f"def {name}(" not in SOURCES] == []
    assert named


def test_every_case_has_a_test() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \|$", README, re.M)
    assert [int(number) for number, _, _ in rows] == list(range(1, 37))
    assert all("`test_" in tests for _, _, tests in rows)


def test_every_helper_is_in_the_list() -> None:
    helpers = {file.name for file in TESTS.glob("*.py") if not file.name.startswith("test_")}
    assert helpers - set(re.findall(r"`(\w+\.py)`", README)) == {"conftest.py"}
