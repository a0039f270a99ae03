"""The bookkeeping bench: what its rows say; no timed assertion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments.bench import allocators as bench_allocators
from kvalloc.experiments.bench.allocators import Config, replay_canonical, run
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.generators import generate
from kvalloc.experiments.scheduler import Scheduler
from kvalloc.experiments.specs import parse_spec, token_geometry


@pytest.fixture
def bench() -> typer.Typer:
    app = typer.Typer()
    bench_allocators.register(app)
    app.callback()(lambda: None)  # so that the command keeps its name
    return app


def test_each_backend_has_a_row_of_its_own_process() -> None:
    calls = list[tuple[int, int]]()
    config = Config(("paged:16", "vmm:16"), requests=200, repeats=1)
    rows = run(config, lambda done, total: calls.append((done, total)))
    assert [row["backend"] for row in rows] == ["paged:16", "vmm:16"]
    assert calls == [(0, 2), (1, 2), (2, 2)]
    for row in rows:
        assert list(row) == ["backend", "us_per_token_step", "requests_per_s", "peak_rss_mib"]
        assert row["us_per_token_step"] > 0 and row["requests_per_s"] > 0
        # A child that took this process's peak for its own would say several hundred.
        assert 10 < row["peak_rss_mib"] < 200


def test_paged_and_mapped_books_do_the_same_steps() -> None:
    """The 200 requests exceed the memory, so that preemption is part of what is timed."""
    (_, paged), (_, mapped) = (replay_canonical(spec, 200) for spec in ("paged:16", "vmm:16"))
    assert paged.tokens == int(generate("canonical", requests=200).output.sum())
    assert paged.preemptions > 0
    assert (paged.tokens, paged.preemptions) == (mapped.tokens, mapped.preemptions)


@pytest.mark.parametrize("cap", [1, 3])
def test_no_more_run_than_the_bound_says(cap: int) -> None:
    geometry, memory = token_geometry(1000)
    allocator = parse_spec("paged:1", slots=True).allocator(geometry, memory)
    ones = np.full(10, 5)
    scheduler = Scheduler(allocator, ones, ones, ones, max_running=cap)
    scheduler.step(range(10))
    most = 0
    while scheduler.active or scheduler.waiting:
        most = max(most, len(scheduler.active))
        scheduler.step(range(0))
    assert most == cap and scheduler.counts.completed == 10


def test_the_command_prints_strict_json_alone(bench: typer.Typer) -> None:
    result = CliRunner().invoke(
        bench, "allocators -b paged:16 --requests 20 --repeats 1 --json -".split()
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["experiment"] == "bench_allocators" and len(document["rows"]) == 1
    assert document["settings"]["requests"] == 20 and document["environment"]["cpu"]


def test_the_command_shows_a_table_and_keeps_the_rows(bench: typer.Typer, tmp_path: Path) -> None:
    arguments = "allocators -b contiguous:exact --requests 20 --repeats 1 --out".split()
    result = CliRunner().invoke(bench, [*arguments, str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "contiguous:exact" in result.stdout
    assert json.loads((tmp_path / "bench_allocators.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("config", "message"),
    [(Config(("pages:16",)), "did you mean paged"), (Config(repeats=0), "at least 1")],
)
def test_what_cannot_be_timed_is_refused(config: Config, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(config)
