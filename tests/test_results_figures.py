"""``make figures``: the figures in docs are those that the committed results draw."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.results_docs import DOCS, PAGES, RESULTS
from kvalloc.experiments.results_figures import draw_hole, draw_results


def words(svg: Path) -> list[str]:
    """Its texts; coordinates hang on the version of matplotlib."""
    return re.findall(r"<text[^>]*>(.*?)</text>", svg.read_text(encoding="utf-8"), re.S)


def test_figures_are_those_of_the_results(tmp_path: Path) -> None:
    """Draw them again with: make figures."""
    drawn = {path: RESULTS / path.name for path in draw_results(tmp_path)}
    drawn[draw_hole(tmp_path)] = DOCS / "hole.svg"
    assert [kept.name for path, kept in drawn.items() if words(path) != words(kept)] == []
    shown = {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^]]*\]\(([^)]+\.svg)\)", page.read_text(encoding="utf-8"))
    }
    assert shown - set(drawn.values()) == set()


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"policies\.json is missing"):
        list(draw_results(tmp_path, tmp_path))
