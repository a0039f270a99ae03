"""Runs the checks of the Triton kernel where it can run: in the interpreter, and on a GPU.

The interpreter must be chosen before triton is imported, so the checks get processes of their
own; their files are not named ``test_…`` so that they are collected there only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvalloc.tests.attention_inputs import attention_case

pytest.importorskip("triton")

from kvalloc.kernels.paged_triton import INTERPRETED, paged_attention

BATCHES = Path(__file__).with_name("paged_triton_batches.py")
MEMORY = Path(__file__).with_name("paged_triton_memory.py")


def test_in_the_interpreter() -> None:
    """Cases 20 to 23 with CPU tensors: results, and what is never read."""
    run_checks(BATCHES, MEMORY, interpret=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu() -> None:
    """Cases 21 to 23, compiled: also the native products of bfloat16."""
    run_checks(BATCHES, interpret=False)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    case = attention_case([3])
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        paged_attention(case.q, case.paged, q_lens=[1], scale=1.0, window=None)


def run_checks(*files: Path, interpret: bool) -> None:
    # Tiles are small: threads would only wait for one another.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if interpret else {}
    environment = {**os.environ, **threads, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert child.returncode == 0, child.stdout + child.stderr
    passed = re.search(r"(\d+) passed", child.stdout)
    assert passed and int(passed[1]) >= 50, child.stdout
