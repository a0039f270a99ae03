"""The one door to attention: checks what the caller gave and picks the kernel for it."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..contract import DenseView, PagedView

log = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What K and V can be stored in."""
LONGEST = 2**31 - 1
"""Tokens of the longest sequence, whose length is an int32: a longer window hides nothing."""


def attend(
    q: torch.Tensor,
    view: DenseView | PagedView,
    *,
    q_lens: Sequence[int] | torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the newest tokens of each sequence over its stored tokens.

    Aligned bottom-right: query ``i`` of a sequence with ``n`` queries and ``L`` tokens sits
    at position ``L − n + i`` and sees the tokens up to its own. Dense views run stock kernels
    (CPU: ``scaled_dot_product_attention``; CUDA: FlashAttention-2), paged views our own
    (CPU: Numba; CUDA: Triton). Which one ran is logged at level DEBUG.

    Parameters
    ----------
    q
        ``[sum(q_lens), H_q, D]``, packed in the order of the view, dtype and device of the
        view. ``H_q`` is a multiple of ``H_kv``; query head ``h`` reads KV head
        ``h // (H_q / H_kv)``.
    view
        One layer of a batch, from ``KVCache.view``.
    q_lens
        Queries of each sequence (0 is allowed), on the CPU; None means one each.
    scale
        Factor of the scores; None means ``1 / sqrt(D)``.
    window
        Each query sees at most this many newest tokens, its own included. None takes the window
        of the view's layer (``view.window``): a layer without one is seen whole.

    Returns
    -------
    torch.Tensor
        ``[sum(q_lens), H_q, D]`` in the dtype of ``q``. Rows of an empty sequence are 0.

    Raises
    ------
    TypeError, ValueError
        A shape, dtype, device, or count that no kernel here takes; the message names it. On
        CUDA the *contents* of the view are not checked, since reading them would wait for
        the device.
    """
    _check_view(view)
    counts = _check_queries(q, view, q_lens)
    window = view.window if window is None else window
    if window is not None and _whole("window", window) < 1:
        raise ValueError(f"window must be at least 1 token (the query's own), not {window}")
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else _number("scale", scale)
    if view.k.device.type == "cpu":
        _check_contents(view, counts)
    elif view.k.device.type != "cuda":
        raise ValueError(f"attention runs on cpu and cuda, not on {view.k.device}")
    if q.shape[0] == 0:
        return torch.empty_like(q)
    return _dispatch(q, view, counts, factor, window)


def _dispatch(
    q: torch.Tensor,
    view: DenseView | PagedView,
    q_lens: list[int],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    if window is not None:
        window = min(window, LONGEST)  # kernels count in machine words
    # Imported on first use: numba and triton cost seconds and are not needed by every backend.
    if isinstance(view, DenseView):
        from .dense import dense_attention

        log.debug("attend: stock dense kernel on %s, %d sequences", q.device, len(q_lens))
        return dense_attention(q, view, q_lens=q_lens, scale=scale, window=window)
    if q.device.type == "cpu":
        from .paged_numba import paged_attention

        log.debug("attend: paged_numba, %d sequences", len(q_lens))
        return paged_attention(q, view, q_lens=q_lens, scale=scale, window=window)
    from .paged_triton import paged_attention as triton_attention

    log.debug("attend: paged_triton on %s, %d sequences", q.device, len(q_lens))
    return triton_attention(q, view, q_lens=q_lens, scale=scale, window=window)


def _check_view(view: DenseView | PagedView) -> None:
    if not isinstance(view, DenseView | PagedView):
        raise TypeError(
            f"view must be a DenseView or a PagedView, not {type(view).__name__}; "
            "a cache's view(layer, seqs) makes one"
        )
    k, v = view.k, view.v
    num_dims, shape = (3, "[T, H_kv, D]") if isinstance(view, DenseView) else (4, "[P, B, H_kv, D]")
    if k.ndim != num_dims or k.shape != v.shape or 0 in k.shape[-2:]:
        raise ValueError(f"k and v must both be {shape}, not {_shape(k)} and {_shape(v)}")
    if k.dtype not in DTYPES or v.dtype != k.dtype:
        raise TypeError(
            f"k and v must share one of float32, bfloat16, float16, not {k.dtype} and {v.dtype}"
        )
    if k.device != v.device:
        raise ValueError(f"k and v must be on one device, not on {k.device} and {v.device}")
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")
    num_seqs = view.lengths.shape[0] if view.lengths.ndim == 1 else -1
    if isinstance(view, DenseView):
        _check_index("starts", view.starts, torch.int64, (num_seqs,))
    else:
        if k.shape[1] == 0:
            raise ValueError("a page must hold at least one token: k has page size 0")
        width = view.block_table.shape[-1] if view.block_table.ndim else 0
        _check_index("block_table", view.block_table, torch.int32, (num_seqs, width))
        _check_index("first", view.first, torch.int32, (num_seqs,))
    _check_index("lengths", view.lengths, torch.int32, (num_seqs,))


def _check_index(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must have one entry per sequence: {_shape(tensor)} does not fit lengths"
        )


def _check_queries(
    q: torch.Tensor, view: DenseView | PagedView, q_lens: Sequence[int] | torch.Tensor | None
) -> list[int]:
    heads, dim = view.k.shape[-2:]
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a torch tensor, not {type(q).__name__}")
    if q.ndim != 3 or q.shape[2] != dim:
        raise ValueError(f"q must be [sum(q_lens), H_q, {dim}], not {_shape(q)}")
    if q.dtype != view.k.dtype:
        raise TypeError(f"q is {q.dtype}, the cache is {view.k.dtype}: convert q")
    if q.device != view.k.device:
        raise ValueError(f"q is on {q.device}, the cache on {view.k.device}: move q")
    if q.shape[1] == 0 or q.shape[1] % heads:
        raise ValueError(
            f"query heads must be a multiple of the {heads} KV heads, not {q.shape[1]}"
        )
    num_seqs = len(view.lengths)
    if q_lens is None:
        counts = [1] * num_seqs
    else:
        given = q_lens.tolist() if isinstance(q_lens, torch.Tensor) else q_lens
        if not isinstance(given, Iterable):
            raise TypeError(f"q_lens must be a list, one count a sequence, not {given!r}")
        counts = [_whole("an entry of q_lens", n) for n in given]
    if len(counts) != num_seqs:
        raise ValueError(f"q_lens has {len(counts)} entries for {num_seqs} sequences")
    if any(n < 0 for n in counts):
        raise ValueError(f"q_lens must not be negative: {counts}")
    if sum(counts) != q.shape[0]:
        raise ValueError(f"q has {q.shape[0]} rows, q_lens sums to {sum(counts)}")
    return counts


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if hasattr(value, "__float__") else None
    except (ValueError, RuntimeError, OverflowError):
        number = None  # a tensor of several, say
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {value}")
    return number


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    return operator.index(value)


def _check_contents(view: DenseView | PagedView, counts: list[int]) -> None:
    """Counts that would make a CPU kernel read outside the stored tokens."""
    lengths = view.lengths.tolist()
    if isinstance(view, DenseView):
        kept = lengths
        for seq, (start, length) in enumerate(zip(view.starts.tolist(), lengths, strict=True)):
            if length < 0 or start < 0 or start + length > view.k.shape[0]:
                raise ValueError(
                    f"sequence {seq}: rows [{start}, {start + length}) are not inside "
                    f"[0, {view.k.shape[0]})"
                )
    else:
        kept = [n - f for n, f in zip(lengths, view.first.tolist(), strict=True)]
        room = view.block_table.shape[1] * view.k.shape[1]
        for seq, (length, num_kept) in enumerate(zip(lengths, kept, strict=True)):
            if not 0 <= num_kept <= length or (num_kept and length > room):
                raise ValueError(
                    f"sequence {seq}: tokens [{length - num_kept}, {length}) are not inside "
                    f"the {room} that its table row can hold"
                )
    for seq, (num_queries, num_kept) in enumerate(zip(counts, kept, strict=True)):
        if num_queries > num_kept > 0:
            raise ValueError(
                f"sequence {seq}: {num_queries} queries for {num_kept} stored tokens; "
                "write the tokens before attending"
            )


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
