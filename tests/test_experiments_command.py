"""kvalloc run and kvalloc list: files, exit codes, what the terminal says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments import run_command
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.registry import NAMES, Report, find
from kvalloc.experiments.row_tables import Column, Row, markdown_table, percent, plain


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setenv("KVALLOC_TRACES", "")
    app = typer.Typer()
    run_command.register(app)
    return app


def test_list_names_every_question(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0, result.output
    for name in NAMES:
        assert re.search(rf"^ *{name} +\d+ (s|min) ", result.stdout, re.M), "what it takes"
    assert result.stdout.count("?") >= len(NAMES) and "(simulated)" in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_each_asks_a_question_and_says_what_refutes_it(name: str) -> None:
    experiment = find(name)
    assert experiment.question.endswith("?") and len(experiment.question) < 160
    assert experiment.refuted_if.startswith("Refuted if") and experiment.refuted_if[-1] == "."
    assert experiment.stem.endswith("-simulated") == experiment.module.SIMULATED


def test_run_writes_rows_figure_and_table(app: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "pressure", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        f"pressure-simulated.{kind}" for kind in ("json", "svg", "png")
    }
    document = json.loads((tmp_path / "pressure-simulated.json").read_text())
    assert document["simulated"] is True and document["settings"]["quick"] is True
    assert document["settings"]["gpu"] == "A100-80GB" and document["environment"]["cpu"]
    assert document["question"] == find("pressure").question
    assert "pressure (simulated)" in result.stdout and "simulated: step times" in result.stdout


def test_json_alone_on_standard_output(app: typer.Typer) -> None:
    result = CliRunner().invoke(app, ["run", "prefix", "--quick", "--json", "-"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["rows"] and "stand in" in document["notices"][0]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean policies"):
        find("polices")
    with pytest.raises(BadInput, match=r"choose from .*timeline"):
        find("?")


def test_a_notice_is_told_once() -> None:
    report = Report()
    report.notice("a")
    report.notice("a")
    assert report.notices == ["a"]


def test_markdown_writes_each_value_by_its_column() -> None:
    columns = (Column("who", "who"), Column("share", "share", percent), Column("n", "n"))
    rows: list[Row] = [{"who": "a", "share": 0.5, "n": 12345}, {"who": "b", "share": None}]
    assert markdown_table(columns, rows).splitlines() == [
        "| who | share | n |",
        "|---|--:|--:|",
        "| a | 50.0 % | 12,345 |",
        "| b | – | – |",
    ]
    assert [plain(value) for value in (3.0, 0.12345, True, -2)] == ["3", "0.123", "True", "-2"]
