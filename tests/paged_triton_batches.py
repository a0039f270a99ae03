"""The Triton kernel against float64: shapes, batches, windows, shares. Run by test_paged_triton.py.

Under ``TRITON_INTERPRET=1`` on CPU tensors, otherwise on CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.kernels.paged_triton import INTERPRETED, paged_attention
from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.attention_inputs import (
    LAYOUTS,
    AttentionCase,
    attention_case,
    relative_error,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
BOUNDARIES = (0, 1, 15, 16, 17, 32)
"""Lengths around a page of 16: cases 21 and 23."""


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


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (64, torch.float16),
        (96, torch.bfloat16),
        (128, torch.float32),
        (128, torch.float16),
        (192, torch.float32),
        (256, torch.bfloat16),
    ],
    ids=str,
)
def test_decode_around_page_boundaries(head_dim: int, dtype: torch.dtype) -> None:
    """Cases 21 to 23: sequences of 0 to 2 pages, an empty one too, behind poisoned tails."""
    check(attention_case(BOUNDARIES, head_dim=head_dim, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"), [(2, 2), (8, 2), (8, 1), (16, 2), (14, 2), (24, 1), (40, 1)]
)
def test_every_group_size(q_heads: int, kv_heads: int) -> None:
    """Case 23: query heads = KV heads, 4×, 8×, all on one; also 7×, as in Qwen2."""
    check(
        attention_case(
            [5, 33], q_lens=[1, 3], q_heads=q_heads, kv_heads=kv_heads, dtype=torch.float16,
            device=DEVICE,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "layout"),
    [
        (1, "head"),
        (2, "token"),
        (7, "interleaved"),
        (16, "head"),
        (64, "token"),
        (64, "head"),
        (96, "interleaved"),
        (256, "head"),
    ],
)
def test_page_sizes_and_layouts(page_size: int, layout: str) -> None:
    """Case 21 and 23: B is smaller than a tile, one tile, several, and no divisor of any."""
    lengths = [page_size - 1, page_size, page_size + 1, 2 * page_size, 100]
    q_lens = [0 if page_size == 1 else 1, 1, 2, 1, 9]
    check(
        attention_case(
            lengths, q_lens=q_lens, page_size=page_size, layout=layout, dtype=torch.bfloat16,
            device=DEVICE,
        )
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [2, 5, 19, 128])
def test_a_context_in_any_number_of_shares(num_splits: int) -> None:
    """Case 23: one long sequence among short ones, whose later shares are empty."""
    tokens = {2: 300, 5: 300, 19: 1200, 128: 150}[num_splits]
    case = attention_case(
        [1, tokens, 0, 65], q_heads=2, kv_heads=1, dtype=torch.float16, device=DEVICE
    )
    check(case, num_splits=num_splits)


def test_prefill_in_shares() -> None:
    """A short chunk over a long prefix has few tiles, so its context is split as well."""
    case = attention_case(
        [300, 5, 0], q_lens=[7, 5, 1], q_heads=2, kv_heads=1, page_size=64, device=DEVICE
    )
    check(case, num_splits=3)
    check(case, num_splits=3, window=100)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.float32), (64, torch.bfloat16), (192, torch.float16)],
    ids=str,
)
def test_whole_prompts(head_dim: int, dtype: torch.dtype) -> None:
    case = attention_case(
        [70, 70],
        q_lens=[70, 70],
        q_heads=2,
        kv_heads=1,
        head_dim=head_dim,
        dtype=dtype,
        device=DEVICE,
    )
    check(case)


def test_chunked_prefill_over_a_prefix() -> None:
    """Bottom-right alignment: the chunk sees the prefix and itself up to the diagonal."""
    case = attention_case([170, 64, 70, 3], q_lens=[40, 64, 6, 0], device=DEVICE)
    check(case)
    check(case, window=33)


@pytest.mark.parametrize("window", [1, 16, 50, 2**40])
@pytest.mark.parametrize("page_size", [16, 128])
def test_sliding_windows(window: int, page_size: int) -> None:
    """The window counts the token itself; one beyond every length changes nothing."""
    lengths, first = [1, 130, 200, 64], [0, 0, 64, 64]
    case = attention_case(
        lengths, first=first, q_lens=[1, 40, 1, 0], page_size=page_size, device=DEVICE
    )
    check(case, window=window)


def test_dropped_tokens_bound_the_view_without_a_window() -> None:
    case = attention_case(
        [200, 129, 40], first=[100, 128, 40], q_lens=[20, 1, 1], page_size=64, device=DEVICE
    )
    check(case)


def test_no_sequence_and_no_query() -> None:
    nobody = attention_case([], device=DEVICE)
    check(nobody)
    check(attention_case([9, 4], q_lens=[0, 0], device=DEVICE))
    empty = attention_case([0, 0], device=DEVICE)
    check(empty)
    check(empty, num_splits=2)


def test_q_lens_as_a_tensor_and_a_strided_query() -> None:
    """Queries cut out of a joint QKV projection are read where they lie."""
    case = attention_case([40, 9], q_lens=[3, 1], device=DEVICE)
    joint = torch.full((4, 3, 4, 64), torch.nan, device=DEVICE)
    joint[:, 0] = case.q
    expected = reference_attention(case.q, case.paged, q_lens=[3, 1], scale=0.2)
    for q in (joint[:, 0], case.q.transpose(1, 2).contiguous().transpose(1, 2)):
        out = paged_attention(q, case.paged, q_lens=torch.tensor([3, 1]), scale=0.2, window=None)
        assert relative_error(out, expected) <= 1e-5


def test_a_sequence_alone_and_in_a_batch_give_the_same_bits() -> None:
    case = attention_case([77, 200, 3], q_lens=[1, 1, 1], device=DEVICE)
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


def test_nan_that_a_query_sees_is_not_hidden() -> None:
    case = attention_case([20, 20], device=DEVICE)
    page = case.paged.block_table[0, 0]
    case.paged.k[page, 3] = torch.nan
    for num_splits in (1, 2):
        out = paged_attention(
            case.q, case.paged, q_lens=[1, 1], scale=0.1, window=None, num_splits=num_splits
        )
        assert out[0].isnan().all() and not out[1].isnan().any()


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_swapped_page_is_noticed(page_size: int) -> None:
    """A wrong kernel must fail the comparison: here two sequences trade one page."""
    case = attention_case([2 * page_size, 2 * page_size], page_size=page_size, device=DEVICE)
    table = case.paged.block_table.clone()
    table[[0, 1], 0] = table[[1, 0], 0]
    wrong = replace(case.paged, block_table=table)
    out = paged_attention(case.q, wrong, q_lens=[1, 1], scale=0.125, window=None)
    expected = reference_attention(case.q, case.paged, scale=0.125)
    assert relative_error(out, expected) > 100 * TOLERANCE[torch.float32]


def test_misuse_is_told() -> None:
    case = attention_case([3], head_dim=320, device=DEVICE)
    with pytest.raises(ValueError, match="at most 256"):
        paged_attention(case.q, case.paged, q_lens=[1], scale=1.0, window=None)
    case = attention_case([3], device=DEVICE)
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
        device=DEVICE,
    )
    window = draw(st.none() | st.integers(1, 80))
    return case, window, draw(st.sampled_from([1, 1, 3]))


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(batch=batches())
def test_random_batches(batch: tuple[AttentionCase, int | None, int]) -> None:
    case, window, num_splits = batch
    check(case, window=window, num_splits=num_splits)
