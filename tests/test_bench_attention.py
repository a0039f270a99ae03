"""The attention bench: what its rows say, and that no wrong kernel is timed. Nothing timed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvalloc.experiments.bench import attention as bench_attention
from kvalloc.experiments.bench.attention import Config, points, run
from kvalloc.experiments.bench.attention_figure import plot, sweep
from kvalloc.experiments.bench.attention_points import Point, candidates
from kvalloc.experiments.bench.attention_rounds import kv_bytes
from kvalloc.experiments.errors import BadInput
from kvalloc.kernels import paged_numba

TINY = Config(
    page_sizes=(1, 16),
    contexts=(40, 100),
    context=100,
    tokens=200,
    q_heads=4,
    kv_heads=2,
    head_dim=64,
    rounds=2,
    min_bytes=0,
)
KEYS = {
    "kernel", "layout", "page_size", "batch", "context", "q_heads", "kv_heads", "head_dim",
    "dtype", "ms", "gbps", "of_copy_bandwidth", "vs_dense",
}  # fmt: skip


def test_every_kernel_has_a_row_on_every_layout_at_every_point() -> None:
    seen: list[tuple[int, int]] = []
    rows = run(TINY, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert [(r["kernel"], r["layout"], r["page_size"], r["context"], r["batch"]) for r in rows] == [
        (kernel, layout, page_size, context, 200 // context)
        for page_size, context in ((1, 100), (16, 100), (16, 40))
        for layout in ("token-major", "head-major")
        for kernel in ("dense-sdpa", "paged-numba", "gather-sdpa")
    ]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["ms"] > 0
        assert row["gbps"] == pytest.approx(kv_bytes(TINY) / row["ms"] / 1e6)
    for point in range(3):
        group = rows[6 * point : 6 * point + 6]
        assert min(r["vs_dense"] for r in group if r["kernel"] == "dense-sdpa") == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stores_the_same_tokens_in_every_layout(dtype: str) -> None:
    config = Config(q_heads=2, kv_heads=1, head_dim=8, tokens=60, dtype=dtype, min_bytes=0)
    kernels, limits = candidates(config, Point(page_size=16, context=30, batch=2))
    outs = [each.call() for each in kernels]
    for out in outs:
        assert out.shape == (2, 2, 8)
        assert (out - outs[0]).abs().max() < 0.02
    assert [each.kernel for each in limits] == ["copy", "read"]


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., torch.Tensor] = paged_numba.paged_attention

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        return right(*arguments, **options) * 1.001

    monkeypatch.setattr(paged_numba, "paged_attention", wrong)
    with pytest.raises(RuntimeError, match="paged-numba, token-major: relative error"):
        run(TINY)


def test_an_output_left_unwritten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., torch.Tensor] = paged_numba.paged_attention
    calls = 0

    def lazy(*arguments: object, **options: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = right(*arguments, **options)
        if calls > 2:  # later than the calls that are compared with float64
            out[-1] = math.nan
        return out

    monkeypatch.setattr(paged_numba, "paged_attention", lazy)
    with pytest.raises(RuntimeError, match="relative error inf"):
        run(TINY)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(tokens=4096, contexts=()), "fit into caches"),
        (Config(rounds=0), "0 rounds"),
        (Config(page_sizes=(0,)), "a block of 0 tokens"),
        (Config(contexts=(10**6,)), "a context of 1000000"),
        (Config(dtype="float64"), "'float64' has no kernel"),
        (Config(device="tpu"), "device 'tpu' is not here"),
    ],
)
def test_refuses_what_cannot_be_timed(config: Config, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        run(config)


def test_the_full_form_covers_the_block_sizes_that_people_use() -> None:
    sizes = {point.page_size for point in points(Config())}
    assert sizes == {1, 8, 16, 32, 64, 128, 256}
    assert all(point.batch * point.context == Config.tokens for point in points(Config()))


def test_draws_both_sweeps(tmp_path: Path) -> None:
    rows = run(TINY)
    assert {row["context"] for row in sweep(rows, "page_size", "context")} == {100}
    assert {row["context"] for row in sweep(rows, "context", "page_size")} == {40, 100}
    paths = plot(rows, tmp_path)
    assert [path.name for path in paths] == ["bench-attention.svg", "bench-attention.png"]
    assert "paged-numba, head-major" in paths[0].read_text()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr(bench_attention, "QUICK", TINY)
    app = typer.Typer()
    bench_attention.register(app)
    app.callback()(lambda: None)  # so that the command keeps its name
    return app


def test_the_command_prints_strict_json_alone(small: typer.Typer) -> None:
    result = CliRunner().invoke(small, ["attention", "--quick", "--json", "-"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["experiment"] == "bench_attention"
    assert document["settings"]["kv_heads"] == 2
    assert len(document["rows"]) == 18


def test_quick_has_smaller_defaults_and_no_more(small: typer.Typer) -> None:
    words = ["attention", "--quick", "--block", "2", "--rounds", "1", "--json", "-"]
    settings = json.loads(CliRunner().invoke(small, words).stdout)["settings"]
    assert (settings["page_sizes"], settings["rounds"]) == ([2], 1)
    assert settings["tokens"] == TINY.tokens


def test_the_command_writes_json_and_figure(small: typer.Typer, tmp_path: Path) -> None:
    result = CliRunner().invoke(small, ["attention", "--quick", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "bench_attention.json",
        "bench-attention.svg",
        "bench-attention.png",
    }
    assert "paged-numba" in result.output
