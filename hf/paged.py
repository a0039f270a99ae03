"""Paged layers of a transformers cache, and the attention function that reads their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..contract import PagedView
from ..kernels.attention import attend
from .backends import PagedRows, Pair, gather
from .layers import Layer
from .refusals import check_states

ATTENTION = "kvalloc_paged"
"""Name of the attention implementation: ``model.set_attn_implementation("kvalloc_paged")``."""

_UNREADABLE = ("softcap", "s_aux", "position_bias")  # what our kernels do not compute


@dataclass(frozen=True)
class Pages:
    """Rides on the key tensor from ``update`` to the attention function of the same layer.

    Attributes
    ----------
    view : PagedView
        All tokens of the layer, the newest included.
    first, length : int
        Tokens of a row, and the first that the attention mask has a column for.
    """

    view: PagedView
    first: int
    length: int


class PagedLayer(Layer):
    """Stores tokens in pages; hands out the pages themselves, or all tokens copied together."""

    _rows: PagedRows

    def __init__(
        self, rows: PagedRows, index: int, window: int | None, reads_pages: Callable[[], bool]
    ) -> None:
        super().__init__(rows, index, window)
        self._reads_pages = reads_pages

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> Pair:
        """Store new tokens; see ``Cache.update``.

        Parameters
        ----------
        key_states, value_states
            ``[rows, H_kv, n, D]``. No gradient flows through the cache.

        Returns
        -------
        tuple of torch.Tensor
            K and V ``[rows, H_kv, tokens, D]``, copied together from the pages. Where the
            model's attention is ``kvalloc_paged``: the new tokens alone, with the pages of all
            attached for it.

        Raises
        ------
        NeverFits, OutOfMemory
            Beyond ``max_length``, or no memory for now; no length changed.
        TypeError, ValueError
            A dtype, shape or device that does not fit what is stored, or a layer that was
            skipped in an earlier forward.
        """
        check_states(key_states, value_states)
        rows, begin = self._rows, self.length
        end = begin + key_states.shape[2]
        if not rows.num_rows:
            rows.prepare(end, key_states, value_states)
        found = {(*t.shape[:2], t.shape[3], t.dtype, t.device) for t in (key_states, value_states)}
        if (
            found != {(*rows.shape, rows.dtype, rows.device)}
            or end != begin + value_states.shape[2]
        ):
            raise self._misfit(key_states, value_states)
        rows.prepare(end, key_states, value_states)
        self._rows.write(self._index, end, key_states, value_states)
        self.length = end
        view, first = self._rows.view(self._index), self._first(begin)
        if not self._reads_pages():
            return gather(view, first, end)
        keys = key_states.detach()
        keys.kvalloc_pages = Pages(view, first, end)  # type: ignore[attr-defined]
        return keys, value_states

    def _visible(self) -> Pair:
        return gather(self._rows.view(self._index), self._first(self.length), self.length)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the pages of a ``PagedCache``; over plain tensors it is ``sdpa``.

    For one query a row on a CPU it folds the query heads that share a KV head into one matrix:
    without a mask transformers' own ``sdpa`` leaves that to torch, which takes twice as long.

    Masks that say more than causal order, a sliding window and padding on the left are honoured
    too, by way of a copy of all tokens and ``sdpa``.

    Parameters
    ----------
    query
        ``[rows, H_q, n, D]``.
    key, value
        What ``update`` returned.
    attention_mask
        None or ``[rows, 1, n, tokens]``.

    Returns
    -------
    tuple
        ``[rows, n, H_q, D]`` and None. Rows of padding are zero.

    Raises
    ------
    ValueError
        Dropout, or an option that the kernels do not offer.
    """
    pages: Pages | None = getattr(key, "kvalloc_pages", None)
    if pages is not None:
        refused = [name for name in _UNREADABLE if kwargs.get(name) is not None]
        if refused or dropout:
            raise ValueError(
                f"attention over pages has no {', '.join(refused) or 'dropout'}: use another "
                "attn_implementation ('eager' knows it)"
            )
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        starts = _starts(attention_mask, pages, query.shape[2]) if causal else None
        if starts is not None:
            return _attend(query, pages, starts, scaling), None
        key, value = gather(pages.view, pages.first, pages.length)
    elif attention_mask is None and query.shape[2] == 1 and query.device.type == "cpu":
        if not dropout and all(kwargs.get(name) is None for name in _UNREADABLE):
            return _folded(query, key, value, scaling), None
    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result


def _folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """``[rows, 1, H_q, D]``: each K and V row is read once per group of query heads."""
    num_rows, heads, _, dim = query.shape
    grouped = query.reshape(num_rows, key.shape[1], -1, dim)
    out = scaled_dot_product_attention(grouped, key, value, scale=scale)
    return out.reshape(num_rows, 1, heads, -1)


def _starts(mask: torch.Tensor | None, pages: Pages, num_queries: int) -> list[int] | None:
    """Per row its first token that is no padding; None if the mask says anything else."""
    if mask is None:
        unpadded = num_queries in (1, pages.length - pages.first)  # what sdpa leaves unmasked
        return [pages.first] * len(pages.view.lengths) if unpadded else None
    known: dict[object, list[int] | None] = getattr(mask, "kvalloc_starts", {})
    key = pages.view.window, pages.first, pages.length
    if key not in known:  # one mask serves all layers of a kind
        known[key] = _read(mask, pages, num_queries)
        mask.kvalloc_starts = known  # type: ignore[attr-defined]
    return known[key]


def _read(mask: torch.Tensor, pages: Pages, num_queries: int) -> list[int] | None:
    """Rows' starts, if the mask is causal with padding on the left and the layer's window."""
    if mask.dtype != torch.bool or mask.ndim != 4 or mask.shape[1] != 1:
        return None
    num_rows = len(pages.view.lengths)
    mask = mask[:, 0].expand(num_rows, -1, -1)
    if mask.shape[1:] != (num_queries, pages.length - pages.first):
        return None
    token = torch.arange(pages.first, pages.length, device=mask.device)
    query = token[-num_queries:, None]
    starts = pages.first + mask.any(1).int().argmax(1)
    expected = (token <= query) & (token >= starts[:, None, None])
    if pages.view.window is not None:
        expected &= token > query - pages.view.window
    padding = query < starts[:, None, None]  # what those rows compute is never used
    return starts.tolist() if bool(((mask == expected) | padding).all()) else None


def _attend(
    query: torch.Tensor, pages: Pages, starts: list[int], scale: float | None
) -> torch.Tensor:
    """``[rows, n, H_q, D]``; queries of padding are left out."""
    num_rows, heads, num, dim = query.shape
    first = torch.tensor(starts, dtype=torch.int32, device=query.device)
    view = replace(pages.view, first=torch.maximum(pages.view.first, first))
    q_lens = [min(num, pages.length - start) for start in starts]
    packed = query.transpose(1, 2)
    if min(q_lens) == num:
        flat = packed.reshape(num_rows * num, heads, dim)
        out = attend(flat, view, q_lens=q_lens, scale=scale)
        return out.view(num_rows, num, heads, dim)
    used = torch.arange(num, device=query.device) >= num - torch.tensor(
        q_lens, device=query.device
    ).unsqueeze(1)
    out = torch.zeros(num_rows, num, heads, dim, dtype=query.dtype, device=query.device)
    out[used] = attend(packed[used], view, q_lens=q_lens, scale=scale)
    return out


AttentionInterface.register(ATTENTION, paged_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
