"""Continuous batching: a real model computes what a replay places, one forward per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any
from zlib import crc32

import numpy as np
import torch

from ...contract import KVCache
from ...telemetry import Clock
from ..scheduling import Placed
from ..trace import Trace
from .serve_model import Batch


class ServeEngine:
    """Greedy tokens of every request of a replay.

    A forward of the model takes the prompts that a step placed and the newest token of every
    request that the step before left running: between those two moments nobody grows, leaves or
    moves. What comes out is the next token of each.

    Parameters
    ----------
    cache
        Where K and V go.
    clock
        Each forward is timed here (``forward``), and within it the attention of each layer.
    model
        A causal model of transformers that attends through ``serve_model``.
    prompts
        Token ids of each request.

    Attributes
    ----------
    tokens : list of list of int
        What each request was answered.
    arrived_ns : dict of int to int
        Start of the step in which a request arrived.
    token_ns : list of list of int
        When each of its tokens was known.
    num_changed : int
        Tokens that came out differently when a preempted request was computed again. The first
        answer stands, since a client would have it already.
    peak_batch : int
        Most requests in one forward.
    """

    def __init__(
        self, cache: KVCache, clock: Clock, model: Callable[..., Any], prompts: Sequence[list[int]]
    ) -> None:
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.arrived_ns: dict[int, int] = {}
        self.token_ns: list[list[int]] = [[] for _ in prompts]
        self.num_changed = self.peak_batch = 0
        self._cache, self._clock, self._model, self._prompts = cache, clock, model, prompts
        self._running: list[int] = []

    def begin_step(self, arrivals: range) -> None:
        """Note when requests arrive."""
        now = perf_counter_ns()
        self.arrived_ns.update((request, now) for request in arrivals)

    def decode(self, requests: list[int]) -> None:
        """Put off: these requests take part in the forward of the next step."""
        self._running = list(requests)

    def prefill(self, placed: list[Placed]) -> None:
        """Compute the prompts placed, together with the newest token of whoever runs."""
        lengths = [(request, self._cache.length(request)) for request in self._running]
        parts = [Placed(request, length, length - 1) for request, length in lengths] + placed
        self._running = []
        if parts:
            self._forward(parts)

    def _forward(self, parts: list[Placed]) -> None:
        """Compute the tokens of each part that are not in the cache, and the one that follows."""
        self.peak_batch = max(self.peak_batch, len(parts))
        start = perf_counter_ns()
        lens = [part.tokens - part.cached for part in parts]
        ids = [token for part in parts for token in self._ids(part)]
        positions = [at for part in parts for at in range(part.cached, part.tokens)]
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                logits_to_keep=torch.tensor(lens).cumsum(0) - 1,  # the last token of each
                kvalloc_batch=Batch(
                    self._cache, self._clock, [part.request for part in parts], lens
                ),
            ).logits[0]
        following = logits.argmax(-1).tolist()
        now = perf_counter_ns()
        self._clock.add("forward", start, now - start)
        for part, token in zip(parts, following, strict=True):
            self._take(part, token, now)

    def _ids(self, part: Placed) -> list[int]:
        whole = self._prompts[part.request] + self.tokens[part.request]
        return whole[part.cached : part.tokens]

    def _take(self, part: Placed, token: int, now: int) -> None:
        known = self.tokens[part.request]
        at = part.tokens - len(self._prompts[part.request])
        if at < len(known):
            self.num_changed += token != known[at]
        else:
            known.append(token)
            self.token_ns[part.request].append(now)


def prompt_ids(trace: Trace, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids of each prompt: equal leading runs are equal, the rest is nobody else's."""
    prompts = []
    for request, length in enumerate(trace.prompt.tolist()):
        runs = () if trace.prefix is None else trace.prefix[request]
        parts = [((1, crc32(repr(key).encode())), size) for key, size in runs]
        own = length - sum(size for _, size in runs)
        ids = [
            np.random.default_rng([seed, *source]).integers(vocabulary, size=size)
            for source, size in [*parts, ((0, request), own)]
        ]
        prompts.append(np.concatenate(ids).tolist())
    return prompts
