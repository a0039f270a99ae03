"""gpu-check, stage hf: a Hugging Face model generates the same tokens with each of our caches."""

from __future__ import annotations

from importlib import import_module
from time import perf_counter
from typing import Any

from .stage import NotHere, StageReport, Target, require

CACHES = ("VmmCache", "ContiguousCache", "PagedCache")
PAGED = "kvalloc_paged"
"""The attention implementation that reads the pages of a ``PagedCache`` where they are."""
VOCABULARY = 997


def run(report: StageReport, target: Target) -> None:
    """Greedy decode of a Llama with random weights, in float32 so that ties do not decide."""
    with report.check("transformers and kvalloc.hf are here"):
        try:
            transformers, hf = import_module("transformers"), import_module("...hf", __package__)
        except ImportError as error:
            report.headline = "not run: transformers is missing"
            raise NotHere(str(error)) from error
    if report.headline:
        return
    model, inputs = _model(transformers, target), _prompts(target)
    num_new = 256 if target.is_gpu else 16
    _generate(model, inputs, None, 2, target)  # the first call of anything is slower
    expected, ms = _generate(model, inputs, None, num_new, target)
    report.add(cache="DynamicCache", new_tokens=num_new, ms_per_token=ms)
    for name in CACHES:
        with report.check(f"{name} gives the tokens of DynamicCache"):
            model.set_attn_implementation(PAGED if name == "PagedCache" else "sdpa")
            make = getattr(hf, name).from_config
            _generate(model, inputs, make(model.config, max_length=512), 2, target)
            cache = make(model.config, max_length=512)
            found, ms = _generate(model, inputs, cache, num_new, target)
            report.add(cache=name, new_tokens=num_new, ms_per_token=ms)
            same = int((found == expected).all(dim=0).sum())
            require(same == expected.shape[1], f"tokens differ from the {same + 1}-th on")
    report.headline = ", ".join(
        f"{row['cache']} {row['ms_per_token']:.2f} ms" for row in report.rows
    )


def _model(transformers: Any, target: Target) -> Any:
    import torch

    config = transformers.LlamaConfig(
        hidden_size=1024 if target.is_gpu else 64,
        num_hidden_layers=8 if target.is_gpu else 2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128 if target.is_gpu else 32,
        intermediate_size=2048 if target.is_gpu else 64,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,  # far from the uniform distribution: attention decides the tokens
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to(target.device)
    model.generation_config.eos_token_id = None
    return model


def _prompts(target: Target) -> dict[str, Any]:
    """Four, each shorter than the one before, padded on the left."""
    import torch

    ids = torch.randint(1, VOCABULARY, (4, 200), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(len(mask)):
        mask[row, : 30 * row] = 0
    tensors = {"input_ids": ids * mask, "attention_mask": mask}
    return {name: tensor.to(target.device) for name, tensor in tensors.items()}


def _generate(
    model: Any, inputs: dict[str, Any], cache: Any, num_new: int, target: Target
) -> tuple[Any, float]:
    """Token ids, and milliseconds per new token of the whole call."""
    import torch

    start = perf_counter()
    with torch.no_grad():
        tokens = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=num_new, do_sample=False
        )
    target.synchronize()
    return tokens, (perf_counter() - start) * 1e3 / num_new
