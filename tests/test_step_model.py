"""The roofline: numbers by hand, limits, and the clock that it drives."""

from __future__ import annotations

import numpy as np
import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.simulated_time import simulate
from kvalloc.experiments.specs import parse_spec
from kvalloc.experiments.step_model import GPUS, MODELS, step_model
from kvalloc.experiments.trace import Trace
from kvalloc.models import geometry


def test_a_decode_step_is_the_time_to_read_weights_and_cache() -> None:
    model = step_model("llama-3-8b", "A100-80GB")
    live = 32 * 4096 * geometry("llama-3-8b").bytes_per_token
    expected = (8_030_261_248 * 2 + live) / (2.039e12 * 0.8) + 0.002
    assert model.step_s(32, live) == pytest.approx(expected)


def test_a_prefill_is_the_time_of_its_products() -> None:
    model = step_model("llama-3-8b", "A100-80GB")
    flops = 2 * 8_030_261_248 * 4096 + 2 * 32 * 32 * 128 * 4096**2
    assert model.step_s(0, 0, (4096,)) == pytest.approx(flops / (312e12 * 0.6) + 0.002)
    assert model.step_s(0, 0) == 0


def test_seventy_billion_on_eight_gpus() -> None:
    """Heads are divided while there are enough, then replicated; weights are always divided."""
    whole, on_8 = geometry("llama-3-70b"), step_model("llama-3-70b", "H100-SXM", tp=8)
    on_16 = step_model("llama-3-70b", "H100-SXM", tp=16)
    assert on_8.shard.bytes_per_token * 8 == whole.bytes_per_token
    assert on_16.shard.bytes_per_token == on_8.shard.bytes_per_token
    assert on_8.cache_bytes == int(80e9 * 0.9) - 70_553_706_496 * 2 // 8
    with pytest.raises(BadInput, match="weights do not fit on 1 GPUs"):
        _ = step_model("llama-3-70b", "H100-SXM").cache_bytes


@pytest.mark.parametrize("name", MODELS)
def test_parameters_belong_to_models_of_that_shape(name: str) -> None:
    """The attention matrices alone are a part of the parameters: a slip of a zero shows."""
    shape = geometry(name)
    layer, num_layers = shape.layers[0], len(shape.layers)
    hidden = shape.q_heads * layer.head_dim
    attention = num_layers * hidden * (2 * hidden + 2 * layer.kv_heads * layer.head_dim)
    assert 2.5 * attention < MODELS[name].num_active < 10 * attention
    assert MODELS[name].num_parameters >= MODELS[name].num_active


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "message"),
    [
        ("llama-3-8b", "A1000", 1, "unknown GPU"),
        ("llama-3-9b", "L4", 1, "unknown model"),
        ("gpt-2", "L4", 1, "parameters of GPT-2 are not known"),
        ("llama-3-8b", "L4", 3, "cannot be divided"),
    ],
)
def test_what_is_not_known_is_said(model: str, gpu: str, tp: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        step_model(model, gpu, tp)


def test_the_newest_gpu_is_the_fastest() -> None:
    live = 2**33
    times = [step_model("llama-3-8b", gpu).step_s(64, live) for gpu in GPUS]
    assert times[0] > times[1] > times[2] and times[3] == max(times)


def trace(rows: list[tuple[float, int, int]]) -> Trace:
    return Trace.from_rows("few", "s", [(a, p, o, o) for a, p, o in rows])


def test_the_clock_by_hand() -> None:
    """Two requests: the second arrives within the first step and takes part in the next."""
    model = step_model("llama-3-8b", "A100-80GB")
    size = model.shard.bytes_per_token
    allocator = parse_spec("paged:1", slots=False).allocator(model.shard, 1000 * size)
    timed = simulate(trace([(0.0, 100, 2), (0.001, 50, 1)]), allocator, model, 25e9)
    one = model.step_s(1, 101 * size, (100,))
    # The second ends within its step: what it stored is gone when the step is read.
    two = model.step_s(2, 0, (50,))
    assert timed.first.tolist() == pytest.approx([one, one + two])
    assert timed.finish.tolist() == pytest.approx([one + two, one + two])
    assert timed.tpot_s().tolist() == pytest.approx([two, 0])
    assert timed.end == pytest.approx(one + two)


@pytest.mark.parametrize("on_failure", ["recompute", "swap"])
def test_all_finish_and_tokens_come_in_order(on_failure: str) -> None:
    model = step_model("llama-3-8b", "A100-80GB")
    rng = np.random.default_rng(1)
    rows = [(i * 0.01, int(rng.integers(1, 60)), int(rng.integers(1, 60))) for i in range(80)]
    memory = 200 * model.shard.bytes_per_token
    allocator = parse_spec("paged:4", slots=False).allocator(model.shard, memory)
    timed = simulate(trace(rows), allocator, model, 25e9, on_failure=on_failure)  # type: ignore[arg-type]
    assert timed.counts.preemptions > 0 and timed.counts.completed == 80
    assert (timed.arrival < timed.first).all() and (timed.first <= timed.finish).all()
    assert timed.end == pytest.approx(timed.finish.max())


def test_what_is_turned_away_or_dropped_never_finishes() -> None:
    model = step_model("llama-3-8b", "A100-80GB")
    memory = 100 * model.shard.bytes_per_token
    allocator = parse_spec("paged:1", slots=False).allocator(model.shard, memory)
    # The second finds no place. The others fill the memory; the one that asks first is dropped.
    rows = [(0.0, 60, 1), (0.0, 60, 1), (9.0, 49, 9), (9.0, 49, 9)]
    timed = simulate(
        trace(rows), allocator, model, 25e9, on_full="reject", on_failure="drop"
    )  # fmt: skip
    assert np.isfinite(timed.finish).tolist() == [True, False, False, True]
    assert timed.counts.rejected == 1 and timed.counts.growth_failures == 1
