"""The yardstick itself: the float64 reference against SDPA's plain mathematics."""

from __future__ import annotations

import pytest
import torch

from kvalloc.kernels.reference import reference_attention
from kvalloc.tests.attention_inputs import LAYOUTS, attention_case, relative_error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_the_same_tokens_through_both_views(layout: str) -> None:
    case = attention_case(
        [0, 1, 15, 16, 17, 32, 40],
        q_lens=[1, 1, 3, 0, 5, 1, 20],
        first=[0, 0, 0, 0, 3, 16, 17],
        layout=layout,
    )
    paged = reference_attention(case.q, case.paged, q_lens=case.q_lens)
    dense = reference_attention(case.q, case.dense, q_lens=case.q_lens)
    assert torch.equal(paged, dense)
    assert torch.all(paged[0] == 0), "an empty sequence gives zeros"
    assert torch.all(paged[1:].abs().sum(-1) > 0)


def test_agrees_with_sdpa_in_float64() -> None:
    case = attention_case([37], q_lens=[37], kv_heads=2, q_heads=6, dtype=torch.float64)
    start = int(case.dense.starts[0])
    k = case.dense.k[start : start + 37].transpose(0, 1)
    v = case.dense.v[start : start + 37].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q.transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    out = reference_attention(case.q, case.dense, q_lens=[37])
    assert relative_error(out, expected) < 1e-12


def test_a_window_of_one_returns_the_newest_value() -> None:
    case = attention_case([9], q_heads=2, kv_heads=2)
    out = reference_attention(case.q, case.dense, window=1)
    newest = case.dense.v[int(case.dense.starts[0]) + 8]
    assert relative_error(out[0], newest) < 1e-12
