"""A transformers model with random weights whose attention stores and reads a KV cache of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from ...contract import KVCache
from ...geometry import KVGeometry
from ...kernels.attention import attend
from ...telemetry import Clock

ATTENTION = "kvalloc_serve"
"""Name of the attention implementation."""


@dataclass(frozen=True)
class Batch:
    """Whose tokens one forward computes: packed, one sequence after the other.

    Attributes
    ----------
    cache : KVCache
        Has room for all of them.
    clock : Clock
        Attention is timed here, layer by layer (``attend``).
    seqs : sequence of int
    lens : list of int
        How many of the newest tokens of each sequence are computed.
    """

    cache: KVCache
    clock: Clock
    seqs: Sequence[int]
    lens: list[int]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    kvalloc_batch: Batch,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store K and V of the packed tokens, then attend over all tokens of their sequences.

    Everything is stored before anything is read, so that a prompt may share pages with another
    one of the same forward.

    Parameters
    ----------
    query, key, value
        ``[1, H, tokens, D]``, after the rotation by position.
    kvalloc_batch
        A keyword of the model's forward, which hands it down.

    Returns
    -------
    tuple
        ``[1, tokens, H_q, D]`` and None.
    """
    batch, layer = kvalloc_batch, int(module.layer_idx)  # type: ignore[arg-type]
    k, v, q = (tensor[0].transpose(0, 1) for tensor in (key, value, query))
    batch.cache.write(layer, batch.seqs, k, v, lens=batch.lens)
    view = batch.cache.view(layer, batch.seqs)
    window = batch.cache.geometry.layers[layer].window
    out = batch.clock.timed(
        "attend", attend, q, view, q_lens=batch.lens, scale=scaling, window=window
    )
    return out[None], None


def random_model(shape: KVGeometry, vocabulary: int, seed: int, *, spread: float = 0.02) -> Any:
    """A Llama with these layers, or a Mistral if they have a window; random weights.

    Parameters
    ----------
    shape
        Layers all alike, of a dtype of torch.
    vocabulary
        Token ids.
    spread
        Standard deviation of the weights.
    """
    layer = shape.layers[0]
    options: dict[str, Any] = {
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.q_heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "hidden_size": shape.q_heads * layer.head_dim,
        "intermediate_size": 3 * shape.q_heads * layer.head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": shape.max_context or 1 << 20,
        "initializer_range": spread,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    torch.manual_seed(seed)
    model: Any
    if layer.window is None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    else:
        config = transformers.MistralConfig(sliding_window=layer.window, **options)
        model = transformers.MistralForCausalLM(config)
    return model.to(getattr(torch, shape.dtype)).eval()


def serving(model: Any) -> Any:
    """The same model, attending through ``packed_attention`` from here on."""
    model.set_attn_implementation(ATTENTION)
    return model


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The kernels know which tokens a query sees."""


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
