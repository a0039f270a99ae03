"""The bench of dense attention over mapped memory: what it compares is equal, and it is timed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from kvalloc.contract import DenseView
from kvalloc.experiments.bench import mapped as bench_mapped
from kvalloc.experiments.bench.mapped_rounds import _check_alike


def test_rows_are_timed_for_every_layout_and_shape() -> None:
    rows = bench_mapped.run(bench_mapped.QUICK)
    assert [(row["layout"], row["batch"], row["context"]) for row in rows] == [
        ("token-major", 2, 64),
        ("head-major", 2, 64),
    ]
    for row in rows:
        assert set(row) == {column.key for column in bench_mapped.COLUMNS}
        assert min(row["plain_ms"], row["mapped_ms"], row["ratio"]) > 0


def test_the_ratio_is_of_tensors_of_one_round() -> None:
    timed = [[1.0, 1.0, 3.0], [4.0, 2.0, 2.0], [30.0, 10.0, 50.0]]  # mapped, plain, plain
    assert bench_mapped._summary(timed) == {
        "plain_ms": 2e3,
        "mapped_ms": 4e3,
        "ratio": 1.0,
        "ratio_low": 0.75,
        "ratio_high": 1.5,
        "spread": 3.0,
    }


def test_tensors_that_differ_are_not_compared() -> None:
    k = torch.randn(4, 1, 8)
    starts, lengths = torch.tensor([0]), torch.tensor([4], dtype=torch.int32)
    views = {n: DenseView(side, side, starts, lengths) for n, side in enumerate((k, k + 1))}
    with pytest.raises(AssertionError, match="the results differ"):
        _check_alike(views, torch.randn(1, 1, 8))


def test_help_names_the_command_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvalloc.experiments.app import app; "
        "r = CliRunner().invoke(app, ['bench', 'mapped', '--help']); import json; "
        "print(json.dumps([r.exit_code, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [0, False]
