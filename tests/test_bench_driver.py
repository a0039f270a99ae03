"""The driver's bench: what its rows say, and that it leaves nothing behind. No timed assertion."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments.bench import driver as bench_driver
from kvalloc.experiments.bench.driver import NUM_WARM_UP, Config, run
from kvalloc.experiments.errors import BadInput

if not hasattr(os, "memfd_create"):
    pytest.skip("the host driver needs Linux", allow_module_level=True)

VERBS = ["reserve", "create", "map", "allow", "unmap", "release", "free"]
GROWTHS = ["grow", "grow inside", "grow warm", "grow pooled"]
KEYS = ["driver", "op", "page_bytes", "rounds", "us_p50", "us_p99", "bare_us_p50", "ratio"]


@pytest.fixture
def bench() -> typer.Typer:
    app = typer.Typer()
    bench_driver.register(app)
    app.callback()(lambda: None)  # so that the command keeps its name
    return app


def test_every_call_has_a_row_for_every_page_size() -> None:
    config, calls = Config((4096 * 4, 4096), 3), list[tuple[int, int]]()
    rows = run(config, lambda done, total: calls.append((done, total)))
    assert [(row["page_bytes"], row["op"]) for row in rows] == [
        (page_bytes, op) for page_bytes in config.page_bytes for op in VERBS + GROWTHS
    ]
    total = 2 * 2 * (NUM_WARM_UP + 3)  # verbs and growth of two page sizes
    assert calls == [(n, total) for n in range(1, total + 1)]
    for row in rows:
        assert list(row) == KEYS and row["driver"] == "host" and row["rounds"] == 3
        assert 0 < row["us_p50"] <= row["us_p99"]
        if row["op"] in ("grow inside", "grow warm"):
            assert row["bare_us_p50"] is row["ratio"] is None, "no system call is made"
        else:
            assert row["ratio"] == pytest.approx(row["us_p50"] / row["bare_us_p50"])


def test_nothing_is_left_behind() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    run(Config((4096,), 1))
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_the_command_prints_strict_json_alone(bench: typer.Typer) -> None:
    result = CliRunner().invoke(bench, "driver --page 4KiB --rounds 2 --json -".split())
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["experiment"] == "bench_driver"
    assert document["settings"] == {"page_bytes": [4096], "num_rounds": 2}
    assert len(document["rows"]) == len(VERBS + GROWTHS)
    assert document["environment"]["cpu"]


def test_the_command_shows_a_table_and_keeps_the_rows(bench: typer.Typer, tmp_path: Path) -> None:
    arguments = ["driver", "--page", "4KiB", "--rounds", "1", "--out", str(tmp_path / "new")]
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 0, result.output
    for word in ("4 KiB", *VERBS, *GROWTHS, "ratio"):
        assert word in result.stdout
    assert json.loads((tmp_path / "new" / "bench_driver.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("config", "message"),
    [(Config((1000,)), "1000 bytes is not a multiple of"), (Config((4096,), 0), "at least 1")],
)
def test_what_cannot_be_timed_is_refused(config: Config, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(config)
