"""Wrong calls of every verb: each must raise at once and change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvalloc.contract import Allocator, KVCache

WRONG = (KeyError, ValueError, TypeError)
Call = Callable[[], object]


class Walk(Protocol):
    """What is needed of a state machine to call it wrongly."""

    cache: Allocator
    random: random.Random
    tokens: dict[int, list[int]]
    away: dict[int, list[int]]


Misuse = Callable[[Walk], Call | None]
"""Makes the wrong call, or None where it would not be one now."""

UNKNOWN = -7


def of_live(call: Callable[[Walk, int], Any]) -> Misuse:
    """A call that needs a live sequence."""

    def make(walk: Walk) -> Call | None:
        if not walk.tokens:
            return None
        seq = walk.random.choice(sorted(walk.tokens))
        return lambda: call(walk, seq)

    return make


def of_away(call: Callable[[Walk, int], Any]) -> Misuse:
    """A call that an offloaded sequence must refuse."""

    def make(walk: Walk) -> Call | None:
        if not walk.away:
            return None
        seq = walk.random.choice(sorted(walk.away))
        return lambda: call(walk, seq)

    return make


def always(call: Callable[[Walk], Any]) -> Misuse:
    """A call that is wrong at any time."""
    return lambda walk: lambda: call(walk)


def admit(walk: Walk, tokens: Any = 4, **options: Any) -> None:
    walk.cache.admit(UNKNOWN, tokens, **{"max_new": 1, "expected_new": 1, **options})


def write(layer: Any = 0, tokens: int = 1, lens: Any = (1,), **options: Any) -> Misuse:
    """A write of tensors that do not fit, to a live sequence of a cache."""

    def make(walk: Walk) -> Call | None:
        if not isinstance(walk.cache, KVCache) or not any(walk.tokens.values()):
            return None
        cache = walk.cache
        seq = walk.random.choice([seq for seq in sorted(walk.tokens) if walk.tokens[seq]])
        shape = cache.geometry.layers[0]
        size = (tokens, shape.kv_heads, options.get("dim", shape.head_dim))
        dtype = options.get("dtype", getattr(torch, cache.geometry.dtype))
        k = torch.zeros(size, dtype=dtype, device=options.get("device", "cpu"))
        return lambda: cache.write(layer, [seq], k, options.get("v", k), lens=lens)

    return make


def view(layer: Any, seqs: list[Any]) -> Misuse:
    def make(walk: Walk) -> Call | None:
        cache = walk.cache
        return (lambda: cache.view(layer, seqs)) if isinstance(cache, KVCache) else None

    return make


BEYOND = 1 << 40

MISUSES: dict[str, Misuse] = {
    "admit a live name": of_live(lambda w, s: w.cache.admit(s, 1, max_new=1, expected_new=1)),
    "admit an offloaded name": of_away(lambda w, s: w.cache.admit(s, 1, max_new=1, expected_new=1)),
    "admit fewer than none": always(lambda w: admit(w, -1)),
    "admit half a token": always(lambda w: admit(w, 1.5)),
    "admit a truth": always(lambda w: admit(w, True)),
    "admit a word": always(lambda w: admit(w, "4")),
    "admit more than all": always(lambda w: admit(w, BEYOND)),
    "admit 2^80": always(lambda w: admit(w, 1 << 80)),
    "negative headroom": always(lambda w: admit(w, headroom=-1)),
    "headroom beyond all": always(lambda w: admit(w, headroom=BEYOND)),
    "negative max_new": always(lambda w: admit(w, max_new=-1)),
    "half an expected_new": always(lambda w: admit(w, expected_new=0.5)),
    "a prefix longer than its prompt": always(lambda w: admit(w, prefix=[("x", 5)])),
    "a run without tokens": always(lambda w: admit(w, prefix=[("x", 0)])),
    "a run of half a token": always(lambda w: admit(w, prefix=[("x", 0.5)])),
    "a key that is a float": always(lambda w: admit(w, prefix=[(1.0, 4)])),
    "a key that is a truth": always(lambda w: admit(w, prefix=[(True, 4)])),
    "a salt that is a list": always(lambda w: admit(w, prefix=[("x", 4)], salt=[1])),
    "a salt without a prefix": always(lambda w: admit(w, salt=1.5)),
    "grow the unknown": always(lambda w: w.cache.grow([UNKNOWN])),
    "grow one twice": of_live(lambda w, s: w.cache.grow([s, s])),
    "grow the known and the unknown": of_live(lambda w, s: w.cache.grow([s, UNKNOWN])),
    "grow by fewer than none": of_live(lambda w, s: w.cache.grow([s], -1)),
    "grow by half a token": of_live(lambda w, s: w.cache.grow([s], 0.5)),  # type: ignore[arg-type]
    "grow by 2^70": of_live(lambda w, s: w.cache.grow([s], 1 << 70)),
    "grow a set": of_live(lambda w, s: w.cache.grow({s})),  # type: ignore[arg-type]
    "grow the offloaded": of_away(lambda w, s: w.cache.grow([s])),
    "release the unknown": always(lambda w: w.cache.release(UNKNOWN)),
    "fork the unknown": always(lambda w: w.cache.fork(UNKNOWN, UNKNOWN - 1)),
    "fork onto itself": of_live(lambda w, s: w.cache.fork(s, s)),
    "fork the offloaded": of_away(lambda w, s: w.cache.fork(s, UNKNOWN)),
    "truncate the unknown": always(lambda w: w.cache.truncate(UNKNOWN, 0)),
    "truncate to more": of_live(lambda w, s: w.cache.truncate(s, len(w.tokens[s]) + 1)),
    "truncate to fewer than none": of_live(lambda w, s: w.cache.truncate(s, -1)),
    "truncate the offloaded": of_away(lambda w, s: w.cache.truncate(s, 0)),
    "offload the unknown": always(lambda w: w.cache.offload(UNKNOWN)),
    "offload twice": of_away(lambda w, s: w.cache.offload(s)),
    "restore the unknown": always(lambda w: w.cache.restore(UNKNOWN)),
    "restore what is here": of_live(lambda w, s: w.cache.restore(s)),
    "restore with negative headroom": of_away(lambda w, s: w.cache.restore(s, headroom=-1)),
    "length of the unknown": always(lambda w: w.cache.length(UNKNOWN)),
    "spans of the unknown": always(lambda w: w.cache.spans(UNKNOWN)),
    "spans of the offloaded": of_away(lambda w, s: w.cache.spans(s)),
    "view the unknown": view(0, [UNKNOWN]),
    "view a layer too many": view(99, []),
    "view layer −1": view(-1, []),
    "write to a layer too many": write(layer=99),
    "write to layer −1": write(layer=-1),
    "write more than it has": write(tokens=5000, lens=(5000,)),
    "write fewer than none": write(tokens=0, lens=(-1,)),
    "write two for one": write(tokens=2),
    "write lengths of others": write(lens=(1, 1)),
    "write half a token": write(lens=(1.0,)),
    "write another width": write(dim=3),
    "write another dtype": write(dtype=torch.float64),
    "write to another device": write(device="meta"),
    "write no tensor": write(v=[1.0]),
}
