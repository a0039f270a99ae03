"""The three caches under attention: every output of a random trace equals the float64 reference.

Free memory is NaN before the trace begins, so that a token too many shows in the output; values
are made per request and position, so that a preempted one meets its own again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import DenseView, KVCache, PagedView
from kvalloc.experiments.replay import replay
from kvalloc.experiments.scheduling import OnFailure, Placed
from kvalloc.experiments.trace import Trace
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.kernels.attention import attend
from kvalloc.kernels.reference import reference_attention
from kvalloc.paged import PagedKVCache
from kvalloc.vmm import VmmKVCache

Make = Callable[[int], KVCache]
MOST_TOKENS = 256
PAGE = 4096
PLAIN = KVGeometry("plain", (LayerShape(2, 16), LayerShape(2, 16)), 4, "float32")
# 40 bytes per token and tensor, 102.4 tokens per page: one token in five pages straddles two.
STRADDLING = KVGeometry("straddling", (LayerShape(1, 10), LayerShape(1, 10)), 2, "float32")
UNEQUAL = KVGeometry("unequal", (LayerShape(4, 8), LayerShape(1, 24)), 4, "float32")
WINDOWED = KVGeometry("windowed", (LayerShape(2, 16, window=20), LayerShape(2, 16)), 4, "float32")


def contiguous(policy: str, layout: str, geometry: KVGeometry = PLAIN) -> Make:
    return lambda tokens: ContiguousKVCache(
        geometry, tokens * geometry.bytes_per_token, policy=policy, layout=layout
    )


def paged(size: int, layout: str, geometry: KVGeometry = PLAIN) -> Make:
    return lambda tokens: PagedKVCache(
        geometry, tokens * geometry.bytes_per_token, size, layout=layout
    )


def vmm(layout: str, geometry: KVGeometry = PLAIN) -> Make:
    """At least so many tokens: whole pages in every buffer."""

    def make(tokens: int) -> KVCache:
        cache = VmmKVCache(geometry, 1 << 20, PAGE, layout=layout)
        with cache:
            pages = sum(
                len(group) * -(-tokens * group[0].token_bytes // PAGE) for group in cache.buffers
            )
        return VmmKVCache(geometry, pages * PAGE, PAGE, layout=layout)

    return make


CACHES: dict[str, tuple[Make, int]] = {
    # how to make one for so many tokens, tokens per page (rounded down)
    "contiguous max": (contiguous("max", "token-major"), 1),
    "contiguous max head-major": (contiguous("max", "head-major"), 1),
    "contiguous exact": (contiguous("exact", "token-major"), 1),
    "contiguous exact head-major": (contiguous("exact", "head-major"), 1),
    "contiguous exact windowed": (contiguous("exact", "head-major", WINDOWED), 1),
    "paged 1": (paged(1, "token-major"), 1),
    "paged 1 head-major": (paged(1, "head-major"), 1),
    "paged 4": (paged(4, "token-major"), 4),
    "paged 4 head-major": (paged(4, "head-major"), 4),
    "paged 16": (paged(16, "token-major"), 16),
    "paged 16 head-major": (paged(16, "head-major"), 16),
    "paged 4 straddling": (paged(4, "head-major", STRADDLING), 4),
    "paged 4 unequal": (paged(4, "token-major", UNEQUAL), 4),
    "paged 4 windowed": (paged(4, "head-major", WINDOWED), 4),
    "vmm": (vmm("token-major"), 32),
    "vmm head-major": (vmm("head-major"), 64),
    "vmm interleaved": (vmm("interleaved"), 8),
    "vmm straddling": (vmm("token-major", STRADDLING), 102),
    "vmm straddling head-major": (vmm("head-major", STRADDLING), 102),
    "vmm straddling interleaved": (vmm("interleaved", STRADDLING), 25),
    "vmm unequal": (vmm("token-major", UNEQUAL), 32),
    "vmm windowed": (vmm("token-major", WINDOWED), 32),
    "vmm windowed interleaved": (vmm("interleaved", WINDOWED), 16),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Inputs are tiny: on a busy machine threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def poison(cache: KVCache) -> None:
    """Write NaN wherever a sequence can be."""
    tokens = cache.capacity
    cache.admit("poison", tokens, max_new=0)
    for layer, shape in enumerate(cache.geometry.layers):
        nan = torch.full((tokens, shape.kv_heads, shape.head_dim), torch.nan)
        cache.write(layer, ["poison"], nan, nan, lens=[tokens])
    cache.release("poison")


class Checked:
    """The engine of a replay: writes, attends, and compares every output with the reference."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.num_outputs = 0
        self._values: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def values(self, request: int, layer: int) -> tuple[torch.Tensor, ...]:
        """K, V and Q of every position that the request may reach."""
        if (request, layer) not in self._values:
            shape = self.cache.geometry.layers[layer]
            random = torch.Generator().manual_seed(1000 * request + layer)
            self._values[request, layer] = tuple(
                torch.randn(MOST_TOKENS, heads, shape.head_dim, generator=random)
                for heads in (shape.kv_heads, shape.kv_heads, self.cache.geometry.q_heads)
            )
        return self._values[request, layer]

    def begin_step(self, arrivals: range) -> None:
        pass

    def prefill(self, placed: list[Placed]) -> None:
        if placed:
            self.check([p.request for p in placed], [p.tokens - p.cached for p in placed])

    def decode(self, requests: list[int]) -> None:
        self.check(list(requests), [1] * len(requests))

    def check(self, requests: list[int], counts: list[int]) -> None:
        error = self.largest_error(requests, counts)
        assert error <= 1e-5, f"off by {error}"

    def largest_error(self, requests: list[int], counts: list[int], extra_tokens: int = 0) -> float:
        """Write and attend; ``extra_tokens`` is what a faulty cache would show the kernel."""
        error = 0.0
        lens = None if counts == [1] * len(counts) else counts
        lengths = [self.cache.length(request) for request in requests]
        newest = [slice(n - new, n) for n, new in zip(lengths, counts, strict=True)]
        for layer, shape in enumerate(self.cache.geometry.layers):
            values = [self.values(request, layer) for request in requests]
            k, v, q = (
                torch.cat([own[role][part] for own, part in zip(values, newest, strict=True)])
                for role in range(3)
            )
            self.cache.write(layer, requests, k, v, lens=lens)
            view = self.cache.view(layer, requests)
            if extra_tokens:
                view = replace(view, lengths=view.lengths + extra_tokens)
            got = attend(q, view, q_lens=lens)
            starts = torch.arange(len(requests)) * MOST_TOKENS
            meant = DenseView(
                torch.cat([own[0] for own in values]),
                torch.cat([own[1] for own in values]),
                starts,
                torch.tensor(lengths, dtype=torch.int32),
            )
            expected = reference_attention(q, meant, q_lens=counts, window=shape.window)
            off = (got.double() - expected).abs().nan_to_num(nan=torch.inf)
            error = max(error, float(off.max()))
            self.num_outputs += len(got)
        return error


def run(make: Make, tokens: int, rows: list[tuple[int, int, int]], on_failure: OnFailure) -> int:
    """Replay (step, prompt, output) rows; returns how many outputs were compared."""
    trace = Trace.from_rows("test", "step", [(*row, row[2]) for row in rows])
    with make(tokens) as cache:
        poison(cache)
        engine = Checked(cache)
        result = replay(trace, cache, on_failure=on_failure, engine=engine)
        cache.check_invariants()
        assert result.counts.completed or on_failure == "drop"
        return engine.num_outputs


rows = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 60), st.integers(0, 20)), min_size=1, max_size=6
).map(lambda drawn: sorted(drawn, key=lambda row: row[0]))


@pytest.mark.parametrize("name", CACHES)
@settings(deadline=None, max_examples=6)
@given(rows=rows, tokens=st.integers(81, 200), on_failure=st.sampled_from(["recompute", "drop"]))
def test_any_trace_attends_like_the_reference(
    name: str, rows: list[tuple[int, int, int]], tokens: int, on_failure: OnFailure
) -> None:
    """Cases 17 and 22: a wrong slot, or a stale one behind the end, would show."""
    assert run(CACHES[name][0], tokens, rows, on_failure) > 0


@pytest.mark.parametrize("name", CACHES)
def test_page_boundaries(name: str) -> None:
    """Case 23: 1, B − 1, B, B + 1, 2B tokens and four more, side by side."""
    make, size = CACHES[name]
    lengths = sorted({1, max(size - 1, 1), size, size + 1, 2 * size, 2 * size + 1})
    outputs = run(make, MOST_TOKENS * len(lengths), [(0, n, 5) for n in lengths], "recompute")
    assert outputs >= 2 * (sum(lengths) + 4 * len(lengths))


@pytest.mark.parametrize("name", sorted(CACHES.keys() - {"paged 1", "paged 1 head-major"}))
def test_one_token_too_many_would_be_noticed(name: str) -> None:
    """The slot behind the end is poisoned and in memory: the comparison above can fail."""
    with CACHES[name][0](200) as cache:
        poison(cache)
        engine = Checked(cache)
        cache.admit(0, 9, max_new=9)  # no multiple of a page
        engine.check([0], [9])
        assert next_slot(cache.view(0, [0])).isnan().all()
        assert engine.largest_error([0], [1]) <= 1e-5
        assert engine.largest_error([0], [1], extra_tokens=1) == torch.inf


WINDOWED_CACHES = {
    "contiguous": contiguous("exact", "token-major", WINDOWED),
    "paged 1": paged(1, "token-major", WINDOWED),
    "paged 16": paged(16, "token-major", WINDOWED),
    "vmm": vmm("token-major", WINDOWED),
}


@pytest.mark.parametrize("name", WINDOWED_CACHES)
def test_a_view_tells_the_window_of_its_layer(name: str) -> None:
    """Backends let go of different tokens, and show the same output all the same."""
    random = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1000, heads, 16, generator=random) for heads in (2, 2, 4))
    with WINDOWED_CACHES[name](1000) as cache:
        cache.admit("a", 0, max_new=1001)
        for end in range(100, 1001, 100):
            assert not cache.grow(["a"], 100)
            for layer in range(2):
                tokens = slice(end - 100, end)
                cache.write(layer, ["a"], k[tokens], v[tokens], lens=[100])
        for layer, window in enumerate((20, None)):
            view = cache.view(layer, ["a"])
            assert view.window == window
            for given, seen in ((None, window or 1000), (5, 5)):  # a number goes before the view's
                lengths = torch.tensor([seen], dtype=torch.int32)
                meant = DenseView(k, v, torch.tensor([1000 - seen]), lengths)
                expected = reference_attention(q[:1], meant)
                got = attend(q[:1], view, window=given).double()
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
                told = reference_attention(q[:1], view, window=given)
                torch.testing.assert_close(told, expected)
            del view  # it would keep a mapped cache from closing


def next_slot(view: DenseView | PagedView) -> torch.Tensor:
    """A copy of K in the slot behind the last token of the only sequence."""
    length = int(view.lengths[0])
    if isinstance(view, DenseView):
        return view.k[int(view.starts[0]) + length].clone()
    size = view.k.shape[1]
    return view.k[int(view.block_table[0, length // size]), length % size].clone()
