"""Every number in README and docs is that of a committed result, or is exact and has its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.quoted import QUOTE, requote
from kvalloc.experiments.results_docs import DOCS, PAGES, RESULTS, SUMMARIES, render

MEASURE = re.compile(
    r"(?<![\w.,:])\d[\d,]*(?:\.\d+)?\s?(?:%|µs\b|ms\b|s\b|GB/s|MB/s|GiB/s|tokens/s)|\b\d+(?:\.\d+)?×"
)
EXACT = {
    "docs/design.md": {
        "95 %": "test_a_long_reservation_for_a_short_answer; and a bound",
        "99.8 %": "a popular figure, quoted to be refuted",
        "80 %": "a popular figure, of the PagedAttention paper",
        "31.2 ms": "simulated, docs/scale.md",
        "16.6 ms": "simulated, docs/scale.md",
        "13.3 ms": "simulated, docs/scale.md",
        "50 %": "the hole: 1 − 16/32",
        "0.37 %": "15 of 4,096, test_at_most_fifteen_tail_tokens_in_blocks_of_sixteen",
        "97.7 %": "500 of 512, test_eight_times_the_requests_in_32_gibibytes",
        "51.2 %": "the example under the table",
        "2.3 %": "the example under the table",
        "93.9 %": "the example under the table",
        "12.2 %": "test_static_requests_in_32_gibibytes",
    },
    "docs/scale.md": {
        "31.2 ms": "simulated by the example above it",
        "16.6 ms": "simulated by the example above it",
        "13.3 ms": "simulated by the example above it",
        "50 GB/s": "an assumption",
        "27 ms": "computed by the example below it",
        "128 ms": "simulated by the example below it",
    },
    "docs/experiments.md": {
        "95 %": "a bound, in what would refute",
        "82.4 %": "printed by the vAttention paper: 56 / 68",
        "50 %": "a setting",
        "80 %": "of the step model",
        "60 %": "of the step model",
        "2 ms": "of the step model",
        "25 GB/s": "of the step model",
        "2 s": "an objective",
        "50 ms": "an objective",
        "0.30 µs": "a bound, in what would refute",
        "100 ms": "a setting of serve",
        "3 %": "a bound, in what would refute",
    },
    "docs/tutorial.md": {"97.7 %": "the output above it"},
}
"""Numbers with a unit that no run measured, and why they are what they are."""


def prose(text: str) -> str:
    """A page without code, generated tables and quoted numbers."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"^<!-- (?:results|summary): .*?^<!-- end -->$", "", text, flags=re.M | re.S)
    return QUOTE.sub("", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_numbers_and_tables_are_those_of_the_results(page: Path) -> None:
    """Refresh with: python -m kvalloc.experiments.results_docs."""
    text = page.read_text(encoding="utf-8")
    assert render(text) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_number_is_written_by_hand(page: Path) -> None:
    """Quote it (experiments/quoted.py), or say in EXACT what makes it exact."""
    name = page.relative_to(DOCS.parent).as_posix()
    by_hand = set(MEASURE.findall(prose(page.read_text(encoding="utf-8"))))
    assert by_hand == set(EXACT.get(name, {}))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_line_begins_with_a_quotation(page: Path) -> None:
    """Markdown takes such a line for HTML and ends the paragraph."""
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.lstrip(" >*-").startswith("<!--= ")] == []


def numbers(text: str) -> Iterator[str]:
    return (found[2] for found in QUOTE.finditer(text))


def test_a_number_changes_with_the_result(tmp_path: Path) -> None:
    rows = [{"backend": "a", "ms": 4.0, "share": 0.25}, {"backend": "b", "ms": 2.0, "share": 0.5}]
    (tmp_path / "made.json").write_text(json.dumps({"rows": rows}))
    text = (
        "<!--= made backend=a ms -->?<!--/--> <!--= made backend=b share % -->?<!--/--> "
        "<!--= made backend=a ms / backend=b ms .1f -->?<!--/-->"
    )
    assert list(numbers(requote(text, tmp_path))) == ["4", "50.0 %", "2.0"]
    assert requote(requote(text, tmp_path), tmp_path) == requote(text, tmp_path)


@pytest.mark.parametrize(
    "source", ["made backend=c ms", "made ms", "made backend=a s", "other backend=a ms", "made"]
)
def test_a_quotation_of_nothing_is_refused(source: str, tmp_path: Path) -> None:
    rows = [{"backend": "a", "ms": 4.0}, {"backend": "b", "ms": 2.0}]
    (tmp_path / "made.json").write_text(json.dumps({"rows": rows}))
    with pytest.raises(BadInput, match="cannot be written"):
        requote(f"<!--= {source} -->1<!--/-->", tmp_path)


def test_every_summary_is_used() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- summary: (\S+) -->", text)) == set(SUMMARIES)


def test_what_was_changed_by_hand_is_found() -> None:
    page = next(page for page in PAGES if page.name == "experiments.md")
    text = page.read_text(encoding="utf-8")
    row = json.loads((RESULTS / "policies.json").read_text())["rows"][0]
    told = f"{100 * row['tokens']:.1f} %"
    assert told in text and render(text.replace(told, "99.9 %")) == text
