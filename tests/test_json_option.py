"""``--json FILE`` means one thing in every command: as well as what is shown; ``-``: instead."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvalloc.experiments.bench import attention as bench_attention
from kvalloc.tests.command import kvalloc

ATTENTION = bench_attention.Config(
    page_sizes=(8,), contexts=(64,), page_size=8, context=64, tokens=128, q_heads=4, kv_heads=2,
    head_dim=16, rounds=1, min_bytes=0,
)  # fmt: skip
COMMANDS = {
    # command, its file in out/ (None: it keeps none), a word of its table
    "compare": ("compare article --account --slots 80 -b paged:4", "compare.json", "paged:4"),
    "run": ("run adoption --quick", "adoption.json", "Which idle row"),
    "sweep": (
        "sweep -t article -b paged:4 --model tiny --memory 2MiB --jobs 1 --out out",
        "sweep.json",
        "1 cells",
    ),
    "bench allocators": (
        "bench allocators -b paged:16 --requests 20 --repeats 1",
        "bench_allocators.json",
        "canonical trace",
    ),
    "bench attention": ("bench attention --quick", "bench_attention.json", "paged-numba"),
    "bench cache": (
        "bench cache --context 16 --q-heads 4 --kv-heads 2 --rounds 1 --max-length 64",
        "bench_cache.json",
        "resident",
    ),
    "bench driver": (
        "bench driver --page 4KiB --rounds 1",
        "bench_driver.json",
        "Host driver",
    ),
    "bench mapped": ("bench mapped --quick", "bench_mapped.json", "ordinary tensors"),
    "size": ("size --model tiny --context 10", None, "KV cache of tiny"),
    "size --list": ("size --list", None, "Known models"),
    "trace describe": ("trace describe article", None, "prompt tokens"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "QUICK", ATTENTION)


def require_what_it_needs(name: str) -> None:
    if name == "bench cache" and find_spec("transformers") is None:
        pytest.skip("the extra [transformers] is missing")
    if name in ("bench cache", "bench driver", "bench mapped") and sys.platform != "linux":
        pytest.skip("the host driver needs Linux")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_is_written_as_well(name: str, tmp_path: Path) -> None:
    require_what_it_needs(name)
    command, usual, word = COMMANDS[name]
    code, out, err = kvalloc(*command.split(), "--json", "new/mine.json", folder=tmp_path)
    assert code == 0, err
    assert word in out, "the table is shown all the same"
    written = (tmp_path / "new" / "mine.json").read_text()
    json.loads(written)
    if usual is not None:
        assert (tmp_path / "out" / usual).read_text() == written


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dash_prints_it_alone(name: str, tmp_path: Path) -> None:
    require_what_it_needs(name)
    code, out, err = kvalloc(*COMMANDS[name][0].split(), "--json", "-", folder=tmp_path)
    assert code == 0, err
    json.loads(out)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    cells = {path.name for path in tmp_path.glob("out/cells/*")}
    assert left == cells, "a sweep keeps its cells, and nothing else is left"
    assert bool(cells) == (name == "sweep")
