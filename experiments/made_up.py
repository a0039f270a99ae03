"""Keys, values and queries that a replay makes up, and what attention over them must give.

Every vector is a row of a seeded bank, chosen by request, position and layer, so that a
preempted request meets the same values again and a wrong page shows in the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from ..contract import Prefix
from ..geometry import KVGeometry
from ..tensors import torch_dtype

BANK_ROWS = 8_191  # a prime: strides through the bank never close early
BLOCK_BYTES = 4 << 20
"""Scores per block of queries: what stays near the processor."""
KEEP_BYTES = 2 << 30
"""Expected outputs beyond this are computed for each backend anew."""


class Values:
    """The vectors of every request.

    Parameters
    ----------
    prefix
        Runs of each request's prompt: equal runs get equal values, as in a model.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        prefix: Sequence[Prefix] | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.geometry = geometry
        self._prefix = prefix
        dim = max(shape.head_dim for shape in geometry.layers)
        kv_heads = max(shape.kv_heads for shape in geometry.layers)
        generator = torch.Generator().manual_seed(seed)
        # One for each role: a query that equals a key would look at hardly anything else.
        self._banks = {
            role: torch.randn(BANK_ROWS, heads, dim, generator=generator).to(
                device=device, dtype=torch_dtype(geometry)
            )
            for role, heads in (("k", kv_heads), ("v", kv_heads), ("q", geometry.q_heads))
        }

    def owners(self, request: int, tokens: int) -> torch.Tensor:
        """Whose vectors the tokens of a request have: a run's for its prefix, else its own."""
        owner = torch.full((tokens,), request)
        at = 0
        for key, size in self._prefix[request] if self._prefix is not None else ():
            owner[at : at + size] = crc32(repr(key).encode())
            at += size
        return owner

    def rows(
        self, role: str, layer: int, owner: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """``[n, heads, dim]``: the vectors of a role (k, v, q) for tokens (owner, position)."""
        shape = self.geometry.layers[layer]
        heads = self.geometry.q_heads if role == "q" else shape.kv_heads
        index = owner * 7_919 + position * 4_099 + layer * 1_031
        return self._banks[role][index % BANK_ROWS, :heads, : shape.head_dim]


@dataclass
class _Kept:
    """Outputs ``[begin, end)`` of one layer of one request, in a buffer with room to grow."""

    begin: int
    end: int
    buffer: torch.Tensor


class Expected:
    """Attention over the made-up values in float64, remembered from one backend to the next."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._num_bytes = 0

    def outputs(self, layer: int, request: int, begin: int, end: int) -> torch.Tensor:
        """``[end − begin, H_q, D]`` float64: outputs at positions ``[begin, end)``."""
        kept = self._kept.get((layer, request))
        if kept is None and self._num_bytes < KEEP_BYTES:
            empty = self._compute(layer, request, begin, begin)
            kept = self._kept[layer, request] = _Kept(begin, begin, empty)
        if kept is None or not kept.begin <= begin <= kept.end:
            return self._compute(layer, request, begin, end)
        if end > kept.end:
            self._append(kept, self._compute(layer, request, kept.end, end))
        return kept.buffer[begin - kept.begin : end - kept.begin]

    def _append(self, kept: _Kept, new: torch.Tensor) -> None:
        filled, needed = kept.end - kept.begin, kept.end - kept.begin + len(new)
        if needed > len(kept.buffer):
            grown = new.new_empty(max(needed, len(kept.buffer) * 3 // 2), *new.shape[1:])
            grown[:filled] = kept.buffer[:filled]
            self._num_bytes += grown.nbytes - kept.buffer.nbytes
            kept.buffer = grown
        kept.buffer[filled:needed] = new
        kept.end += len(new)

    def _compute(self, layer: int, request: int, begin: int, end: int) -> torch.Tensor:
        values, window = self._values, self._values.geometry.layers[layer].window
        owner, position = values.owners(request, end), torch.arange(end)
        k, v = (values.rows(role, layer, owner, position).double() for role in "kv")
        q = values.rows("q", layer, owner[begin:], position[begin:]).double()
        return float64_attention(q, k, v, window)


def float64_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Causal attention of the last ``n`` of ``L`` tokens: float64 ``[n, H_q, D]``.

    The formula of ``kernels.reference``, one KV head and a few queries at a time: prompts of
    thousands of tokens take a third of the time and none of the memory.
    """
    num_queries, length, group = len(q), len(k), q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    step = max(1, BLOCK_BYTES // (8 * group * max(length, 1)))
    for head in range(k.shape[1]):
        heads = slice(head * group, (head + 1) * group)
        keys, values = k[:, head].contiguous(), v[:, head].contiguous()
        for at in range(0, num_queries, step):
            queries = q[at : at + step, heads]
            first = length - num_queries + at  # position of the first of these queries
            low = 0 if window is None else max(0, first - window + 1)
            high = first + len(queries)
            scores = queries.reshape(-1, q.shape[2]) @ keys[low:high].T
            scores = scores.view(len(queries), group, -1).mul_(q.shape[2] ** -0.5)
            query_at = torch.arange(first, high, device=q.device)[:, None, None]
            token_at = torch.arange(low, high, device=q.device)
            hidden = token_at > query_at
            if window is not None:
                hidden |= token_at <= query_at - window
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            out[at : at + step, heads] = (weights.flatten(0, 1) @ values[low:high]).view_as(queries)
    return out
