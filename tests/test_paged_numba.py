"""Our CPU kernel against float64: every shape, layout and storage type, poisoned all around."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

from kvalloc.contract import PagedView
from kvalloc.kernels.attention import attend
from kvalloc.kernels.numba_items import attend_items
from kvalloc.kernels.numba_plan import CHUNK_ROWS, HIGH, LOW, NUM_ITEMS, TASK, plan
from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.attention_inputs import (
    LAYOUTS,
    AttentionCase,
    attention_case,
    relative_error,
    sparse_memory,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def error(case: AttentionCase, window: int | None = None) -> float:
    """Relative error of the kernel on one case."""
    out = attend(case.q, case.paged, q_lens=case.q_lens, window=window)
    return relative_error(
        out, reference_attention(case.q, case.paged, q_lens=case.q_lens, window=window)
    )


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (16, 2), (8, 1), (7, 1), (6, 2)], ids=str)
def test_decodes_every_length_around_a_page(page_size: int, heads: tuple[int, int]) -> None:
    """Cases 21 and 23: lengths 0, 1, B−1, B, B+1, 2B; groups of 1, 4, 8, all, and odd ones."""
    b = page_size
    case = attention_case(
        [0, 1, max(1, b - 1), b, b + 1, 2 * b, 150],
        page_size=b,
        q_heads=heads[0],
        kv_heads=heads[1],
        layout=LAYOUTS[b % 3],
        seed=b + heads[0],
    )
    assert error(case) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("head_dim", [1, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_head_dim_and_storage_type(head_dim: int, dtype: torch.dtype, layout: str) -> None:
    """Case 23: head dims 64, 96, 128, 256, and some that fill no vector; cases 20 to 22."""
    case = attention_case(
        [33, 0, 16, 70],
        q_lens=[1, 1, 5, 1],
        first=[0, 0, 0, 19],
        head_dim=head_dim,
        dtype=dtype,
        layout=layout,
    )
    assert torch.isnan(case.paged.k).any(), "the unreadable rest is poisoned"
    assert error(case) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 1, 7, 32, 1000])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_prefills_chunks_over_a_prefix(window: int | None, group: int) -> None:
    """Queries of whole prompts, of chunks, of decode steps and of nobody, in one batch."""
    many = CHUNK_ROWS // group + 9  # more than one task per head
    case = attention_case(
        [many, many + 61, 40, 0, 5, 90],
        q_lens=[many, many, 7, 0, 0, 1],
        first=[0, 30, 16, 0, 0, 65],
        q_heads=2 * group,
        page_size=8,
        seed=group,
    )
    assert error(case, window) < TOLERANCE[torch.float32]


def test_splits_one_long_context_among_many_short_ones() -> None:
    """Case 23: one long sequence among many short ones; its parts are merged again."""
    case = attention_case([3000, *range(1, 13)], q_heads=4, kv_heads=1, layout="head")
    assert error(case) < TOLERANCE[torch.float32]
    assert error(case, window=2000) < TOLERANCE[torch.float32]


def test_large_scores_do_not_overflow() -> None:
    case = attention_case([200, 300])
    large = AttentionCase(case.q * 300, case.paged, case.dense, case.q_lens)
    assert error(large) < 1e-4


def test_a_swapped_page_is_noticed() -> None:
    """The comparison can fail: one wrong page of 32 shows."""
    case = attention_case([512])
    expected = reference_attention(case.q, case.paged)
    table = case.paged.block_table
    table[0, 3] = table[0, 17]
    assert relative_error(attend(case.q, case.paged), expected) > 1e-2


@pytest.mark.parametrize("entry", [-1, 10**6])
def test_a_page_that_does_not_exist_is_refused(entry: int) -> None:
    case = attention_case([20, 40])
    case.paged.block_table[1, 2] = entry
    with pytest.raises(ValueError, match="sequence 1: its block table names a page outside"):
        attend(case.q, case.paged)


@pytest.mark.parametrize("layout", ["token", "head"])
def test_reads_the_far_end_of_a_large_pool(layout: str) -> None:
    """Case 20: a pool of more than 2**31 elements, hardly touched, right at its far end."""
    page_size, heads, dim = 16, 2, 64
    num_pages = 2**31 // (page_size * heads * dim) + 5
    shape = (num_pages, page_size, heads, dim)
    if layout == "head":
        shape = (num_pages, heads, page_size, dim)
    k, v = (sparse_memory(shape, torch.bfloat16) for _ in range(2))
    if layout == "head":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    pages = torch.tensor([num_pages - 1, 0, num_pages - 3])
    random = torch.Generator().manual_seed(0)
    for memory in (k, v):
        stored = torch.randn(3, page_size, heads, dim, generator=random)
        memory[pages] = stored.to(torch.bfloat16)
    view = PagedView(
        k,
        v,
        pages[None].to(torch.int32),
        torch.tensor([0], dtype=torch.int32),
        torch.tensor([3 * page_size - 2], dtype=torch.int32),
    )
    q = torch.randn(1, 4, dim, generator=random).to(torch.bfloat16)
    assert relative_error(attend(q, view), reference_attention(q, view)) < 1e-2


def test_two_threads_at_once() -> None:
    cases = [attention_case([400 + 100 * i, 30], seed=i) for i in range(2)]
    expected = [reference_attention(case.q, case.paged) for case in cases]

    def work(i: int) -> float:
        outs = [attend(cases[i].q, cases[i].paged) for _ in range(20)]
        return max(relative_error(out, expected[i]) for out in outs)

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(work, [0, 1])) < TOLERANCE[torch.float32]


def test_follows_the_thread_count_of_torch() -> None:
    case = attention_case([2000])
    before = torch.get_num_threads(), numba.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert error(case) < TOLERANCE[torch.float32]
    finally:
        torch.set_num_threads(before[0])
    assert numba.get_num_threads() == before[1], "Numba's own setting is left alone"


def test_leaves_the_thread_count_of_torch_alone() -> None:
    code = """
import torch
torch.set_num_threads(1)
from kvalloc.kernels import paged_numba
print(torch.get_num_threads())
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(("threads", "parts"), [(1, 1), (4, 31)])
def test_the_plan_covers_every_token_once(threads: int, parts: int) -> None:
    lengths = np.array([2000, 0, 17], dtype=np.int32)
    tasks, items, num_blocks, broken = plan(
        np.ones(3, dtype=np.int64),
        lengths,
        np.zeros(3, dtype=np.int32),
        np.zeros((3, 200), dtype=np.int32),
        (16, 1, 2, 4, 2, 0, threads),
    )
    assert (len(tasks), broken) == (2, -1)
    assert tasks[0, NUM_ITEMS] == parts
    for task, length in enumerate((2000, 17)):
        mine = items[items[:, TASK] == task]
        assert mine[0, LOW] == 0
        assert mine[-1, HIGH] == length
        assert np.array_equal(mine[1:, LOW], mine[:-1, HIGH])
    assert num_blocks == 2 * len(items), "two heads, one block each"


FENCED = """
import ctypes, mmap, torch
from kvalloc.contract import DenseView, PagedView
from kvalloc.kernels.attention import attend

libc = ctypes.CDLL(None, use_errno=True)

def fenced(num_elements, dtype):
    'A tensor whose last element is followed by an unreadable page.'
    size = -(-num_elements * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address + size), mmap.PAGESIZE, 0) == 0
    data = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize)
    return data[-num_elements:].normal_()

for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for dim in (64, 40, 1):
        k, v = (fenced(3 * 7 * 2 * dim, dtype).view(3, 7, 2, dim) for _ in range(2))
        q = torch.randn(4, 4, dim).to(dtype)
        lengths = torch.tensor([21, 7], dtype=torch.int32)
        table = torch.tensor([[0, 1, 2], [2, -1, -1]], dtype=torch.int32)
        paged = PagedView(k, v, table, torch.zeros(2, dtype=torch.int32), lengths)
        starts = torch.tensor([0, 14])
        dense = DenseView(k.flatten(0, 1), v.flatten(0, 1), starts, lengths)
        for view in (paged, dense):
            assert attend(q, view, q_lens=[3, 1]).isfinite().all()
            assert attend(q[:2], view, window=5).isfinite().all()
print("intact")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fences memory by mprotect")
def test_no_kernel_reads_past_the_last_token() -> None:
    """Case 22's other half: memory behind the end may be unmapped, where a read kills."""
    done = subprocess.run([sys.executable, "-c", FENCED], capture_output=True, text=True)
    assert done.stdout == "intact\n", done.stderr


NARROW = """
import sys
from llvmlite import binding

features = binding.get_host_cpu_features()
features.update(avx512f=False, avx2=sys.argv[1] == "8")
binding.get_host_cpu_features = lambda: features

from kvalloc.kernels import numba_vectors
from kvalloc.tests.test_paged_numba import attention_case, error

assert numba_vectors.LANES == int(sys.argv[1])
for head_dim in (64, 20):
    case = attention_case([70, 3], q_lens=[5, 1], head_dim=head_dim, q_heads=6, page_size=3)
    assert error(case) < 1e-5
    assert error(case, window=9) < 1e-5
print("right")
"""


@pytest.mark.parametrize("lanes", ["8", "4"])
def test_is_right_with_the_vectors_of_other_processors(lanes: str, tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", NARROW, lanes], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "right\n", done.stderr


def test_numba_compiled_one_version_only() -> None:
    """Every shape, layout and dtype runs the same machine code: compile time stays small."""
    attend(*_small())
    assert len(attend_items.signatures) == 1
    assert len(plan.signatures) == 1


def _small() -> tuple[torch.Tensor, PagedView]:
    case = attention_case([3], dtype=torch.bfloat16)
    return case.q, case.paged
