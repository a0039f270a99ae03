"""Shapes of well-known models, so that an experiment can say ``llama-3-8b`` instead of six numbers.

The numbers are of public configuration files (docs name the sources); ``dtype`` is the one that
the weights were published in. Traps they avoid: Falcon-7B has one KV head whatever its
``num_kv_heads`` says; head dim is not hidden size / heads in Gemma, Qwen3-32B and gpt-oss;
DeepSeek-V3 stores one latent of 512 + 64 elements a token, not 128 heads; Qwen's
``sliding_window`` is switched off.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache

from .geometry import KVGeometry, LayerShape

_uniform = KVGeometry.uniform


def _patterned(
    name: str,
    *,
    windows: list[int | None],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    max_context: int,
) -> KVGeometry:
    """A bfloat16 model whose layers differ in nothing but the window."""
    layers = tuple(LayerShape(kv_heads, head_dim, window) for window in windows)
    return KVGeometry(name, layers, q_heads, "bfloat16", max_context)


# name, layers, query heads, KV heads, head dim, dtype, max context, window of every layer
_UNIFORM: tuple[tuple[str, int, int, int, int, str, int, int | None], ...] = (
    ("tiny", 2, 8, 2, 64, "float32", 32768, None),
    ("GPT-2", 12, 12, 12, 64, "float32", 1024, None),
    ("OPT-13B", 40, 40, 40, 128, "float16", 2048, None),
    ("Falcon-7B", 32, 71, 1, 64, "bfloat16", 2048, None),
    ("Llama-2-7B", 32, 32, 32, 128, "float16", 4096, None),
    ("Llama-2-70B", 80, 64, 8, 128, "float16", 4096, None),
    ("Llama-3-8B", 32, 32, 8, 128, "bfloat16", 8192, None),
    ("Llama-3-70B", 80, 64, 8, 128, "bfloat16", 8192, None),
    ("Llama-3.1-8B", 32, 32, 8, 128, "bfloat16", 131072, None),
    ("Llama-3.2-1B", 16, 32, 8, 64, "bfloat16", 131072, None),
    ("Mistral-7B-v0.1", 32, 32, 8, 128, "bfloat16", 32768, 4096),
    ("Mistral-7B-v0.3", 32, 32, 8, 128, "bfloat16", 32768, None),
    ("Mixtral-8x7B-v0.1", 32, 32, 8, 128, "bfloat16", 32768, None),
    ("Qwen2.5-7B", 28, 28, 4, 128, "bfloat16", 131072, None),
    ("Qwen2.5-72B", 80, 64, 8, 128, "bfloat16", 131072, None),
    ("Qwen3-8B", 36, 32, 8, 128, "bfloat16", 40960, None),
    ("Qwen3-32B", 64, 64, 8, 128, "bfloat16", 40960, None),
    ("Phi-3-mini-4k", 32, 32, 32, 96, "bfloat16", 4096, 2047),
    ("Phi-4", 40, 40, 10, 128, "bfloat16", 16384, None),
    ("Yi-6B", 32, 32, 4, 128, "bfloat16", 4096, None),
    ("Yi-34B", 60, 56, 8, 128, "bfloat16", 4096, None),
)

_ALIASES = {
    # The bare names are the first published weights; "Mistral 7B" of the paper is v0.1.
    "Mistral-7B": "Mistral-7B-v0.1",
    "Mixtral-8x7B": "Mixtral-8x7B-v0.1",
    "Phi-3-mini": "Phi-3-mini-4k",
    "GPT-2-124M": "GPT-2",
    "Phi-4-14B": "Phi-4",
}


@cache
def _presets() -> dict[str, KVGeometry]:
    """Every preset by its proper name, in the order that a list should show."""
    found = [
        _uniform(
            name,
            layers=layers,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            max_context=max_context,
            window=window,
        )
        for name, layers, q_heads, kv_heads, head_dim, dtype, max_context, window in _UNIFORM
    ]
    found += [
        # Local layers first, alternating.
        _patterned(
            "Gemma-2-9B",
            windows=[4096, None] * 21,
            q_heads=16,
            kv_heads=8,
            head_dim=256,
            max_context=8192,
        ),
        # Five local layers, then a global one; 62 is no multiple of 6: the last two are local.
        _patterned(
            "Gemma-3-27B",
            windows=([1024] * 5 + [None]) * 10 + [1024] * 2,
            q_heads=32,
            kv_heads=16,
            head_dim=128,
            max_context=131072,
        ),
        _patterned(
            "gpt-oss-20b",
            windows=[128, None] * 12,
            q_heads=64,
            kv_heads=8,
            head_dim=64,
            max_context=131072,
        ),
        # MLA: one latent of 512 + 64 (rotary) elements serves as K and V of all heads.
        KVGeometry("DeepSeek-V3", (LayerShape(1, 576, tensors=1),) * 61, 128, "bfloat16", 163840),
    ]
    return {preset.name: preset for preset in found}


@cache
def _lookup() -> dict[tuple[str, ...], str]:
    """Comparable form of every accepted name -> proper name."""
    proper = {name: name for name in _presets()} | _ALIASES
    return {
        form: target
        for name, target in proper.items()
        for form in (_comparable(name), _comparable(name.replace(".", "")))
    }


def _comparable(name: str) -> tuple[str, ...]:
    """Words and numbers of a name: case, dots, hyphens and the publisher do not count.

    Numbers stay apart, so that ``llama-3-18b`` is not taken for Llama-3.1-8B.
    """
    return tuple(re.findall(r"[a-z]+|[0-9]+", name.rsplit("/", 1)[-1].lower()))


def model_names() -> list[str]:
    """Proper names of all presets."""
    return list(_presets())


def geometry(name: str) -> KVGeometry:
    """Shape of a well-known model, in the dtype that it was published in.

    Case, dots, hyphens and a publisher's prefix do not matter:

    >>> geometry("llama3-8b") is geometry("meta-llama/Llama-3-8B")
    True
    >>> geometry("llama-3.1-8b").with_dtype("fp8").bytes_per_token
    65536

    ``tiny`` is no published model: 2 layers, small enough to run everywhere.
    ``mistral-7b`` is v0.1, whose layers all have a window; v0.3 has none.

    Raises
    ------
    ValueError
        For an unknown name; the message names the nearest ones.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"a model is told by its name, not by {name!r}: `kvalloc size --list` names the known "
            "ones, KVGeometry makes others"
        )
    proper = _lookup().get(_comparable(name))
    if proper is None:
        raise ValueError(f"unknown model {name!r}; {_suggestion(name)}")
    return _presets()[proper]


def _suggestion(name: str) -> str:
    spelled = {known.lower(): known for known in [*_presets(), *_ALIASES]}
    near = get_close_matches(name.rsplit("/", 1)[-1].lower(), spelled, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(spelled[match] for match in near) + "?"
    return "`kvalloc size --list` names the known ones"
