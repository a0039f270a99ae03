"""What the caches of transformers refuse, and what they advise instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..contract import OutOfMemory
from ..kernels.attention import DTYPES
from ..sequences import at_least_one


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


def or_none(name: str, value: int | None) -> int | None:
    """A size that may be left out: told at once, not when the first tokens come."""
    return None if value is None else at_least_one(name, value)


def row_numbers(name: str, given: object, *, mask: bool = False) -> torch.Tensor:
    """Rows of a batch on the CPU, refusing what is no list of whole numbers (or a mask)."""
    try:
        rows = torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError):
        rows = torch.zeros(1)  # of a dtype that is refused
    whole = not rows.is_floating_point() and not rows.is_complex()
    if rows.ndim != 1 or (rows.numel() and not (whole and (mask or rows.dtype != torch.bool))):
        kinds = "row numbers or a mask" if mask else "row numbers"
        raise TypeError(f"{name} must be a list or a tensor of {kinds}, not {given!r}")
    return rows if rows.numel() else rows.long()


def check_states(k: object, v: object) -> None:
    """Refuse what are not the tensors that a layer of transformers makes."""
    for name, states in (("key_states", k), ("value_states", v)):
        if not isinstance(states, torch.Tensor) or states.ndim != 4:
            told = list(states.shape) if isinstance(states, torch.Tensor) else states
            raise TypeError(f"{name} must be a tensor [rows, KV heads, tokens, D], not {told}")


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
