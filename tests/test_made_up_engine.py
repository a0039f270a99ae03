"""The check of a real run: what is expected, and that a wrong value does not pass."""

from __future__ import annotations

import math

import pytest
import torch

from kvalloc.contract import DenseView, KVCache
from kvalloc.experiments.made_up import KEEP_BYTES, Expected, Values, float64_attention
from kvalloc.experiments.made_up_engine import MadeUpEngine
from kvalloc.experiments.scheduling import Placed
from kvalloc.experiments.specs import parse_spec
from kvalloc.kernels.reference import reference_attention
from kvalloc.models import geometry
from kvalloc.telemetry import Clock


def test_a_wrong_page_shows_in_the_verification() -> None:
    """The check can fail: one stored value is changed behind the cache's back; so does NaN."""
    tiny = geometry("tiny")
    for wrong, most in ((5.0, 100.0), (math.nan, math.inf)):
        cache: KVCache = parse_spec("paged:4", slots=False).cache(tiny, 1 << 20, device="cpu")
        with cache:
            values = Values(tiny)
            engine = MadeUpEngine(cache, Clock(), values=values, expected=Expected(values))
            cache.admit(0, 9)
            engine.prefill([Placed(0, 9, 0)])
            assert engine.max_abs_error is not None and engine.max_abs_error < 1e-5
            cache.view(1, [0]).v[int(cache.view(1, [0]).block_table[0, 1]), 2] = wrong  # type: ignore[union-attr]
            cache.grow([0])
            engine.decode([0])
            assert 1e-3 < engine.max_abs_error < most


def test_expected_outputs_are_the_same_remembered_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of questions: grown token by token, asked again, with a gap, without room."""
    tiny = geometry("tiny")
    values = Values(tiny, prefix=[(), (("a", 150),)], seed=3)
    whole = Expected(values).outputs(1, 1, 0, 300)
    asked = [(0, 140), (140, 141), (141, 142), (0, 200), (3, 4), (250, 300), (200, 300), (0, 300)]
    for room in (KEEP_BYTES, 0):
        monkeypatch.setattr("kvalloc.experiments.made_up.KEEP_BYTES", room)
        expected = Expected(values)
        for begin, end in asked:
            torch.testing.assert_close(
                expected.outputs(1, 1, begin, end), whole[begin:end], rtol=0, atol=1e-12
            )
        # Asked from the middle on first, as a backend does that found the prefix cached.
        torch.testing.assert_close(
            expected.outputs(0, 1, 144, 150)[1:], expected.outputs(0, 1, 145, 150)
        )
    assert not torch.equal(whole, Expected(values).outputs(1, 0, 0, 300)), "requests differ"


@pytest.mark.parametrize("window", [None, 1, 7, 90])
@pytest.mark.parametrize(("num_queries", "length"), [(1, 1), (1, 40), (40, 40), (33, 70), (0, 9)])
def test_float64_in_blocks_is_the_reference(
    monkeypatch: pytest.MonkeyPatch, num_queries: int, length: int, window: int | None
) -> None:
    monkeypatch.setattr("kvalloc.experiments.made_up.BLOCK_BYTES", 8 * 2 * length * 5)
    random = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(n, heads, 8, generator=random).double()
        for n, heads in ((num_queries, 6), (length, 3), (length, 3))
    )
    view = DenseView(k, v, torch.tensor([0]), torch.tensor([length], dtype=torch.int32))
    expected = reference_attention(q, view, q_lens=[num_queries], window=window)
    torch.testing.assert_close(float64_attention(q, k, v, window), expected, rtol=0, atol=1e-12)


def test_a_tokens_time_includes_the_growth_of_its_own_step() -> None:
    """And nothing of the steps before: growth of other steps is told apart."""
    tiny, clock = geometry("tiny"), Clock()
    with parse_spec("paged:4", slots=False).cache(tiny, 1 << 20, device="cpu") as cache:
        engine = MadeUpEngine(cache, clock, values=Values(tiny))
        cache.admit(0, 3)
        engine.prefill([Placed(0, 3, 0)])
        for grown in (10**18, 10**15, 10**15):
            engine.begin_step(range(0))
            clock.add("grow", 0, grown)
            cache.grow([0])
            engine.decode([0])
    assert 10**18 <= clock.durations["step"][0]
    assert all(10**15 <= step < 2 * 10**15 for step in clock.durations["step"][1:])
