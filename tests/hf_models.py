"""Small random-weight models of many kinds, and every kvalloc cache beside ``DynamicCache``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the extra [transformers] is missing")
logging.getLogger("transformers").setLevel(logging.ERROR)

_FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _FORWARD else "past_key_values"
"""What the installed transformers calls the argument."""

VOCABULARY = 61
WINDOW = 20
MAX_LENGTH = 128
PAGE_BYTES = 4096  # 16 tokens of one head of 64 floats

_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.5,  # far from the uniform distribution: attention decides the tokens
}
_SLIDING = {**_SHAPE, "sliding_window": WINDOW}
_GEMMA = {**_SLIDING, "tie_word_embeddings": False}  # tied, they repeat the last token for ever
_GPT2 = {"n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 256, "n_inner": 64}
_FALCON = {**_SHAPE, "hidden_size": 128, "num_attention_heads": 2, "multi_query": True}
_TOKENS = {k: v for k, v in _SHAPE.items() if k.endswith(("token_id", "vocab_size", "range"))}
del _FALCON["num_key_value_heads"], _FALCON["head_dim"]

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHAPE),
    "mistral": ("Mistral", _SLIDING),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3": ("Qwen3", _SHAPE),
    "gpt2": ("GPT2", {**_GPT2, **_TOKENS}),
    "falcon": ("Falcon", _FALCON),
}
READS_PAGES = [name for name in CONFIGS if name not in ("gemma2", "falcon")]
"""Gemma-2 squashes its scores, Falcon bypasses the attention interface."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make tiny models a hundred times slower when it is busy."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def model_of(name: str, attention: str | None = None) -> Any:
    """One model per name; the same weights whatever the attention."""
    family, options = CONFIGS[name]
    config_class = getattr(transformers, family + ("TextConfig" if name == "gemma3" else "Config"))
    suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    config = config_class(**options)
    if attention is not None:
        config._attn_implementation = attention
    torch.manual_seed(7)
    model = getattr(transformers, family + suffix)(config).eval()
    if attention is not None:
        model.set_attn_implementation(attention)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def every_cache() -> dict[str, Callable[..., Any]]:
    """By name: from a config to a cache of ``MAX_LENGTH`` tokens, pages small enough to cross."""
    from kvalloc.hf import ContiguousCache, PagedCache, VmmCache

    return {
        "vmm": lambda config: VmmCache.from_config(
            config, max_length=MAX_LENGTH, page_bytes=PAGE_BYTES
        ),
        "vmm-token-major": lambda config: VmmCache.from_config(
            config, max_length=MAX_LENGTH, page_bytes=PAGE_BYTES, layout="token-major"
        ),
        "contiguous": lambda config: ContiguousCache.from_config(config, max_length=MAX_LENGTH),
        "paged": lambda config: PagedCache.from_config(config, max_length=MAX_LENGTH, page_size=8),
    }


def prompts(num_rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random prompts, each five tokens shorter than the one before, padded on the left."""
    generator = torch.Generator().manual_seed(num_rows * 100 + tokens)
    ids = torch.randint(1, VOCABULARY, (num_rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(num_rows):
        mask[row, : 5 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model: Any, cache: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    """Token ids, always from the same random numbers."""
    torch.manual_seed(11)
    options = {"max_new_tokens": 24, "do_sample": False, "num_beams": 1, **options}
    return model.generate(**inputs, **{CACHE: cache}, **options)
