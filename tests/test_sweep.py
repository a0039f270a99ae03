"""Sweeps: each cell once, never half-written, the same on all cores and on a Dask cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments import sweep as module
from kvalloc.experiments import sweep_command
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.sweep import Cell, compute, grid, sweep
from kvalloc.tests.command import kvalloc

pytest.importorskip("joblib")

CELLS = grid(
    ["article"],
    ["paged", "vmm:64KiB", "contiguous"],
    "tiny",
    ["2MiB"],
    pages=["4", "16"],
    policies=["max"],
)


def test_families_take_their_pages_and_policies() -> None:
    assert [cell.backend for cell in CELLS] == [
        "paged:4",
        "paged:16",
        "vmm:64KiB",
        "contiguous:max",
    ]
    cells = grid(
        ["chat", "burst"], ["vmm", "paged"], "tiny", ["8MiB", "16MiB"],
        pages=["16", "64KiB", "2MiB"], on_failures=["recompute", "swap"],
    )  # fmt: skip
    assert len(cells) == 2 * 3 * 2 * 2 and len(set(cells)) == len(cells)
    assert {cell.backend for cell in cells} == {"vmm:64KiB", "vmm:2MiB", "paged:16"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backends": ["paged"]}, "paged alone needs --page TOKENS"),
        ({"backends": ["contiguous"]}, "contiguous alone needs --policy"),
        ({"backends": ["pages:4"]}, "unknown backend 'pages:4'"),
        ({"backends": ["vmm"], "pages": ["16"]}, "--page 16 is for paged alone"),
        ({"pages": ["16"]}, "--page 16 is for paged alone"),  # paged:4 stands for itself
        ({"backends": ["paged"], "pages": ["4", "2MiB"]}, "--page 2MiB is for vmm alone"),
        ({"policies": ["max"]}, "--policy max is for contiguous alone"),
        ({"memories": ["much"]}, "'much' is not a size"),
        ({"memories": []}, "nothing to sweep"),
        ({"model": "lama-3-8b"}, "did you mean"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_anything_runs(
    changes: dict[str, Any], message: str
) -> None:
    good = {"traces": ["chat"], "backends": ["paged:4"], "model": "tiny", "memories": ["8MiB"]}
    with pytest.raises(BadInput, match=message):
        grid(**{**good, **changes})


def test_what_is_finished_is_not_computed_again(tmp_path: Path) -> None:
    rows, num = sweep(CELLS, tmp_path, jobs=2)
    assert num == 4 and [row["backend"] for row in rows] == [cell.backend for cell in CELLS]
    assert rows[0] == compute(CELLS[0], read_trace("article"))
    for path in tmp_path.glob("cells/*"):
        path.write_text(json.dumps({"error": None, "kept": path.name}))
    more = [*CELLS, replace(CELLS[0], memory="4MiB")]
    again, num = sweep(more, tmp_path, jobs=1)
    assert num == 1 and [list(row) for row in again[:4]] == [["error", "kept"]] * 4
    assert again[4]["capacity_tokens"] == 2 * rows[0]["capacity_tokens"]


def test_an_interrupted_sweep_leaves_whole_cells_and_goes_on(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(CELLS, tmp_path, jobs=1, progress=interrupt)
    finished = list((tmp_path / "cells").iterdir())
    assert len(finished) == 2 and all(json.loads(path.read_text()) for path in finished)
    calls = list[tuple[int, int]]()
    rows, num = sweep(CELLS, tmp_path, jobs=1, progress=lambda *step: calls.append(step))
    assert num == 2 and calls == [(2, 4), (3, 4), (4, 4)]
    assert rows == sweep(CELLS, tmp_path / "other", jobs=1)[0]


@pytest.mark.parametrize("left", ['{"x": ', "[3]", "{}", "", "[" * 100_000, "\udcff"])
def test_a_damaged_cell_is_computed_again(left: str, tmp_path: Path) -> None:
    rows, _ = sweep(CELLS[:1], tmp_path, jobs=1)
    (path,) = (tmp_path / "cells").iterdir()
    path.write_bytes(left.encode(errors="surrogateescape"))
    again, num_computed = sweep(CELLS[:1], tmp_path, jobs=1)
    assert num_computed == 1 and again[0]["completed"] == rows[0]["completed"]
    assert sweep(CELLS[:1], tmp_path, jobs=1)[1] == 0


def test_a_changed_file_is_another_cell(tmp_path: Path) -> None:
    path = tmp_path / "few.csv"
    path.write_text("arrival_step,prompt_tokens,output_tokens,max_new_tokens\n0,4,2,2\n")
    cell = Cell(str(path), "paged:4", "tiny", "1MiB")
    before = cell.key()
    assert before == cell.key() != replace(cell, seed=1).key()
    path.write_text(path.read_text() + "1,4,2,2\n")
    assert cell.key() != before


def test_changed_code_is_another_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CELLS[0].key()
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + (b"#" if path.name == "pool.py" else b"")
    )
    module._code.cache_clear()
    after = CELLS[0].key()
    monkeypatch.undo()
    module._code.cache_clear()
    assert after != before == CELLS[0].key()


def test_a_cell_that_cannot_be_says_why(tmp_path: Path) -> None:
    """72 tokens of 2 KiB never fit into 8 KiB; the other cells have numbers all the same."""
    cells = grid(["hole"], ["paged:2"], "tiny", ["8KiB", "2MiB"])
    (none, some), _ = sweep(cells, tmp_path, jobs=1)
    assert "can ever fit" in none["error"] and some["error"] is None
    assert some["completed"] == 5


def test_a_dask_cluster_of_two_workers_finds_the_same(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        rows, num = sweep(CELLS, tmp_path / "dask", cluster=cluster.scheduler_address)
        with distributed.Client(cluster) as client:
            took_part = client.run(lambda: "kvalloc.experiments.sweep" in sys.modules)
    assert num == 4 and any(took_part.values()), "computed here, not by the workers"
    assert rows == sweep(CELLS, tmp_path / "here", jobs=1)[0]


def test_no_scheduler_at_the_address(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with pytest.raises(BadInput, match="no Dask scheduler answers at nowhere"):
        sweep(CELLS[:1], tmp_path, cluster="nowhere://127.0.0.1:1")


def test_the_command_shows_what_was_computed(tmp_path: Path) -> None:
    app = typer.Typer()
    sweep_command.register(app)
    app.callback()(lambda: None)  # so that the command keeps its name
    arguments = [
        *"sweep -t article -b paged --page 4 -b contiguous:exact --model tiny".split(),
        *f"--memory 2MiB --jobs 1 --out {tmp_path}".split(),
    ]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert "2 cells, 2 computed now" in first.stdout and "contiguous:exact" in first.stdout
    assert len(json.loads((tmp_path / "sweep.json").read_text())["rows"]) == 2
    again = CliRunner().invoke(app, [*arguments, "--json", "-"])
    assert len(json.loads(again.stdout)["rows"]) == 2
    assert "2 cells, 0 computed now" in CliRunner().invoke(app, arguments).stdout


def test_a_wrong_choice_is_named_with_the_right_ones(tmp_path: Path) -> None:
    arguments = "sweep -t article -b paged:4 --model tiny --memory 2MiB --on-failure wait".split()
    code, _, err = kvalloc(*arguments, folder=tmp_path)
    assert code == 2 and "one of recompute, swap, drop, not 'wait'" in err
