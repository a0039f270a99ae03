"""The Triton kernels compile for every target without a GPU and keep their registers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kvalloc.kernels import triton_compile
from kvalloc.kernels.paged_triton import INTERPRETED
from kvalloc.kernels.triton_compile import TARGETS, measure_all, source_hash, standard_variants
from kvalloc.kernels.triton_tiles import (
    ITEMSIZE,
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    Variant,
    choose_splits,
)

RESULTS = Path(triton_compile.__file__).parents[1] / "docs/results/cpu/triton-resources.json"
SHARED_BYTES = 99 * 1024
"""What one program may use on the smallest devices since Ampere (sm_86, sm_89, sm_120)."""

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot compile")


def sample() -> Iterator[Variant]:
    """A few of the standard variants per target, and one each of what else may be asked for."""
    for arch in TARGETS:
        yield Variant(arch, "float16", 128, 16, 4, 1, split=True)
        yield Variant(arch, "bfloat16", 128, 256, 8, 4096)
        yield Variant(arch, "float16", 256, 16, 1, 4096)
    yield Variant(80, "bfloat16", 64, 16, 1, 1, windowed=True, split=True)
    yield Variant(90, "float16", 96, 1, 4, 512, ragged=True, windowed=True)
    yield Variant(90, "float32", 192, 16, 4, 1, split=True)
    yield Variant(100, "float32", 64, 16, 4, 512)


def test_a_sample_compiles_for_every_target_without_spills() -> None:
    for row in measure_all(list(sample())):
        assert row["spill_bytes"] == 0, row
        assert 0 < row["registers"] <= 255, row
        assert 0 < row["shared_bytes"] <= SHARED_BYTES, row
        assert row["pipelined"], row


def test_a_spill_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: with twice the keys and half the warps, registers do not suffice."""
    variant = Variant(80, "float16", 128, 16, 4, 4096)
    tiles = variant.tiles._replace(block_n=64, num_warps=4)
    monkeypatch.setattr(Variant, "tiles", tiles)
    row = triton_compile.measure(replace(variant))
    assert row["block_n"] == 64 and row["spill_bytes"] > 0


def test_the_committed_results_are_of_this_kernel_and_show_no_spill() -> None:
    results = json.loads(RESULTS.read_text())
    assert results["environment"]["kernels_sha256"] == source_hash(), (
        f"measure again: {results['environment']['command']}"
    )
    names = Variant.__dataclass_fields__
    rows = {Variant(**{n: row[n] for n in names}): row for row in results["rows"]}
    assert set(standard_variants()) <= set(rows)
    for variant, row in rows.items():
        assert {name: row[name] for name in variant.tiles._fields} == variant.tiles._asdict()
        assert row["shared_bytes"] <= SHARED_BYTES
        assert not (row["standard"] and row["spill_bytes"]), row


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_tiles_are_what_the_kernel_can_take(arch: int, dtype: str) -> None:
    assert hasattr(torch, dtype)
    for head_dim in (1, 16, 64, 80, 96, 128, 192, 256):
        for rows in (1, 7, 16, 17, 100, 10**6):
            tiles = Variant(arch, dtype, head_dim, 16, 1, rows).tiles
            assert tiles.block_d >= max(head_dim, 16)
            assert tiles.block_m >= 16 and (tiles.block_m >= rows or tiles.block_m >= 32)
            assert all(size & (size - 1) == 0 for size in tiles)


def test_contexts_are_split_only_to_fill_the_device() -> None:
    assert choose_splits(num_programs=8, longest=100_000, num_processors=132) == 66
    assert choose_splits(num_programs=1, longest=100_000, num_processors=132) == MAX_SPLITS
    assert choose_splits(num_programs=8, longest=MIN_SPLIT_TOKENS, num_processors=132) == 1
    assert choose_splits(num_programs=8, longest=3 * MIN_SPLIT_TOKENS, num_processors=132) == 3
    assert choose_splits(num_programs=4096, longest=100_000, num_processors=132) == 1
    assert choose_splits(num_programs=1, longest=0, num_processors=132) == 1
