"""The Triton kernel against float64, on CUDA where there is one and in the interpreter everywhere.

The interpreter must be chosen before triton is imported. So that it disturbs no other test,
this file runs itself a second time in a process of its own; what a test here needs is either
that process or a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contract import PagedView
from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.attention_inputs import (
    LAYOUTS,
    AttentionCase,
    attention_case,
    relative_error,
)

pytest.importorskip("triton")

from kvalloc.kernels.paged_triton import INTERPRETED, paged_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
BOUNDARIES = (0, 1, 15, 16, 17, 32)
"""Lengths around a page of 16: cases 21 and 23."""


@pytest.fixture(scope="session")
def device() -> str:
    if INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("without a GPU these run in a second process, under the interpreter")


def check(
    case: AttentionCase,
    *,
    window: int | None = None,
    num_splits: int | None = None,
    scale: float = 0.125,
) -> None:
    out = paged_attention(
        case.q, case.paged, q_lens=case.q_lens, scale=scale, window=window, num_splits=num_splits
    )
    expected = reference_attention(
        case.q, case.paged, q_lens=case.q_lens, scale=scale, window=window
    )
    assert out.shape == case.q.shape and out.dtype == case.q.dtype and out.is_contiguous()
    assert relative_error(out, expected) <= TOLERANCE[case.q.dtype]


@pytest.mark.skipif(INTERPRETED, reason="this is the second process")
def test_everything_here_passes_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "skipped" not in child.stdout.replace("1 skipped", "", 1)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_cpu_tensors_without_the_interpreter_are_refused() -> None:
    case = attention_case([3])
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        paged_attention(case.q, case.paged, q_lens=[1], scale=1.0, window=None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_decode_around_page_boundaries(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """Cases 21 to 23: sequences of 0 to 2 pages, an empty one too, behind poisoned tails."""
    check(attention_case(BOUNDARIES, head_dim=head_dim, dtype=dtype, device=device))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (16, 2), (14, 2), (24, 1), (40, 1)]
)
def test_every_group_size(device: str, q_heads: int, kv_heads: int) -> None:
    """Case 23: query heads = KV heads, 4×, 8×, all on one; also 7×, as in Qwen2."""
    check(
        attention_case(
            [5, 33], q_lens=[1, 3], q_heads=q_heads, kv_heads=kv_heads, dtype=torch.float16,
            device=device,
        )
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 64, 96, 256])
def test_every_page_size_and_layout(device: str, page_size: int, layout: str) -> None:
    """Case 21 and 23: B is smaller than a tile, one tile, several, and no divisor of any."""
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size, 100]
    q_lens = [0 if page_size == 1 else 1, 1, 2, 1, 9]
    check(
        attention_case(
            lengths, q_lens=q_lens, page_size=page_size, layout=layout, dtype=torch.bfloat16,
            device=device,
        )
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [2, 5, 19, 128])
def test_a_context_in_any_number_of_shares(device: str, num_splits: int) -> None:
    """Case 23: one long sequence among short ones, whose later shares are empty."""
    tokens = 150 if num_splits == 128 else 700
    case = attention_case(
        [1, tokens, 0, 65], q_heads=2, kv_heads=1, dtype=torch.float16, device=device
    )
    check(case, num_splits=num_splits)


def test_prefill_in_shares(device: str) -> None:
    """A short chunk over a long prefix has few tiles, so its context is split as well."""
    case = attention_case(
        [300, 5, 0], q_lens=[7, 5, 1], q_heads=2, kv_heads=1, page_size=64, device=device
    )
    check(case, num_splits=3)
    check(case, num_splits=3, window=100)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_whole_prompts(device: str, head_dim: int, dtype: torch.dtype) -> None:
    case = attention_case(
        [70, 70],
        q_lens=[70, 70],
        q_heads=2,
        kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    check(case)


def test_chunked_prefill_over_a_prefix(device: str) -> None:
    """Bottom-right alignment: the chunk sees the prefix and itself up to the diagonal."""
    case = attention_case([170, 64, 70, 3], q_lens=[40, 64, 6, 0], device=device)
    check(case)
    check(case, window=33)


@pytest.mark.parametrize("window", [1, 16, 50, 2**40])
@pytest.mark.parametrize("page_size", [16, 128])
def test_sliding_windows(device: str, window: int, page_size: int) -> None:
    """The window counts the token itself; one beyond every length changes nothing."""
    lengths, first = [1, 130, 200, 64], [0, 0, 64, 64]
    case = attention_case(
        lengths, first=first, q_lens=[1, 40, 1, 0], page_size=page_size, device=device
    )
    check(case, window=window)


def test_dropped_tokens_bound_the_view_without_a_window(device: str) -> None:
    case = attention_case(
        [200, 129, 40], first=[100, 128, 40], q_lens=[20, 1, 1], page_size=64, device=device
    )
    check(case)


def test_no_sequence_and_no_query(device: str) -> None:
    nobody = attention_case([], device=device)
    check(nobody)
    check(attention_case([9, 4], q_lens=[0, 0], device=device))
    empty = attention_case([0, 0], device=device)
    check(empty)
    check(empty, num_splits=2)


def test_q_lens_as_a_tensor_and_a_strided_query(device: str) -> None:
    """Queries cut out of a joint QKV projection are read where they lie."""
    case = attention_case([40, 9], q_lens=[3, 1], device=device)
    joint = torch.full((4, 3, 4, 64), torch.nan, device=device)
    joint[:, 0] = case.q
    expected = reference_attention(case.q, case.paged, q_lens=[3, 1], scale=0.2)
    for q in (joint[:, 0], case.q.transpose(1, 2).contiguous().transpose(1, 2)):
        out = paged_attention(q, case.paged, q_lens=torch.tensor([3, 1]), scale=0.2, window=None)
        assert relative_error(out, expected) <= 1e-5


def test_a_sequence_alone_and_in_a_batch_give_the_same_bits(device: str) -> None:
    case = attention_case([77, 200, 3], q_lens=[1, 1, 1], device=device)
    together = paged_attention(
        case.q, case.paged, q_lens=[1, 1, 1], scale=0.1, window=None, num_splits=2
    )
    for seq in range(3):
        row = slice(seq, seq + 1)
        alone = replace(
            case.paged,
            block_table=case.paged.block_table[row],
            first=case.paged.first[row],
            lengths=case.paged.lengths[row],
        )
        out = paged_attention(case.q[row], alone, q_lens=[1], scale=0.1, window=None, num_splits=2)
        assert torch.equal(out, together[row])


def test_nan_that_a_query_sees_is_not_hidden(device: str) -> None:
    case = attention_case([20, 20], device=device)
    page = case.paged.block_table[0, 0]
    case.paged.k[page, 3] = torch.nan
    for num_splits in (1, 2):
        out = paged_attention(
            case.q, case.paged, q_lens=[1, 1], scale=0.1, window=None, num_splits=num_splits
        )
        assert out[0].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_swapped_page_is_noticed(device: str, page_size: int) -> None:
    """A wrong kernel must fail the comparison: here two sequences trade one page."""
    case = attention_case([2 * page_size, 2 * page_size], page_size=page_size, device=device)
    table = case.paged.block_table.clone()
    table[[0, 1], 0] = table[[1, 0], 0]
    wrong = replace(case.paged, block_table=table)
    out = paged_attention(case.q, wrong, q_lens=[1, 1], scale=0.125, window=None)
    expected = reference_attention(case.q, case.paged, scale=0.125)
    assert relative_error(out, expected) > 100 * TOLERANCE[torch.float32]


def test_misuse_is_told(device: str) -> None:
    case = attention_case([3], head_dim=320, device=device)
    with pytest.raises(ValueError, match="at most 256"):
        paged_attention(case.q, case.paged, q_lens=[1], scale=1.0, window=None)
    case = attention_case([3], device=device)
    for num_splits in (0, 129):
        with pytest.raises(ValueError, match="from 1 to 128"):
            paged_attention(
                case.q, case.paged, q_lens=[1], scale=1.0, window=None, num_splits=num_splits
            )


@st.composite
def batches(draw: Callable[..., Any]) -> tuple[AttentionCase, int | None, int]:
    lengths, first, q_lens = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(0, 90))
        dropped = draw(st.integers(0, length))
        lengths.append(length)
        first.append(dropped)
        q_lens.append(draw(st.integers(0, min(length - dropped, 30))))
    kv_heads = draw(st.integers(1, 2))
    case = attention_case(
        lengths,
        q_lens=q_lens,
        first=first,
        page_size=draw(st.sampled_from([1, 3, 16, 33, 64, 128])),
        q_heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 40, 64])),
        layout=draw(st.sampled_from(LAYOUTS)),
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        seed=draw(st.integers(0, 99)),
        device="cpu" if INTERPRETED else "cuda",
    )
    window = draw(st.none() | st.integers(1, 80))
    return case, window, draw(st.sampled_from([1, 1, 3]))


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(batch=batches())
def test_random_batches(device: str, batch: tuple[AttentionCase, int | None, int]) -> None:
    case, window, num_splits = batch
    check(case, window=window, num_splits=num_splits)


@pytest.mark.skipif(not INTERPRETED, reason="guard pages surround CPU memory only")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("side", ["before", "after"])
def test_undefined_table_entries_are_never_read(page_size: int, side: str) -> None:
    """Entries outside ``[first, lengths)`` lie in memory that faults: one read would be fatal."""
    tokens, dropped = 3 * page_size, 5 * page_size if side == "before" else 0
    case = attention_case([dropped + tokens], first=[dropped], page_size=page_size)
    with guarded_row(case.paged.block_table, dropped // page_size, 3, side) as table:
        guarded = replace(case, paged=replace(case.paged, block_table=table))
        out = paged_attention(guarded.q, guarded.paged, q_lens=[1], scale=0.1, window=None)
    expected = reference_attention(case.q, case.paged, scale=0.1)
    assert relative_error(out, expected) <= 1e-5


@contextmanager
def guarded_row(table: torch.Tensor, start: int, count: int, side: str) -> Iterator[torch.Tensor]:
    """Entries ``[start, start + count)`` of a one-row table, with no access on one side."""
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    entries = torch.frombuffer(memory, dtype=torch.int32)
    border = size // 4
    at = border if side == "before" else border - count
    entries[at : at + count] = table[0, start : start + count]
    row = entries.as_strided((1, table.shape[1]), (table.shape[1], 1), at - start)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    forbidden = ctypes.c_void_p(entries.data_ptr() + (0 if side == "before" else size))
    assert protect(forbidden, ctypes.c_size_t(size), 0) == 0
    try:
        yield row
    finally:
        protect(forbidden, ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.mark.skipif(not INTERPRETED, reason="the pool is 4 GiB of addresses, hardly touched")
@pytest.mark.parametrize("order", ["token", "head"])
def test_a_pool_beyond_2_31_elements(order: str) -> None:
    """Case 20: pages at both ends, and (head-major pool) heads further apart than 2^31."""
    head_dim, page_size, heads = 64, 16, 2
    num_elements = 2**31 + 2**20
    memory = mmap.mmap(-1, 2 * num_elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = torch.frombuffer(memory, dtype=torch.float16)
    if order == "token":
        num_pages = num_elements // (page_size * heads * head_dim)
        k = pool[: num_pages * page_size * heads * head_dim].view(
            num_pages, page_size, heads, head_dim
        )
        pages = [num_pages - 1, 0, num_pages - 2]
    else:
        # [head, page, slot, dim]: the second head begins 2^31 elements after the first.
        strides = (page_size * head_dim, head_dim, 2**31, 1)
        k = pool.as_strided((8, page_size, heads, head_dim), strides)
        pages = [7, 0, 3]
    random = torch.Generator().manual_seed(0)
    for page in pages:
        k[page] = torch.randn(page_size, heads, head_dim, generator=random).half()
    table = torch.tensor([pages], dtype=torch.int32)
    view = PagedView(k, k, table, torch.zeros(1, dtype=torch.int32), _int32([40]))
    q = torch.randn(1, 4, head_dim, generator=random).half()
    out = paged_attention(q, view, q_lens=[1], scale=0.125, window=None)
    assert relative_error(out, reference_attention(q, view, scale=0.125)) <= 1e-2


def _int32(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
