"""kvalloc run and kvalloc list: files, exit codes, what the terminal says."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments import run_command
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.registry import NAMES, Report, find
from kvalloc.experiments.row_tables import Column, Row, markdown_table, percent, plain, show


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


@pytest.mark.parametrize("name", ["allocators", "attention", "cache", "driver", "mapped"])
@pytest.mark.parametrize("quick", [True, False])
def test_every_bench_has_a_quick_form(
    name: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"kvalloc.experiments.bench.{name}")
    ran: list[object] = []

    def run(config: object, progress: object) -> list[Row]:
        ran.append(config)
        return []

    monkeypatch.setattr(module, "run", run)
    bench = typer.Typer()
    module.register(bench)
    bench.callback()(lambda: None)  # so that the command keeps its name
    result = CliRunner().invoke(bench, [name, "--json", "-", *["--quick"] * quick])
    assert result.exit_code == 0, result.output
    assert ran == [module.QUICK if quick else module.Config()] and module.Config() != module.QUICK


ROWS: list[Row] = [
    {"backend": "vmm:64KiB:interleaved", "calls": 1234567, "differently": 0.5},
    {"backend": "paged:16", "calls": 1, "differently": None},
]
COLUMNS = (
    Column("backend", "backend"),
    Column("number of calls", "calls"),
    Column("answered differently", "differently", percent),
)


@pytest.mark.parametrize("width", [10, 30, 37, 80])
def test_a_table_breaks_no_word_and_cuts_no_value(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show(COLUMNS, ROWS, "A title")
    printed = capsys.readouterr().out
    lines = [line.rstrip() for line in printed.splitlines()]
    assert lines[0] == "A title" and "…" not in printed
    words = set(printed.split())
    assert {"number", "calls", "answered", "differently", "1,234,567", "50.0"} <= words
    parts = 1 if width >= 21 + 1 + 9 + 1 + 11 else 2
    assert printed.count("vmm:64KiB:interleaved") == parts, "each part names its rows"
    assert max(map(len, lines)) <= max(width, 21 + 1 + 11)


def test_columns_through_the_last_text_name_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's size is a number, and the call beside it says what was timed."""
    monkeypatch.setenv("COLUMNS", "20")
    rows: list[Row] = [{"page": n, "call": f"call{n}", "a": 1, "b": None} for n in (4096, 8192)]
    show(tuple(Column(key, key) for key in ("page", "call", "a", "b")), rows, "")
    both = capsys.readouterr().out
    assert both.count("call4096") == 1
    rows[0]["a"] = 10**8
    show(tuple(Column(key, key) for key in ("page", "call", "a", "b")), rows, "")
    assert capsys.readouterr().out.count("4,096 call4096") == 2
