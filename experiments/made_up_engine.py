"""A stand-in for the model: real writes and real attention on made-up values, checked if asked."""

from __future__ import annotations

import sys
from time import perf_counter_ns

import torch

from ..contract import KVCache
from ..kernels.attention import attend
from ..telemetry import Clock
from .made_up import Expected, Values
from .scheduling import Placed

LARGEST = sys.float_info.max


class MadeUpEngine:
    """Writes and attends what a replay places; optionally checks every output.

    Parameters
    ----------
    cache
        Where K and V go.
    clock
        Attention is timed here, once per step over all layers (``attend``), and each decode
        step as a whole, its growth included (``step``).
    values
        What the tokens hold, on the device of the cache.
    expected
        Compare every attention output with these; None: no check.
    """

    def __init__(
        self,
        cache: KVCache,
        clock: Clock,
        *,
        values: Values,
        expected: Expected | None = None,
    ) -> None:
        self.max_abs_error: float | None = None if expected is None else 0.0
        self._cache, self._clock, self._num_grown = cache, clock, 0
        self._values, self._expected = values, expected

    def prefill(self, placed: list[Placed]) -> None:
        """Write and attend each prompt by itself, from its cached tokens on."""
        for request, tokens, cached in placed:
            owner = self._values.owners(request, tokens)[cached:]
            lens = [tokens - cached]
            outputs, _ = self._run([request], owner, torch.arange(cached, tokens), lens, "prefill")
            self._verify([request], lens, outputs)

    def begin_step(self, arrivals: range) -> None:
        """Growth from here on belongs to the coming decode step."""
        self._num_grown = len(self._clock.durations.get("grow", ()))

    def decode(self, requests: list[int]) -> None:
        """Write and attend the newest token of each request."""
        position = torch.tensor([self._cache.length(r) - 1 for r in requests])
        start = perf_counter_ns()
        outputs, step_ns = self._run(requests, torch.tensor(requests), position, None, "attend")
        grown_ns = sum(self._clock.durations.get("grow", ())[self._num_grown :])
        self._clock.add("step", start, step_ns + grown_ns)
        self._verify(requests, [1] * len(requests), outputs)

    def _run(
        self,
        requests: list[int],
        owner: torch.Tensor,
        position: torch.Tensor,
        lens: list[int] | None,
        name: str,
    ) -> tuple[list[torch.Tensor], int]:
        """Write and attend some tokens in every layer; returns outputs and nanoseconds.

        Making up the vectors is outside the times: a model would compute them.
        """
        attend_ns = step_ns = 0
        first = perf_counter_ns()
        outputs = []
        for layer in range(len(self._cache.geometry.layers)):
            k, v, q = (self._values.rows(role, layer, owner, position) for role in "kvq")
            start = perf_counter_ns()
            self._cache.write(layer, requests, k, v, lens=lens)
            view = self._cache.view(layer, requests)
            attending = perf_counter_ns()
            outputs.append(attend(q, view, q_lens=lens))
            end = perf_counter_ns()
            attend_ns += end - attending
            step_ns += end - start
        self._clock.add(name, first, attend_ns)
        return outputs, step_ns

    def _verify(self, requests: list[int], counts: list[int], outputs: list[torch.Tensor]) -> None:
        """Compare the outputs of the newest tokens, layer by layer and request by request."""
        if self._expected is None:
            return
        lengths = [self._cache.length(request) for request in requests]
        for layer, output in enumerate(outputs):
            parts = torch.split(output, counts)
            for request, length, got in zip(requests, lengths, parts, strict=True):
                expected = self._expected.outputs(layer, request, length - len(got), length)
                error = (got.double() - expected).abs()
                # Memory that nobody wrote shows as NaN: the largest error, not an unseen one.
                error = error.nan_to_num(nan=LARGEST, posinf=LARGEST)
                assert self.max_abs_error is not None
                self.max_abs_error = max(self.max_abs_error, float(error.max()))
