"""The rounds that ``bench mapped`` times: one mapped cache among ordinary tensors, all alike.

Which physical pages a tensor got decides some per cent of its time, whoever mapped them. So each
round makes everything anew, in random order, and a turn reads everything once, in random order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from ...contract import DenseView, Seq
from ...geometry import KVGeometry
from ...kernels.attention import attend
from ...vmm import VmmKVCache

MAPPED = 0
"""The mapped cache's place among the candidates; the others are ordinary tensors."""


class Shape(NamedTuple):
    """A batch of equally long sequences, how they lie, and in what pages."""

    layout: str
    batch: int
    context: int
    page_bytes: int
    kv_heads: int
    head_dim: int
    q_heads: int


class Places(NamedTuple):
    """Where the cache puts K and V: what an ordinary tensor must do as well."""

    strides: tuple[tuple[int, ...], tuple[int, ...]]
    starts: torch.Tensor
    lengths: torch.Tensor


def rounds(shape: Shape, num_plain: int, turns: int, seed: int) -> Iterator[list[float]]:
    """Endless rounds: the median seconds of one call, mapped first, then each ordinary tensor."""
    order = random.Random(seed)
    torch.manual_seed(seed)
    kv = torch.randn(2, shape.batch, shape.context, shape.kv_heads, shape.head_dim)
    q = torch.randn(shape.batch, shape.q_heads, shape.head_dim)
    places = _places(shape)
    while True:
        with _cache(shape) as cache:
            views: dict[int, DenseView] = {}
            for candidate in order.sample(range(1 + num_plain), 1 + num_plain):
                mapped = candidate == MAPPED
                views[candidate] = _fill(cache, kv) if mapped else _plain(places, kv)
            _check_alike(views, q)
            times = _take_turns(views, q, turns, order)
            views.clear()  # the cache closes only when nobody looks at it
        yield [median(times[candidate]) for candidate in range(1 + num_plain)]


def _take_turns(
    views: dict[int, DenseView], q: torch.Tensor, turns: int, order: random.Random
) -> dict[int, list[float]]:
    times: dict[int, list[float]] = {candidate: [] for candidate in views}
    for _ in range(turns):
        for candidate in order.sample(list(views), len(views)):
            begin = perf_counter()
            attend(q, views[candidate])
            times[candidate].append(perf_counter() - begin)
    return times


def _check_alike(views: dict[int, DenseView], q: torch.Tensor) -> None:
    """What is compared must differ in nothing but who mapped its memory."""
    mapped = views[MAPPED]
    expected = attend(q, mapped)
    for view in views.values():
        assert view.k.stride() == mapped.k.stride(), "the strides differ"
        assert view.v.stride() == mapped.v.stride(), "the strides differ"
        assert torch.equal(view.starts, mapped.starts), "the starts differ"
        assert torch.equal(attend(q, view), expected), "the results differ"


def _places(shape: Shape) -> Places:
    with _cache(shape) as cache:
        for seq in range(shape.batch):
            cache.admit(seq, shape.context)
        return _of_view(cache.view(0, list(range(shape.batch))))


def _of_view(view: DenseView) -> Places:
    return Places((view.k.stride(), view.v.stride()), view.starts.clone(), view.lengths.clone())


def _fill(cache: VmmKVCache, kv: torch.Tensor) -> DenseView:
    """Put the sequences into the cache; its memory is taken here, page by page."""
    seqs: list[Seq] = list(range(kv.shape[1]))
    context = kv.shape[2]
    for seq, (k, v) in enumerate(zip(kv[0], kv[1], strict=True)):
        cache.admit(seq, context)
        cache.write(0, [seq], k, v, lens=[context])
    return cache.view(0, seqs)


def _plain(places: Places, kv: torch.Tensor) -> DenseView:
    """The same sequences in ordinary memory, with the rows and strides of the cache."""
    context = kv.shape[2]
    num_tokens = int(places.starts.max()) + context
    sides = []
    for strides, sequences in zip(places.strides, kv, strict=True):
        flat = torch.empty_strided((num_tokens, *kv.shape[3:]), strides)
        for start, sequence in zip(places.starts.tolist(), sequences, strict=True):
            flat[start : start + context] = sequence
        sides.append(flat)
    return DenseView(sides[0], sides[1], places.starts, places.lengths)


def _cache(shape: Shape) -> VmmKVCache:
    """A cache with memory for the batch, and none of it taken."""
    geometry = KVGeometry.uniform(
        "bench",
        layers=1,
        q_heads=shape.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype="float32",
        max_context=shape.context,
    )
    buffers = 2 * shape.kv_heads if shape.layout == "head-major" else 2
    per_buffer = -(-shape.context * geometry.bytes_per_token // buffers // shape.page_bytes)
    memory = shape.batch * buffers * per_buffer * shape.page_bytes
    return VmmKVCache(geometry, memory, shape.page_bytes, layout=shape.layout)
