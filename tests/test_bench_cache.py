"""The bench of transformers caches: what its rows say and what it writes. No timed assertion."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from kvalloc.experiments.bench import cache as bench_cache
from kvalloc.experiments.bench.cache import Config, run
from kvalloc.experiments.errors import BadInput
from kvalloc.tests.hf_models import one_thread

__all__ = ["one_thread"]

CACHES = [
    "DynamicCache",
    "StaticCache",
    "VmmCache",
    "ContiguousCache",
    "PagedCache",
    "PagedCache, gathered",
]
KEYS = [
    "cache",
    "context",
    "batch",
    "kv_heads",
    "update_us",
    "decode_ms_per_token",
    "resident_mib",
]
RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "cpu" / "bench_cache.json"


@pytest.fixture
def bench() -> typer.Typer:
    app = typer.Typer()
    bench_cache.register(app)
    app.callback()(lambda: None)  # so that the command keeps its name
    return app


def test_every_cache_has_a_row_for_every_context() -> None:
    config = Config((32, 16), batch=2, kv_heads=2, q_heads=2, head_dim=16, num_rounds=2)
    phases: list[tuple[int, int]] = []
    rows = run(config, lambda done, total: phases.append((done, total)))
    assert [(row["context"], row["cache"]) for row in rows] == [
        (context, cache) for context in (16, 32) for cache in CACHES
    ]
    for row in rows:
        assert list(row) == KEYS and row["batch"] == 2 and row["kv_heads"] == 2
        assert row["update_us"] > 0 and row["decode_ms_per_token"] > 0
    assert phases == [(done, 6) for done in range(6)]


def test_memory_is_what_the_process_holds() -> None:
    """A cache that reserves takes all of it; one that maps takes what is stored, nearly."""
    rows = run(Config((2048,), num_rounds=1, max_length=16384))
    resident = {row["cache"]: row["resident_mib"] for row in rows}
    live, reserved = 32, 256  # MiB: two layers, K and V of 8 heads × 128 floats
    assert resident["StaticCache"] == pytest.approx(reserved, rel=0.1)
    assert resident["VmmCache"] == pytest.approx(live, rel=0.2)


def test_the_command_prints_strict_json_alone(bench: typer.Typer) -> None:
    options = "cache --context 16 --q-heads 4 --kv-heads 2 --rounds 1 --max-length 64 --json -"
    result = CliRunner().invoke(bench, options.split())
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["experiment"] == "bench_cache"
    assert document["settings"]["contexts"] == [16]
    assert {row["cache"] for row in document["rows"]} == {*CACHES, "VmmCache, kvalloc_paged"}


def test_the_command_shows_a_table_and_draws(bench: typer.Typer, tmp_path: Path) -> None:
    options = "cache --context 16 --context 32 --rounds 1 --max-length 64 --out"
    result = CliRunner().invoke(bench, [*options.split(), str(tmp_path / "new")])
    assert result.exit_code == 0, result.output
    for word in (*CACHES, "resident"):
        assert word in result.stdout
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names == {"bench_cache.json", "bench-cache.svg", "bench-cache.png"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config((0,)), "nothing to time"),
        (Config((64,), max_length=32), "beyond --max-length 32"),
        (Config((64,), q_heads=3, kv_heads=2), "3 query heads"),
    ],
)
def test_what_cannot_be_timed_is_refused(config: Config, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(config)


def test_without_transformers_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cache, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="pip install"):
        run(Config((16,)))
