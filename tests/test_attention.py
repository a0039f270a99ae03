"""The door: what it refuses, which kernel it picks, and stock dense kernels on the CPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contract import DenseView, PagedView
from kvalloc.kernels import gather
from kvalloc.kernels.attention import attend
from kvalloc.kernels.dense import QUERY_BLOCK, _check_flash_limits
from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.attention_inputs import (
    LAYOUTS,
    attention_case,
    relative_error,
    sparse_memory,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_decodes(heads: tuple[int, int], dtype: torch.dtype, layout: str) -> None:
    """Cases 21, 22 and 23 for consecutive addresses: what lies around a sequence is NaN."""
    case = attention_case(
        [0, 1, 15, 16, 17, 32, 200],
        first=[0, 0, 0, 0, 3, 16, 40],
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=96,
        dtype=dtype,
        layout=layout,
    )
    for window in (None, 1, 10):
        out = attend(case.q, case.dense, window=window)
        expected = reference_attention(case.q, case.dense, window=window)
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("window", [None, 1, 7, QUERY_BLOCK, 1000])
def test_dense_prefills_chunks_over_a_prefix(window: int | None) -> None:
    n = QUERY_BLOCK + 3
    case = attention_case([n, n + 40, 20, 0, 9], q_lens=[n, n, 5, 0, 0], layout="head")
    out = attend(case.q, case.dense, q_lens=case.q_lens, window=window)
    expected = reference_attention(case.q, case.dense, q_lens=case.q_lens, window=window)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_dense_reads_beyond_two_to_the_31_elements() -> None:
    """Case 20: starts are int64, also in a buffer of more than 2**31 elements."""
    heads, dim = 4, 64
    rows = 2**31 // (heads * dim) + 100
    k, v = (sparse_memory((rows, heads, dim), torch.bfloat16) for _ in range(2))
    k[-50:].normal_(generator=torch.Generator().manual_seed(0))
    v[-50:].normal_(generator=torch.Generator().manual_seed(1))
    view = DenseView(k, v, torch.tensor([rows - 50]), torch.tensor([50], dtype=torch.int32))
    q = k[-1:].clone()
    assert relative_error(attend(q, view), reference_attention(q, view)) < 1e-2


@pytest.mark.parametrize("window", [2**31, 2**63 - 1, 2**63, 10**30])
@pytest.mark.parametrize("q_lens", [[1, 1], [20, 3]], ids=["decode", "chunks"])
def test_a_window_beyond_all_tokens_hides_none(window: int, q_lens: list[int]) -> None:
    """Also where an int64 ends: a window without end is one number to a program."""
    case = attention_case([20, 60], q_lens=q_lens)
    expected = reference_attention(case.q, case.dense, q_lens=q_lens)
    wide = reference_attention(case.q, case.dense, q_lens=q_lens, window=window)
    assert torch.equal(wide, expected)
    for view in (case.dense, case.paged):
        out = attend(case.q, view, q_lens=q_lens, window=window)
        assert relative_error(out, expected) < TOLERANCE[torch.float32]


@settings(deadline=None, max_examples=25)
@given(
    shape=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(0, 60)),
        min_size=1,
        max_size=4,
    ),
    page_size=st.sampled_from([1, 3, 8, 16]),
    group=st.integers(1, 5),
    window=st.none() | st.integers(1, 40),
    layout=st.sampled_from(LAYOUTS),
)
def test_dense_paged_and_gathered_agree_with_float64(
    shape: list[tuple[int, int, int]],
    page_size: int,
    group: int,
    window: int | None,
    layout: str,
) -> None:
    lengths = [length for length, _, _ in shape]
    q_lens = [min(length, num_queries) for length, num_queries, _ in shape]
    first = [min(skip, n - q) for n, q, (_, _, skip) in zip(lengths, q_lens, shape, strict=True)]
    case = attention_case(
        lengths,
        q_lens=q_lens,
        first=first,
        page_size=page_size,
        q_heads=2 * group,
        layout=layout,
        head_dim=32,
    )
    expected = reference_attention(case.q, case.paged, q_lens=q_lens, window=window)
    outs = [attend(case.q, view, q_lens=q_lens, window=window) for view in (case.dense, case.paged)]
    outs.append(
        gather.paged_attention(case.q, case.paged, q_lens=q_lens, scale=32**-0.5, window=window)
    )
    for out in outs:
        assert out.shape == case.q.shape
        assert relative_error(out, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_empty_sequences_and_batches_give_defined_results(kind: str) -> None:
    """Case 21: no tokens → zeros; no queries → no rows; no sequences → nothing."""
    case = attention_case([0, 0], q_lens=[2, 1])
    assert torch.all(attend(case.q, getattr(case, kind), q_lens=[2, 1]) == 0)
    case = attention_case([5, 6], q_lens=[0, 0])
    assert attend(case.q, getattr(case, kind), q_lens=[0, 0]).shape == case.q.shape
    case = attention_case([])
    assert attend(case.q, getattr(case, kind)).shape == (0, 4, 64)


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_takes_a_scale_and_strided_queries(kind: str) -> None:
    case = attention_case([40, 50], q_lens=[3, 1])
    view = getattr(case, kind)
    wide = torch.randn(4, 4, 128)
    out = attend(wide[..., ::2], view, q_lens=torch.tensor([3, 1]), scale=0.5)
    expected = reference_attention(wide[..., ::2], view, q_lens=[3, 1], scale=0.5)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_says_in_the_log_which_kernel_ran(caplog: pytest.LogCaptureFixture) -> None:
    case = attention_case([4])
    with caplog.at_level(logging.DEBUG, logger="kvalloc.kernels.attention"):
        attend(case.q, case.dense)
        attend(case.q, case.paged)
    assert "stock dense" in caplog.messages[0]
    assert "paged_numba" in caplog.messages[1]


CASE = attention_case([20, 30], q_heads=4, kv_heads=2)
INT32 = torch.tensor([1, 1], dtype=torch.int32)


@pytest.mark.parametrize("view", [CASE.dense, CASE.paged], ids=["dense", "paged"])
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"q": CASE.q[..., :32]}, ValueError, r"q must be \[sum\(q_lens\), H_q, 64\]"),
        ({"q": CASE.q[0]}, ValueError, "q must be"),
        ({"q": CASE.q.half()}, TypeError, "convert q"),
        ({"q": CASE.q.to("meta")}, ValueError, "move q"),
        ({"q": CASE.q[:, :3]}, ValueError, "multiple of the 2 KV heads, not 3"),
        ({"q": CASE.q[:1]}, ValueError, "q has 1 rows, q_lens sums to 2"),
        ({"q_lens": [2]}, ValueError, "1 entries for 2 sequences"),
        ({"q_lens": [3, -1]}, ValueError, "must not be negative"),
        ({"q_lens": [1, 2]}, ValueError, "sums to 3"),
        ({"window": 0}, ValueError, "window must be at least 1"),
        ({"scale": float("nan")}, ValueError, "scale must be a finite number"),
    ],
)
def test_refuses_wrong_queries(
    view: DenseView | PagedView, arguments: dict[str, object], kind: type[Exception], message: str
) -> None:
    call = {"q": CASE.q, **arguments}
    with pytest.raises(kind, match=message):
        attend(view=view, **call)  # type: ignore[arg-type]


K4, K3 = CASE.paged.k, CASE.dense.k


@pytest.mark.parametrize(
    ("view", "kind", "message"),
    [
        ("a view", TypeError, "must be a DenseView or a PagedView, not str"),
        (replace(CASE.dense, k=K4), ValueError, r"both be \[T, H_kv, D\]"),
        (replace(CASE.paged, v=K4[:1]), ValueError, r"both be \[P, B, H_kv, D\]"),
        (replace(CASE.paged, v=K4.half()), TypeError, "must share one of"),
        (replace(CASE.dense, k=K3.double(), v=K3.double()), TypeError, "must share one of"),
        (replace(CASE.dense, v=K3.to("meta")), ValueError, "on one device"),
        (replace(CASE.dense, k=K3.mT.contiguous().mT), ValueError, "of k must be contiguous"),
        (replace(CASE.paged, k=K4[:, :0], v=K4[:, :0]), ValueError, "page size 0"),
        (replace(CASE.dense, starts=INT32), TypeError, "starts must be torch.int64"),
        (replace(CASE.dense, lengths=INT32[:1]), ValueError, "starts must have one entry"),
        (replace(CASE.dense, lengths=INT32.long()), TypeError, "lengths must be torch.int32"),
        (replace(CASE.paged, first=INT32[:1]), ValueError, "first must have one entry"),
        (replace(CASE.paged, block_table=INT32), ValueError, "block_table must have one entry"),
        (replace(CASE.dense, lengths=INT32 * 10**6), ValueError, "sequence 0: rows"),
        (replace(CASE.dense, starts=-INT32.long()), ValueError, r"sequence 0: rows \[-1"),
        (replace(CASE.paged, lengths=INT32 * 65), ValueError, "sequence 0: tokens .* 64 that"),
        (replace(CASE.paged, first=INT32 * 25), ValueError, "sequence 0: tokens"),
        (replace(CASE.paged, first=-INT32), ValueError, "sequence 0: tokens"),
    ],
)
def test_refuses_broken_views(view: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        attend(CASE.q, view)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["dense", "paged"])
def test_refuses_more_queries_than_stored_tokens(kind: str) -> None:
    case = attention_case([3, 9], q_lens=[2, 5], first=[2, 0])
    with pytest.raises(ValueError, match="sequence 0: 2 queries for 1 stored tokens"):
        attend(case.q, getattr(case, kind), q_lens=case.q_lens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q": None}, "q must be a torch tensor, not NoneType"),
        ({"q": [[[1.0]]]}, "q must be a torch tensor, not list"),
        ({"q_lens": 1}, "q_lens must be a list, one count a sequence, not 1"),
        ({"q_lens": torch.tensor(1)}, "q_lens must be a list, one count a sequence, not 1"),
        ({"scale": "1"}, "scale must be a number, not '1'"),
        ({"scale": [1.0]}, r"scale must be a number, not \[1.0\]"),
    ],
)
def test_refuses_what_is_of_another_type(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        attend(**{"q": CASE.q, "view": CASE.dense, **wrong})


def test_refuses_devices_without_a_kernel() -> None:
    view = replace(CASE.dense, k=K3.to("meta"), v=K3.to("meta"))
    with pytest.raises(ValueError, match="runs on cpu and cuda, not on meta"):
        attend(CASE.q.to("meta"), view)


@pytest.mark.parametrize(
    ("dtype", "dim", "rows", "message"),
    [
        (torch.float32, 64, 9, "takes float16 and bfloat16, not torch.float32"),
        (torch.float16, 264, 9, "up to 256 in steps of 8, not 264"),
        (torch.float16, 36, 9, "up to 256 in steps of 8, not 36"),
        (torch.float16, 64, 2**31, "counts tokens in int32"),
    ],
)
def test_names_the_limit_of_the_stock_cuda_kernel(
    dtype: torch.dtype, dim: int, rows: int, message: str
) -> None:
    k = torch.empty(1, 1, dim, dtype=dtype).expand(rows, 1, dim)
    view = DenseView(k, k, torch.zeros(1, dtype=torch.int64), INT32[:1])
    with pytest.raises((TypeError, ValueError), match=message):
        _check_flash_limits(k[:1], view)
