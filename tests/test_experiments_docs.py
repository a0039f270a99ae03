"""docs/experiments.md: every table equals the JSON it was made from, every experiment has one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.registry import NAMES, find
from kvalloc.experiments.results_docs import BENCHES, DOCS, PAGE, PAGES, RESULTS, render

TEXT = PAGE.read_text(encoding="utf-8")


def test_every_table_is_what_its_json_says() -> None:
    """Refresh with: python -m kvalloc.experiments.results_docs."""
    assert render(TEXT) == TEXT


def test_every_experiment_has_a_table() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert sorted(re.findall(r"<!-- results: (\S+) -->", pages)) == sorted([*NAMES, *BENCHES])


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_was_run_by_the_command_named(name: str) -> None:
    environment = json.loads((RESULTS / f"{name}.json").read_text())["environment"]
    command, _, target = environment["command"].partition(" docs/results/cpu")
    assert command in (f"{BENCHES[name].command} --out", f"{BENCHES[name].command} --json")
    assert target in ("", f"/{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_results_come_from_the_whole_run_by_the_command_named(name: str) -> None:
    experiment = find(name)
    document = json.loads((RESULTS / f"{experiment.stem}.json").read_text())
    assert document["experiment"] == name
    assert document["settings"]["quick"] is False
    assert document["simulated"] is experiment.module.SIMULATED
    assert document["environment"]["command"] == f"kvalloc run {name} --out docs/results/cpu"
    assert (RESULTS / f"{experiment.stem}.svg").exists()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert "://" in target or (DOCS / target).exists(), target


def test_a_table_that_was_changed_by_hand_is_found(tmp_path: Path) -> None:
    """Were a digit of a table or of its JSON changed, the first test would fail."""
    document = json.loads((RESULTS / "policies.json").read_text())
    document["rows"][0]["tokens"] += 0.1
    (tmp_path / "policies.json").write_text(json.dumps(document))
    block = "<!-- results: policies -->\nold\n<!-- end -->"
    assert render(block, tmp_path).splitlines()[1:5] != render(block).splitlines()[1:5]
    with pytest.raises(BadInput, match=r"concurrency\.json is missing: run kvalloc run"):
        render(block.replace("policies", "concurrency"), tmp_path)
