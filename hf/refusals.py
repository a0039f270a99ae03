"""What the caches of transformers refuse, and what they advise instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..contract import OutOfMemory
from ..kernels.attention import DTYPES


@contextmanager
def advice() -> Iterator[None]:
    """Add to a refusal what the owner of a model can do about it."""
    try:
        yield
    except OutOfMemory as refusal:
        refusal.add_note(
            "The cache is full: make it with more memory_bytes; by default it has what the first "
            "batch needs."
        )
        raise


def check(k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse what no kernel here could read back.

    Raises
    ------
    TypeError
        Elements of another type than float32, bfloat16, float16.
    ValueError
        K and V of different shapes.
    """
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        raise TypeError(
            f"the cache stores float32, bfloat16 and float16 alike for K and V, not {k.dtype} "
            f"and {v.dtype}: for quantised keys use transformers' QuantizedCache"
        )
    if k.shape != v.shape:
        raise ValueError(
            f"K and V must have one shape, not {list(k.shape)} and {list(v.shape)}: models that "
            "store them differently need transformers' DynamicCache"
        )
