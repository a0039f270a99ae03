"""One decode step after the other on every transformers cache in turn: what ``bench cache`` times.

All caches take part in each round, so that they meet the same machine in the same mood; the slow
ones leave after a while.
"""

from __future__ import annotations

import ctypes
import gc
import inspect
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
import transformers

from ...hf import ContiguousCache, PagedCache, VmmCache
from ...hf.paged import ATTENTION

NUM_LAYERS = 2
WARM_UP = 3
MOST_SECONDS = 6.0
"""A cache leaves the rounds of a phase after so long, ten of them made."""
FILL_TOKENS = 1024


@dataclass(frozen=True)
class Point:
    """Where a cache is timed."""

    context: int
    batch: int
    kv_heads: int
    q_heads: int
    head_dim: int
    dtype: torch.dtype


class Subject:
    """A cache by name, and a model with random weights that uses it."""

    def __init__(self, name: str, make: Callable[[Any, int], Any], model: Any) -> None:
        self.name = name
        self.model = model
        self._make = make

    def filled(self, point: Point, max_length: int) -> Any:
        """A cache with ``point.context`` random tokens in every layer."""
        cache = self._make(self.model.config, max_length)
        generator = torch.Generator().manual_seed(0)
        left = point.context
        while left:
            num_tokens = min(left, FILL_TOKENS)
            size = (point.batch, point.kv_heads, num_tokens, point.head_dim)
            k, v = (torch.randn(size, generator=generator).to(point.dtype) for _ in range(2))
            for layer in range(NUM_LAYERS):
                cache.update(k, v, layer)
            left -= num_tokens
        return cache


def subjects(point: Point) -> list[Subject]:
    """Every cache with its model; the weights are the same."""
    plain, paged = _model(point, None), _model(point, ATTENTION)
    make_paged = _of(PagedCache)
    found = [
        Subject("DynamicCache", lambda config, _: transformers.DynamicCache(config=config), plain),
        Subject(
            "StaticCache",
            lambda config, most: transformers.StaticCache(config=config, max_cache_len=most),
            plain,
        ),
        Subject("VmmCache", _of(VmmCache), plain),
        Subject("ContiguousCache", _of(ContiguousCache), plain),
        Subject("PagedCache", make_paged, paged),
        Subject("PagedCache, gathered", make_paged, plain),
    ]
    if point.q_heads > point.kv_heads:  # sdpa without a mask is slow there
        found.insert(3, Subject(f"VmmCache, {ATTENTION}", _of(VmmCache), paged))
    for subject in found:  # what the first use of anything imports is no cache's memory
        _drop(subject.filled(replace(point, context=1), 64))
    return found


def _of(kind: Any) -> Callable[[Any, int], Any]:
    return lambda config, most: kind.from_config(config, max_length=most)


def _model(point: Point, attention: str | None) -> Any:
    hidden = point.q_heads * point.head_dim
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=point.q_heads,
        num_key_value_heads=point.kv_heads,
        head_dim=point.head_dim,
        vocab_size=512,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(point.dtype).eval()
    if attention is not None:
        model.set_attn_implementation(attention)
    return model


# ---------------------------------------------------------------------- what is measured


def resident_bytes(subject: Subject, point: Point, max_length: int) -> int:
    """By how much the process grows with a filled cache of ``max_length`` tokens."""
    before = _resident()
    cache = subject.filled(point, max_length)
    taken = _resident() - before
    _drop(cache)
    return taken


def update_times(all_of: list[Subject], point: Point, num_rounds: int) -> dict[str, list[float]]:
    """Microseconds of one layer's update with one token a row, round by round."""
    size = (point.batch, point.kv_heads, 1, point.head_dim)
    k = v = torch.ones(size, dtype=point.dtype)

    def step(_: Subject, cache: Any) -> None:
        for layer in range(NUM_LAYERS):
            cache.update(k, v, layer)

    times = _rounds(all_of, point, num_rounds, step)
    return {name: [t * 1e6 / NUM_LAYERS for t in found] for name, found in times.items()}


def decode_times(all_of: list[Subject], point: Point, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the model for one token a row, round by round."""
    token = torch.ones(point.batch, 1, dtype=torch.int64)
    name = (
        "cache"
        if "cache" in inspect.signature(all_of[0].model.forward).parameters
        else "past_key_values"
    )

    def step(subject: Subject, cache: Any) -> None:
        subject.model(token, **{name: cache})

    times = _rounds(all_of, point, num_rounds, step)
    return {name: [t * 1e3 for t in found] for name, found in times.items()}


def _rounds(
    all_of: list[Subject],
    point: Point,
    num_rounds: int,
    step: Callable[[Subject, Any], None],
) -> dict[str, list[float]]:
    """Seconds of every step, by name of the cache."""
    most = point.context + num_rounds + WARM_UP  # StaticCache attends over all of it
    caches = {subject.name: subject.filled(point, most) for subject in all_of}
    times: dict[str, list[float]] = {subject.name: [] for subject in all_of}
    for n in range(num_rounds + WARM_UP):
        for subject in _in_turn(all_of, n):
            found = times[subject.name]
            if len(found) >= 10 and sum(found) > MOST_SECONDS:
                continue
            start = perf_counter()
            step(subject, caches[subject.name])
            if n >= WARM_UP:
                found.append(perf_counter() - start)
    while caches:
        _drop(caches.popitem()[1])
    return times


def _in_turn(all_of: list[Subject], n: int) -> Iterator[Subject]:
    """Another one goes first in each round."""
    for i in range(len(all_of)):
        yield all_of[(n + i) % len(all_of)]


def _resident() -> int:
    """Memory of this process that is in use: what was freed is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _drop(cache: Any) -> None:
    if hasattr(cache, "close"):
        cache.close()
