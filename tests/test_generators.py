"""Built-in and generated traces: the same seed, the same requests, of the shape they claim."""

from __future__ import annotations

import numpy as np
import pytest

from kvalloc.experiments.built_in_traces import BUILT_IN, CHAT_CAP, built_in
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.generators import KINDS, generate, lognormal
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.trace import Trace

NAMES = [*BUILT_IN, *KINDS]


def same(a: Trace, b: Trace) -> bool:
    columns = all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("arrival", "prompt", "output", "max_new")
    )
    return columns and a.prefix == b.prefix


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides(name: str) -> None:
    first, again, other = (read_trace(name, seed=seed) for seed in (5, 5, 6))
    assert same(first, again) and first.name == name
    assert same(first, other) == (name in ("article", "hole"))


def test_article_is_the_table_of_the_design() -> None:
    trace = read_trace("article")
    assert trace.steps(25).tolist() == [1, 3, 4, 8, 10, 11, 12, 15, 15]
    assert trace.prompt.tolist() == [38, 7, 10, 18, 23, 9, 15, 23, 1]
    assert trace.output.tolist() == [1, 10, 1, 1, 3, 40, 9, 2, 20]
    assert trace.max_new.tolist() == [30, 34, 9, 2, 6, 40, 22, 5, 24]


def test_hole_reserves_24_16_16_8_and_wants_20() -> None:
    trace = read_trace("hole")
    assert (trace.prompt + trace.max_new).tolist() == [24, 16, 16, 8, 20]
    assert trace.steps(25).tolist() == [0, 0, 0, 0, 2]
    assert trace.output.tolist() == [20, 2, 12, 4, 10]


@pytest.mark.parametrize("name", ["chat", "burst"])
def test_chat_sized_loads(name: str) -> None:
    """Small enough to replay with real attention in a minute; never over their own cap."""
    trace = read_trace(name)
    assert 48 <= len(trace) <= 64 and set(trace.max_new.tolist()) == {CHAT_CAP}
    assert trace.prompt.min() >= 20 and trace.prompt.max() <= 400
    assert trace.output.min() >= 10 and trace.output.max() <= 120 < CHAT_CAP


def test_bursts_lie_between_idle_seconds() -> None:
    gaps = np.diff(read_trace("burst").arrival)
    assert (gaps > 3).sum() == 3 and (gaps[gaps < 3] <= 0.1).all()


def test_canonical() -> None:
    trace = generate("canonical")
    assert len(trace) == 10_000 and not trace.arrival.any()
    assert (trace.prompt.min(), trace.prompt.max()) == (500, 1500)
    assert (trace.output.min(), trace.output.max()) == (100, 300)


@pytest.mark.parametrize(("kind", "prompt", "output"), [("sharegpt", 161, 338), ("alpaca", 19, 58)])
def test_means_of_the_paper(kind: str, prompt: int, output: int) -> None:
    trace = generate(kind, requests=50_000)
    assert trace.prompt.mean() == pytest.approx(prompt, rel=0.03)
    assert trace.output.mean() == pytest.approx(output, rel=0.03)
    assert (trace.prompt + trace.output).max() <= 2048


@pytest.mark.parametrize(("mean", "sigma"), [(10, 0.1), (60, 2.0), (95, 3.0)])
def test_lognormal_has_its_mean_after_clipping(mean: float, sigma: float) -> None:
    draw = lognormal(np.random.default_rng(0), 200_000, mean=mean, sigma=sigma, low=2, high=100)
    assert draw.mean() == pytest.approx(mean, rel=0.02)
    assert draw.min() >= 2 and draw.max() <= 100


def test_poisson_rate_and_that_it_leaves_lengths_alone() -> None:
    slow, fast, still = (generate("poisson", requests=4000, rate=rate) for rate in (2, 20, 0))
    assert slow.arrival[-1] == pytest.approx(2000, rel=0.06)
    assert fast.arrival[-1] == pytest.approx(200, rel=0.06)
    assert not still.arrival.any()
    assert np.array_equal(slow.prompt, fast.prompt) and np.array_equal(slow.output, still.output)


def test_bounds_of_uniform_lengths_are_inclusive() -> None:
    trace = generate("uniform", requests=500, prompt=(3, 4), output=(0, 1))
    assert set(trace.prompt.tolist()) == {3, 4} and set(trace.output.tolist()) == {0, 1}


def test_turns_share_the_conversation_so_far() -> None:
    """Each later turn starts with the earlier prompt and its answer; systems are shared."""
    trace = generate("shared-prefix", requests=300)
    assert trace.prefix is not None and len(trace) == 300
    before: dict[object, tuple[tuple[int | str, int], ...]] = {}
    later = 0
    for runs, prompt, output in zip(trace.prefix, trace.prompt, trace.output, strict=True):
        assert sum(tokens for _, tokens in runs) == prompt
        name = str(runs[1][0]).partition("u")[0]
        if len(runs) > 2:
            assert runs[:-1] == before[name]
            later += 1
        asked, _ = list(runs)[-1]
        before[name] = (*runs, (str(asked).replace("u", "a"), int(output)))
    assert later > 50 and len({runs[0] for runs in trace.prefix}) == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"kind": "nope"}, "choose from canonical"),
        ({"kind": "uniform", "requests": 0}, "--requests"),
        ({"kind": "uniform", "requests": 10**12}, "--requests"),
        ({"kind": "uniform", "seed": -1}, "--seed"),
        ({"kind": "uniform", "rate": -1.0}, "--rate"),
        ({"kind": "uniform", "rate": float("nan")}, "--rate"),
        ({"kind": "uniform", "rate": 1e-6, "requests": 200_000}, "give a larger rate"),
        ({"kind": "uniform", "prompt": (0, 5)}, "--prompt"),
        ({"kind": "uniform", "prompt": (6, 5)}, "--prompt"),
        ({"kind": "uniform", "output": (-1, 5)}, "--output"),
        ({"kind": "mixed", "output": (1, 5)}, "lengths of its own"),
    ],
)
def test_what_cannot_be_generated(arguments: dict[str, object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        generate(**arguments)  # type: ignore[arg-type]


def test_any_other_name_is_not_built_in() -> None:
    assert built_in("chat.csv") is None and built_in("") is None
