"""Traces that need no file: two of the article that docs/replay.md tells of, two small loads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .generators import KINDS, generate, lengths_rng, lognormal, poisson_arrivals
from .trace import Ints, Trace

CHAT_CAP = 160
"""``max_new`` of the chat-like requests: what a client that does not think asks for."""


def article(seed: int = 0) -> Trace:
    """Nine requests that give the article's table on 80 slots (docs/replay.md)."""
    return Trace.from_rows(
        "article",
        "step",
        zip(
            (1, 3, 4, 8, 10, 11, 12, 15, 15),
            (38, 7, 10, 18, 23, 9, 15, 23, 1),
            (1, 10, 1, 1, 3, 40, 9, 2, 20),
            (30, 34, 9, 2, 6, 40, 22, 5, 24),
            strict=True,
        ),
    )


def hole(seed: int = 0) -> Trace:
    """The article's picture: four reservations fill 64 of 80 slots, one ends, 20 do not fit."""
    return Trace.from_rows(
        "hole",
        "step",
        [(0, 4, 20, 20), (0, 4, 2, 12), (0, 4, 12, 12), (0, 4, 4, 4), (2, 10, 10, 10)],
    )


def chat(seed: int = 0) -> Trace:
    """56 short conversations, six a second."""
    size = 56
    prompt, output = _chat_lengths(seed, size)
    return Trace(
        "chat", "s", poisson_arrivals(size, 6.0, seed), prompt, output, np.full(size, CHAT_CAP)
    )


def burst(seed: int = 0) -> Trace:
    """Four bursts of 14 requests within 0.1 s each, four idle seconds apart."""
    bursts, size = 4, 14
    prompt, output = _chat_lengths(seed, bursts * size)
    within = np.sort(np.random.default_rng([seed, 2]).uniform(0, 0.1, (bursts, size)), axis=1)
    arrival = (within + 4.0 * np.arange(bursts)[:, None]).round(6).ravel()
    return Trace("burst", "s", arrival, prompt, output, np.full(len(prompt), CHAT_CAP))


def _chat_lengths(seed: int, size: int) -> tuple[Ints, Ints]:
    rng = lengths_rng(seed)
    prompt = lognormal(rng, size, mean=110, sigma=0.8, low=20, high=400)
    return prompt, lognormal(rng, size, mean=50, sigma=0.6, low=10, high=120)


BUILT_IN: dict[str, tuple[str, Callable[[int], Trace]]] = {
    "article": ("nine requests that give the article's table on 80 slots", article),
    "hole": ("five requests: free slots enough, but not in one place", hole),
    "chat": ("56 short conversations, six a second; the default of compare", chat),
    "burst": ("four bursts of 14 requests, idle in between", burst),
}
"""Name → (what it is, how it is made from a seed). The article's two ignore the seed."""


def built_in(name: str, seed: int = 0) -> Trace | None:
    """A built-in trace or a generated kind with its defaults; None for any other name."""
    if name in BUILT_IN:
        return BUILT_IN[name][1](seed)
    return generate(name, seed=seed) if name in KINDS else None
