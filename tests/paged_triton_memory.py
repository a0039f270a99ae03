"""Where the Triton kernel reads: no table entry without tokens, and right beyond 2^31 elements.

Real addresses are needed, so test_paged_triton.py runs these under ``TRITON_INTERPRET=1`` alone.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from kvalloc.contract import PagedView
from kvalloc.kernels.paged_triton import paged_attention
from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.attention_inputs import attention_case, relative_error


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("side", ["before", "after"])
def test_undefined_table_entries_are_never_read(page_size: int, side: str) -> None:
    """Entries outside ``[first, lengths)`` lie in memory that faults: one read would be fatal."""
    tokens, dropped = 3 * page_size, 5 * page_size if side == "before" else 0
    case = attention_case([dropped + tokens], first=[dropped], page_size=page_size)
    with guarded_row(case.paged.block_table, dropped // page_size, 3, side) as table:
        view = replace(case.paged, block_table=table)
        out = paged_attention(case.q, view, q_lens=[1], scale=0.1, window=None)
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


@pytest.mark.parametrize("length", [0, 40])
def test_without_stored_tokens_the_table_is_not_touched(length: int) -> None:
    """Case 21: nothing was written yet, or the window dropped all."""
    case = attention_case([length], first=[length], page_size=64)
    with guarded_row(case.paged.block_table, 0, 0, "after") as table:
        view = replace(case.paged, block_table=table)
        out = paged_attention(case.q, view, q_lens=[1], scale=0.1, window=None)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("order", ["token", "head"])
def test_a_pool_beyond_2_31_elements(order: str) -> None:
    """Case 20: pages at both ends, and (head-major pool) a head 2^31 elements from the first."""
    page_size, heads, head_dim = 16, 3, 64
    num_elements = 2**31 + 2**20
    memory = mmap.mmap(-1, 2 * num_elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = torch.frombuffer(memory, dtype=torch.float16)
    if order == "token":
        num_pages = num_elements // (page_size * heads * head_dim)
        shape, strides = (num_pages, page_size, heads), (page_size * heads, heads, 1)
    else:
        shape, strides = (8, page_size, heads), (page_size, 1, 2**30 // head_dim)
    k = pool.as_strided((*shape, head_dim), (*(n * head_dim for n in strides), 1))
    pages = [len(k) - 1, 0, len(k) - 2]
    random = torch.Generator().manual_seed(0)
    for page in pages:
        k[page] = torch.randn(k.shape[1:], generator=random).half()
    view = PagedView(k, k, _int32([pages]), _int32([0]), _int32([40]))
    q = torch.randn(1, 2 * heads, head_dim, generator=random).half()
    out = paged_attention(q, view, q_lens=[1], scale=0.125, window=None)
    assert relative_error(out, reference_attention(q, view, scale=0.125)) <= 1e-2


def _int32(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
