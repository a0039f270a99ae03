"""The bench of dense attention over mapped memory: what it compares is equal, and it is timed."""

from __future__ import annotations

import json
import subprocess
import sys

from kvalloc.experiments import bench_mapped


def test_rows_are_timed_for_every_layout_and_shape() -> None:
    rows = bench_mapped.run(bench_mapped.QUICK)
    assert [(row["layout"], row["batch"], row["context"]) for row in rows] == [
        ("token-major", 2, 64),
        ("head-major", 2, 64),
    ]
    for row in rows:
        assert set(row) == {column.key for column in bench_mapped.COLUMNS}
        assert min(row["plain_ms"], row["mapped_ms"], row["ratio"]) > 0


def test_help_names_the_command_without_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvalloc.experiments.app import app; "
        "r = CliRunner().invoke(app, ['bench', 'mapped', '--help']); import json; "
        "print(json.dumps([r.exit_code, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [0, False]
