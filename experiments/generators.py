"""Generated traces: the same kind, number and seed always give the same requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..sequences import number, whole
from .errors import BadInput
from .trace import MAX_SECONDS, MAX_TOKENS, MISSING, Ints, Runs, Trace

MAX_REQUESTS = 10_000_000


class Lengths(NamedTuple):
    """Prompt and output tokens, int64 ``[N]`` each, and prefixes if the kind shares any."""

    prompt: Ints
    output: Ints
    prefix: tuple[Runs, ...] | None = None


@dataclass(frozen=True)
class Kind:
    """A family of generated traces."""

    what: str
    requests: int
    rate: float | None
    """Arrivals per second; None: all at once."""
    draw: Callable[[np.random.Generator, int], Lengths]
    ranged: bool = False
    """Lengths are uniform, so ``--prompt A:B`` and ``--output C:D`` may set them."""


def generate(
    kind: str,
    *,
    requests: int | None = None,
    seed: int = 0,
    rate: float | None = None,
    prompt: tuple[int, int] | None = None,
    output: tuple[int, int] | None = None,
) -> Trace:
    """Generate a trace.

    Parameters
    ----------
    kind
        A key of ``KINDS``.
    requests, rate
        How many, and how many per second (Poisson arrivals, the first at 0; rate 0: all at
        once); None: as the kind does by default. Lengths do not depend on the rate.
    prompt, output
        Inclusive bounds of uniform lengths, for ``uniform``, ``canonical``, ``poisson``.

    Raises
    ------
    BadInput
        Unknown kind, or a number out of range.
    """
    if kind not in KINDS:
        raise BadInput(f"there is no kind of trace {kind!r}: choose from {', '.join(KINDS)}")
    family = KINDS[kind]
    num_requests = check_requests(family.requests if requests is None else requests)
    rng = lengths_rng(seed)
    if not family.ranged and (prompt or output):
        raise BadInput(f"{kind} draws lengths of its own: --prompt and --output do not apply")
    if family.ranged:
        lengths = _uniform(rng, num_requests, prompt or _PROMPT, output or _OUTPUT)
    else:
        lengths = family.draw(rng, num_requests)
    rate = family.rate if rate is None else rate
    return Trace(
        kind,
        "s",
        poisson_arrivals(num_requests, rate, seed) if rate else np.zeros(num_requests),
        lengths.prompt,
        lengths.output,
        np.full(num_requests, MISSING),
        lengths.prefix,
        (f"generated, seed {seed}",),
    )


def lengths_rng(seed: int) -> np.random.Generator:
    """The stream of random lengths of a seed."""
    return np.random.default_rng([_seed(seed), 0])


def _seed(seed: int) -> int:
    if whole("seed", seed) < 0:
        raise BadInput(f"--seed must be 0 or more, not {seed}")
    return seed


def check_requests(requests: int) -> int:
    """The number of requests; refuses one that is none, or that no trace holds."""
    if not 1 <= whole("requests", requests) <= MAX_REQUESTS:
        raise BadInput(f"--requests must lie between 1 and {MAX_REQUESTS:,}, not {requests}")
    return requests


def check_rate(rate: float) -> None:
    """Refuse a rate at which arrivals cannot be told apart, or that is no number."""
    if not 1e-6 <= number("rate", rate) <= 1e6:  # false for NaN
        raise BadInput(f"--rate must lie between 1e-6 and 1e6 requests a second, not {rate}")


def poisson_arrivals(requests: int, rate: float, seed: int) -> npt.NDArray[np.float64]:
    """Seconds, ascending from 0, with exponential gaps of mean ``1 / rate``: ``[requests]``."""
    check_rate(rate)
    gaps = np.random.default_rng([_seed(seed), 1]).exponential(1 / rate, requests)
    gaps[0] = 0.0
    seconds = np.cumsum(gaps)
    if seconds[-1] > MAX_SECONDS:
        raise BadInput(
            f"{requests:,} requests at --rate {rate:g} take longer than {MAX_SECONDS:,} seconds: "
            "give a larger rate"
        )
    return seconds.round(6)


def lognormal(
    rng: np.random.Generator, size: int, *, mean: float, sigma: float, low: int, high: int
) -> Ints:
    """Whole lognormal numbers, clipped to ``[low, high]``, of the given mean *after* clipping."""
    below, above = math.log(low) - 9 * sigma, math.log(high) + 9 * sigma
    mu = math.log(mean)
    for _ in range(80):  # the clipped mean rises with mu
        if _clipped_mean(mu, sigma, low, high) < mean:
            below = mu
        else:
            above = mu
        mu = (below + above) / 2
    return np.rint(np.clip(rng.lognormal(mu, sigma, size), low, high)).astype(np.int64)


def _clipped_mean(mu: float, sigma: float, low: float, high: float) -> float:
    def normal(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    inside = math.exp(mu + sigma**2 / 2) * (normal(b - sigma) - normal(a - sigma))
    return low * normal(a) + inside + high * (1 - normal(b))


def _uniform(
    rng: np.random.Generator, size: int, prompt: tuple[int, int], output: tuple[int, int]
) -> Lengths:
    for option, (low, high), least in (("--prompt", prompt, 1), ("--output", output, 0)):
        if not least <= low <= high <= MAX_TOKENS:
            raise BadInput(f"{option} takes LOW:HIGH with {least} ≤ LOW ≤ HIGH, not {low}:{high}")
    return Lengths(
        rng.integers(prompt[0], prompt[1], size, endpoint=True),
        rng.integers(output[0], output[1], size, endpoint=True),
    )


def _canonical(rng: np.random.Generator, size: int) -> Lengths:
    return _uniform(rng, size, _PROMPT, _OUTPUT)


def _sharegpt(rng: np.random.Generator, size: int) -> Lengths:
    # Means as in the PagedAttention paper (Kwon et al. 2023, §6.1); the spread is our choice,
    # and the bounds keep a request within the 2,048 tokens of the models used there.
    return Lengths(
        lognormal(rng, size, mean=161.31, sigma=1.3, low=4, high=1024),
        lognormal(rng, size, mean=337.99, sigma=0.9, low=4, high=1024),
    )


def _alpaca(rng: np.random.Generator, size: int) -> Lengths:
    return Lengths(
        lognormal(rng, size, mean=19.31, sigma=0.6, low=4, high=1024),
        lognormal(rng, size, mean=58.45, sigma=0.9, low=1, high=1024),
    )


def _mixed(rng: np.random.Generator, size: int) -> Lengths:
    """Seven tenths chat, two tenths long documents, one tenth code completion."""
    sort = rng.choice(3, size, p=[0.7, 0.2, 0.1])
    prompts = np.stack(
        [
            lognormal(rng, size, mean=300, sigma=1.0, low=8, high=4096),
            lognormal(rng, size, mean=5000, sigma=0.6, low=1024, high=30_000),
            lognormal(rng, size, mean=2000, sigma=0.8, low=64, high=8192),
        ]
    )
    outputs = np.stack(
        [
            lognormal(rng, size, mean=220, sigma=0.8, low=4, high=1024),
            lognormal(rng, size, mean=180, sigma=0.7, low=16, high=1024),
            lognormal(rng, size, mean=28, sigma=0.9, low=1, high=256),
        ]
    )
    at = np.arange(size)
    return Lengths(prompts[sort, at], outputs[sort, at])


def _shared_prefix(rng: np.random.Generator, size: int) -> Lengths:
    """Conversations of 1 to 6 turns over four system prompts, interleaved at random.

    A turn's prompt repeats the whole conversation so far, so the next turn shares it.
    """
    systems = rng.integers(256, 1024, 4, endpoint=True).tolist()
    prompt: list[int] = []
    output: list[int] = []
    prefix: list[Runs] = []
    live: list[tuple[int, int, Runs]] = []  # (name, turns left, history)
    names = 0
    while len(prompt) < size:
        if not live or rng.random() < 0.3:
            system = int(rng.integers(4))
            turns = int(rng.integers(1, 6, endpoint=True))
            live.append((names, turns, ((f"system{system}", systems[system]),)))
            names += 1
        name, turns, history = live.pop(int(rng.integers(len(live))))
        turn = len(history) // 2
        asked, answered = (int(n) for n in rng.integers((8, 30), (200, 300), endpoint=True))
        asking = (*history, (f"c{name}u{turn}", asked))
        prompt.append(sum(tokens for _, tokens in asking))
        output.append(answered)
        prefix.append(asking)
        if turns > 1:
            live.append((name, turns - 1, (*asking, (f"c{name}a{turn}", answered))))
    return Lengths(np.array(prompt), np.array(output), tuple(prefix))


_PROMPT, _OUTPUT = (500, 1500), (100, 300)
KINDS: dict[str, Kind] = {
    "canonical": Kind(
        "the bookkeeping benchmark: 10,000 at once, prompt U[500,1500], output U[100,300]",
        10_000,
        None,
        _canonical,
        ranged=True,
    ),
    "uniform": Kind("uniform lengths, all at once", 1000, None, _canonical, ranged=True),
    "poisson": Kind("uniform lengths, 4 a second", 1000, 4.0, _canonical, ranged=True),
    "sharegpt": Kind(
        "ShareGPT-like: lognormal, mean prompt 161, mean output 338", 1000, 4.0, _sharegpt
    ),
    "alpaca": Kind("Alpaca-like: lognormal, mean prompt 19, mean output 58", 1000, 16.0, _alpaca),
    "shared-prefix": Kind("conversations over four system prompts", 500, 4.0, _shared_prefix),
    "mixed": Kind("chat, long documents and code completion together", 1000, 4.0, _mixed),
}
"""Kinds of ``kvalloc trace generate``; each is also a trace name, with its defaults."""
