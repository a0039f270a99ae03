"""What the contiguous cache stores is what its views show, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contiguous import ContiguousAllocator, ContiguousKVCache
from kvalloc.contiguous.cache import SLICE_TOKENS
from kvalloc.contract import KVCache, OutOfMemory
from kvalloc.geometry import SLOTS, KVGeometry, LayerShape
from kvalloc.kernels.reference import stored_tokens
from kvalloc.tensors import LAYOUTS, default_layout

# Layers of unequal shape; the batch below is written to both.
GEOMETRY = KVGeometry("uneven", (LayerShape(2, 4), LayerShape(3, 8)), 6, "float32", 200)


def new_cache(slots: int = 64, geometry: KVGeometry = GEOMETRY, **options: Any) -> Any:
    """A cache whose memory is NaN all over."""
    cache = ContiguousKVCache(geometry, slots * geometry.bytes_per_token, **options)
    for layer in range(len(geometry.layers)):
        view = cache.view(layer, [])
        view.k.fill_(torch.nan)
        view.v.fill_(torch.nan)
    return cache


def random_tokens(
    geometry: KVGeometry, layer: int, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = geometry.layers[layer]
    size = (num_tokens, shape.kv_heads, shape.head_dim)
    dtype = getattr(torch, geometry.dtype)
    return torch.randn(size).to(dtype), torch.randn(size).to(dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_a_prompt_and_its_tokens_come_back(layout: str, dtype: str) -> None:
    geometry = GEOMETRY.with_dtype(dtype)
    prompts = {"a": 3, "b": SLICE_TOKENS + 1, "c": 0, "d": 4 * SLICE_TOKENS}
    cache = new_cache(128, geometry=geometry, layout=layout, policy="exact")
    for seq, length in prompts.items():
        cache.admit(seq, length)
    # Few tokens go by index, many by slices; whole prompts and their ends.
    for lens in ([3, 0, 0, 5], list(prompts.values()), [1, 2, 0, 4 * SLICE_TOKENS - 1]):
        for layer in range(2):
            k, v = random_tokens(geometry, layer, sum(lens))
            cache.write(layer, list(prompts), k, v, lens=lens)
            view = cache.view(layer, list(prompts))
            at = 0
            for i, num in enumerate(lens):
                stored_k, stored_v = stored_tokens(view, i)
                newest = slice(len(stored_k) - num, None)
                assert torch.equal(stored_k[newest].float(), k[at : at + num].float())
                assert torch.equal(stored_v[newest].float(), v[at : at + num].float())
                at += num
            kept = int(view.k.float().isnan().all(-1).all(-1).sum())
            assert kept == 128 - (8 if lens[1] == 0 else sum(prompts.values()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_show_the_layout_and_copy_nothing(layout: str) -> None:
    cache = new_cache(layout=layout)
    cache.admit("a", 3, max_new=2)
    cache.admit("b", 4, max_new=0)
    view = cache.view(1, ["b", "a"])
    assert view.k.shape == view.v.shape == (64, 3, 8)
    assert view.k.stride() == ((24, 8, 1) if layout == "token-major" else (8, 64 * 8, 1))
    assert view.starts.tolist() == [5, 0] and view.starts.dtype == torch.int64
    assert view.lengths.tolist() == [4, 3] and view.lengths.dtype == torch.int32
    again = cache.view(1, ["a", "b"])
    assert again.k.data_ptr() == view.k.data_ptr() != view.v.data_ptr()
    assert cache.view(0, []).k.data_ptr() != view.k.data_ptr()
    total = sum(t.numel() * t.element_size() for i in (0, 1) for t in arenas(cache, i))
    assert total == cache.usage().capacity, "the memory is used whole, and no more"


def arenas(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    view = cache.view(layer, [])
    return view.k, view.v


def test_the_default_layout_goes_by_the_device() -> None:
    assert new_cache().layout == "head-major"
    assert default_layout("cuda", None) == "token-major"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "decode", "release"]), st.integers(0, 5), st.integers(0, 9)
    ),
    max_size=25,
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("policy", ["max", "exact"])
@settings(deadline=None, max_examples=40)
@given(steps=STEPS)
def test_every_sequence_keeps_its_own_tokens(
    policy: str, layout: str, steps: list[tuple[str, int, int]]
) -> None:
    """Case 17: no two sequences alias a slot. Slots that nobody wrote stay NaN."""
    cache = new_cache(24, policy=policy, layout=layout)
    written: dict[int, list[float]] = {}
    stamp = 0.0
    for verb, seq, number in steps:
        try:
            if verb == "admit" and seq not in written:
                cache.admit(seq, number, max_new=3)
                written[seq], new = [], {seq: number}
            elif verb == "release" and seq in written:
                cache.release(seq)
                del written[seq]
                continue
            else:
                refused = cache.grow(list(written))
                new = {name: 1 for name in written if name not in refused}
        except OutOfMemory:
            continue
        num_tokens = sum(new.values())
        values = [stamp + i for i in range(num_tokens)]
        stamp += num_tokens
        for layer in range(2):
            k, v = random_tokens(GEOMETRY, layer, num_tokens)
            k[:] = torch.tensor(values)[:, None, None]
            v[:] = -k
            cache.write(layer, list(new), k, v, lens=list(new.values()))
        for name, num in new.items():
            written[name] += values[:num]
            values = values[num:]
        for layer in range(2):
            view = cache.view(layer, list(written))
            for i, name in enumerate(written):
                k, v = stored_tokens(view, i)
                wanted = torch.tensor(written[name])[:, None, None].expand_as(k)
                assert torch.equal(k, wanted) and torch.equal(v, -wanted)
            used = int((~view.k.isnan()).all(-1).all(-1).sum())
            assert used <= stamp
        cache.check_invariants()


def test_a_write_touches_nothing_else() -> None:
    cache = new_cache(20, policy="exact")
    for seq in "abc":
        cache.admit(seq, 5)
    k, v = random_tokens(GEOMETRY, 1, 2)
    cache.write(1, ["c", "a"], k, v)
    view = cache.view(1, [])
    for arena, given_ in ((view.k, k), (view.v, v)):
        assert torch.equal(arena[[14, 4]], given_)
        assert int(arena.isnan().all(-1).all(-1).sum()) == 18
    assert all(arena.isnan().all() for arena in arenas(cache, 0))


def test_answers_are_not_remembered_beyond_a_change() -> None:
    cache = new_cache(policy="exact")
    cache.admit("a", 2)
    cache.admit("b", 2)
    assert cache.view(0, ["b"]).lengths.tolist() == [2]
    cache.grow(["b"])
    assert cache.view(0, ["b"]).lengths.tolist() == [3]
    batch = ["b"]
    k, v = random_tokens(GEOMETRY, 0, 1)
    cache.write(0, batch, k, v)
    batch[0] = "a"  # the same list, another sequence
    cache.write(0, batch, k, v)
    assert cache.view(0, batch).starts.tolist() == [0]
    assert torch.equal(stored_tokens(cache.view(0, batch), 0)[0][-1], k[0])
    cache.release("a")
    with pytest.raises(KeyError):
        cache.view(0, batch)
    with pytest.raises(KeyError):
        cache.write(0, batch, k, v)


def test_gradients_do_not_reach_the_arena() -> None:
    cache = new_cache()
    cache.admit("a", 1, max_new=0)
    k, v = random_tokens(GEOMETRY, 0, 1)
    cache.write(0, ["a"], k.requires_grad_(), v)
    assert not cache.view(0, ["a"]).k.requires_grad


def wrong_writes() -> dict[str, tuple[type[Exception], Callable[..., object]]]:
    """Each with a cache, two sequences of length 2 and good tensors for one token each."""
    return {
        "layer": (ValueError, lambda c, k, v: c.write(2, ["a", "b"], k, v)),
        "negative layer": (ValueError, lambda c, k, v: c.write(-1, ["a", "b"], k, v)),
        "fractional layer": (TypeError, lambda c, k, v: c.write(0.0, ["a", "b"], k, v)),
        "other layer's shape": (ValueError, lambda c, k, v: c.write(1, ["a", "b"], k, v)),
        "unknown": (KeyError, lambda c, k, v: c.write(0, ["a", "x"], k, v)),
        "twice": (ValueError, lambda c, k, v: c.write(0, ["a", "a"], k, v)),
        "too few tokens": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k[:1], v)),
        "too few values": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k, v[:1])),
        "k dtype": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k.half(), v)),
        "v dtype": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k, v.double())),
        "device": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k, v.to("meta"))),
        "no tensor": (TypeError, lambda c, k, v: c.write(0, ["a", "b"], k.numpy(), v)),
        "lens too long": (ValueError, lambda c, k, v: c.write(0, ["a"], k, v, lens=[3])),
        "lens negative": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k, v, lens=[3, -1])),
        "lens count": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k, v, lens=[2])),
        "lens kind": (TypeError, lambda c, k, v: c.write(0, ["a", "b"], k, v, lens=[1.5, 0.5])),
        "lens sum": (ValueError, lambda c, k, v: c.write(0, ["a", "b"], k, v, lens=[1, 2])),
        "empty sequence": (ValueError, lambda c, k, v: c.write(0, ["a", "empty"], k, v)),
    }


@pytest.mark.parametrize("name", wrong_writes())
def test_a_wrong_write_raises_before_anything_is_touched(name: str) -> None:
    """Case 14: checked first, intact on a miss."""
    error, write = wrong_writes()[name]
    cache = new_cache()
    for seq, length in (("a", 2), ("b", 2), ("empty", 0)):
        cache.admit(seq, length, max_new=4)
    k, v = random_tokens(GEOMETRY, 0, 2)
    with pytest.raises(error):
        write(cache, k, v)
    assert all(arena.isnan().all() for layer in (0, 1) for arena in arenas(cache, layer))
    cache.write(0, ["a", "b"], k, v)  # the right call still works
    assert torch.equal(cache.view(0, []).k[[1, 7]], k)


def test_a_closed_cache_refuses_everything_but_closing() -> None:
    with new_cache() as cache:
        cache.admit("a", 1, max_new=0)
    k, v = random_tokens(GEOMETRY, 0, 1)
    calls: list[Callable[[], object]] = [
        lambda: cache.admit("b", 1, max_new=1),
        lambda: cache.grow(["a"]),
        lambda: cache.release("a"),
        lambda: cache.fork("a", "b"),
        lambda: cache.truncate("a", 0),
        lambda: cache.offload("a"),
        lambda: cache.restore("a"),
        lambda: cache.length("a"),
        lambda: cache.spans("a"),
        lambda: cache.usage(),
        lambda: cache.check_invariants(),
        lambda: cache.write(0, ["a"], k, v),
        lambda: cache.view(0, ["a"]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="ContiguousKVCache is closed"):
            call()
    cache.close()


def test_it_is_an_allocator_with_tensors() -> None:
    cache = new_cache(80, placement="buddy", limit=64)
    assert isinstance(cache, ContiguousAllocator) and isinstance(cache, KVCache)
    assert (cache.capacity, cache.limit, cache.device) == (64, 64, torch.device("cpu"))


def test_what_cannot_be_stored_is_refused_at_the_door() -> None:
    with pytest.raises(ValueError, match="accounting only"):
        ContiguousKVCache(SLOTS, 80)
    with pytest.raises(ValueError, match="use one of token-major"):
        ContiguousKVCache(GEOMETRY, 10**4, layout="page-major")
    with pytest.raises(ValueError, match="smaller than one token"):
        ContiguousKVCache(GEOMETRY, 10)
    with pytest.raises(TypeError):
        ContiguousKVCache(GEOMETRY, cast(Any, 1e4))
