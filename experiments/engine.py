"""A stand-in for the model: real writes and real attention on made-up keys, values and queries.

Every vector is a row of one seeded bank, chosen by request, position, layer and role, so that
a preempted request meets the same values again and a wrong page shows in the output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter_ns
from zlib import crc32

import torch

from ..contract import DenseView, KVCache, Prefix
from ..kernels.attention import attend
from ..kernels.reference import reference_attention
from ..telemetry import Clock
from ..tensors import torch_dtype

BANK_ROWS = 8_191  # a prime: strides through the bank never close early
CHUNK = 512
LARGEST = sys.float_info.max
ROLES = {"k": 1, "v": 2, "q": 3}


class Engine:
    """Writes and attends what a replay places; optionally checks every output.

    Parameters
    ----------
    cache
        Where K and V go.
    clock
        Attention is timed here, once per step over all layers (``attend``), and each decode
        step as a whole, its growth included (``step``).
    prefix
        Runs of each request's prompt: equal runs get equal values, as in a model.
    verify
        Compare every attention output with float64 over the values that were meant to be there.
    """

    def __init__(
        self,
        cache: KVCache,
        clock: Clock,
        *,
        prefix: Sequence[Prefix] | None = None,
        seed: int = 0,
        verify: bool = False,
    ) -> None:
        self.max_abs_error: float | None = 0.0 if verify else None
        self._cache, self._clock, self._num_grown = cache, clock, 0
        self._prefix = prefix
        geometry = cache.geometry
        dtype, device = torch_dtype(geometry), cache.device
        dim = max(shape.head_dim for shape in geometry.layers)
        heads = max(geometry.q_heads, *(shape.kv_heads for shape in geometry.layers))
        generator = torch.Generator().manual_seed(seed)
        bank = torch.randn(BANK_ROWS, heads, dim, generator=generator)
        self._bank = bank.to(device=device, dtype=dtype)

    def prefill(self, request: int, tokens: int, cached: int) -> None:
        """Write and attend a prompt, from its ``cached`` first tokens on."""
        owner = self._owners(request, tokens)[cached:]
        lens = [tokens - cached]
        outputs = self._run([request], owner, torch.arange(cached, tokens), lens, "prefill")
        self._verify([request], lens, outputs)

    def decode(self, requests: list[int]) -> None:
        """Write and attend the newest token of each request."""
        start = perf_counter_ns()
        position = torch.tensor([self._cache.length(r) - 1 for r in requests])
        outputs = self._run(requests, torch.tensor(requests), position, None, "attend")
        self._clock.add("step", start, perf_counter_ns() - start + self._grown_ns())
        self._verify(requests, [1] * len(requests), outputs)

    def _grown_ns(self) -> int:
        """Time of the growth calls since the last step: a token's time includes its room."""
        grown = self._clock.durations.get("grow", ())
        new, self._num_grown = sum(grown[self._num_grown :]), len(grown)
        return new

    def _owners(self, request: int, tokens: int) -> torch.Tensor:
        """Whose values the tokens of a request have: a run's for its prefix, else its own."""
        owner = torch.full((tokens,), request)
        at = 0
        for key, size in self._prefix[request] if self._prefix is not None else ():
            owner[at : at + size] = crc32(repr(key).encode())
            at += size
        return owner

    def _run(
        self,
        requests: list[int],
        owner: torch.Tensor,
        position: torch.Tensor,
        lens: list[int] | None,
        name: str,
    ) -> list[torch.Tensor]:
        """Write and attend some tokens in every layer; returns the outputs."""
        attend_ns = start = 0
        outputs = []
        for layer in range(len(self._cache.geometry.layers)):
            k, v = (self._rows(role, layer, owner, position) for role in "kv")
            q = self._rows("q", layer, owner, position)
            self._cache.write(layer, requests, k, v, lens=lens)
            view = self._cache.view(layer, requests)
            start = perf_counter_ns()
            outputs.append(attend(q, view, q_lens=lens, window=self._window(layer)))
            attend_ns += perf_counter_ns() - start
        self._clock.add(name, start, attend_ns)
        return outputs

    def _verify(self, requests: list[int], counts: list[int], outputs: list[torch.Tensor]) -> None:
        if self.max_abs_error is not None:
            for layer, output in enumerate(outputs):
                self._check(layer, requests, counts, output)

    def _window(self, layer: int) -> int | None:
        return self._cache.geometry.layers[layer].window

    def _rows(
        self, role: str, layer: int, owner: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """``[n, heads, dim]``: the vectors of a role for tokens (owner, position)."""
        shape = self._cache.geometry.layers[layer]
        heads = self._cache.geometry.q_heads if role == "q" else shape.kv_heads
        index = owner * 7_919 + position * 4_099 + layer * 1_031 + ROLES[role] * 2_689
        return self._bank[index % BANK_ROWS, :heads, : shape.head_dim]

    def _check(
        self, layer: int, requests: list[int], counts: list[int], output: torch.Tensor
    ) -> None:
        """Attention over the intended values, in float64, chunk by chunk of queries."""
        assert self.max_abs_error is not None
        done = 0
        for request, num in zip(requests, counts, strict=True):
            length = self._cache.length(request)
            owner, position = self._owners(request, length), torch.arange(length)
            k, v = (self._rows(role, layer, owner, position) for role in "kv")
            for begin in range(length - num, length, CHUNK):
                end = min(begin + CHUNK, length)
                q = self._rows("q", layer, owner[begin:end], position[begin:end])
                view = DenseView(k, v, torch.tensor([0]), torch.tensor([end], dtype=torch.int32))
                expected = reference_attention(
                    q, view, q_lens=[end - begin], window=self._window(layer)
                )
                error = (output[done : done + end - begin].double() - expected).abs()
                # Memory that nobody wrote shows as NaN: the largest error, not the unseen one.
                error = error.nan_to_num(nan=LARGEST, posinf=LARGEST)
                self.max_abs_error = max(self.max_abs_error, float(error.max()))
                done += end - begin
