"""Updates of a transformers cache of two layers, and what they have to return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from transformers import LlamaConfig, MistralConfig

CONFIG = LlamaConfig(num_hidden_layers=2)
HEADS, DIM = 2, 64

Tokens = tuple[torch.Tensor, torch.Tensor]


def sliding(window: int) -> MistralConfig:
    return MistralConfig(num_hidden_layers=2, sliding_window=window)


def tokens(num_rows: int, num_tokens: int) -> Tokens:
    shape = (num_rows, HEADS, num_tokens, DIM)
    return torch.randn(shape), torch.randn(shape)


def update(cache: Any, new: Tokens) -> list[Tokens]:
    """Both layers; the second one gets the negative numbers."""
    return [
        tuple(t.clone() for t in cache.update(new[0] * sign, new[1] * sign, layer))
        for layer, sign in ((0, 1), (1, -1))
    ]


def require_same(ours: Any, theirs: Any, new: Tokens) -> None:
    """Masks fit what is returned, and both caches return the same."""
    num_tokens = new[0].shape[2]
    sizes = [ours.get_mask_sizes(num_tokens, layer) for layer in range(2)]
    assert sizes == [theirs.get_mask_sizes(num_tokens, layer) for layer in range(2)]
    for got, wanted, (length, _) in zip(update(ours, new), update(theirs, new), sizes, strict=True):
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
        assert got[0].shape[2] == length
    assert ours.get_seq_length() == theirs.get_seq_length()
    assert ours.layers[1].length == ours.get_seq_length()
