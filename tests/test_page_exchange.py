"""Sequences that take over each other's tokens: nothing but a changed page moves."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from kvalloc.contract import KVCache
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.paged import PagedKVCache
from kvalloc.pages.exchange import exchange
from kvalloc.pages.moves import PageMoves
from kvalloc.tests.state_machine_contents import stored
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.driver import DriverError

UNIFORM = KVGeometry.uniform("uniform", layers=2, q_heads=2, kv_heads=2, head_dim=16)
ODD = KVGeometry.uniform("odd", layers=2, q_heads=3, kv_heads=3, head_dim=20)  # tokens straddle
WINDOWED = KVGeometry("windowed", (LayerShape(2, 16, 40), LayerShape(2, 16)), 2, "bfloat16")
GEOMETRIES = {"uniform": UNIFORM, "odd": ODD, "windowed": WINDOWED}


def caches(geometry: KVGeometry) -> dict[str, KVCache]:
    return {
        "paged": PagedKVCache(geometry, 1 << 20, 16),
        "vmm-head": VmmKVCache(geometry, 4 << 20, 4096, layout="head-major"),
        "vmm-token": VmmKVCache(geometry, 4 << 20, 4096),
        "vmm-interleaved": VmmKVCache(geometry, 4 << 20, 4096, layout="interleaved"),
    }


def write(cache: KVCache, contents: dict[int, list[int]]) -> None:
    """One token per sequence, its content in every element."""
    for layer, shape in enumerate(cache.geometry.layers):
        values = torch.tensor([tokens[-1] + layer for tokens in contents.values()])
        k = values[:, None, None].expand(-1, shape.kv_heads, shape.head_dim).to(torch.bfloat16)
        cache.write(layer, list(contents), k, k + 1)


def require_stored(cache: KVCache, contents: dict[int, list[int]]) -> None:
    for layer in range(len(cache.geometry.layers)):
        view = cache.view(layer, list(contents))
        for i, tokens in enumerate(contents.values()):
            _, k, v = stored(view, i)
            wanted = torch.tensor(tokens[len(tokens) - len(k) :]) + layer
            assert torch.equal(k[:, 0, 0].long(), wanted)
            assert torch.equal(v[:, -1, -1].long(), wanted + 1)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("name", ["paged", "vmm-head", "vmm-token", "vmm-interleaved"])
def test_beams_change_places(name: str, geometry: str) -> None:
    """Case 28: after any exchange each row has its source's tokens, and writes only its own."""
    cache, draw = caches(GEOMETRIES[geometry])[name], random.Random(5)
    assert isinstance(cache, PageMoves)
    fresh = itertools.count(1)
    contents: dict[int, list[int]] = {seq: [] for seq in range(4)}
    for seq in contents:
        cache.admit(seq, 0)
    for _ in range(150):
        assert not cache.grow(list(contents))
        for tokens in contents.values():
            tokens.append(next(fresh) % 120)
        write(cache, contents)
        if draw.random() < 0.5:
            sources = [draw.randrange(4) for _ in contents]
            exchange(cache, list(contents), sources)
            contents = {seq: list(contents[source]) for seq, source in enumerate(sources)}
            cache.check_invariants()
    require_stored(cache, contents)
    for seq in contents:
        cache.release(seq)
    cache.check_invariants()
    assert cache.usage().free == cache.usage().capacity
    cache.close()


@pytest.mark.parametrize("name", ["paged", "vmm-head"])
def test_common_beginnings_are_stored_once(name: str) -> None:
    cache = caches(UNIFORM)[name]
    assert isinstance(cache, PageMoves)
    for seq in range(4):
        cache.admit(seq, 1000)
    alone = cache.usage()
    exchange(cache, [0, 1, 2, 3], [2, 2, 2, 2])
    shared = cache.usage()
    assert shared.reserved < alone.reserved / 2.5
    assert shared.live < alone.live / 2.5
    cache.close()


def test_only_what_differs_is_mapped_anew() -> None:
    """Beams of one ancestor exchange the pages since; the driver hears of no other."""
    cache = VmmKVCache(UNIFORM, 16 << 20, 4096, layout="head-major")
    cache.admit(0, 128 * 40)
    for seq in (1, 2, 3):
        cache.fork(0, seq)
    assert not cache.grow([0, 1, 2, 3], 129)  # one full page and a tail each, in 8 columns
    calls = cache.physical.driver.num_calls  # type: ignore[attr-defined]
    before = dict(calls)
    exchange(cache, [0, 1, 2, 3], [1, 1, 2, 3])
    assert calls["map"] - before["map"] == 8
    exchange(cache, [0, 1, 2, 3], [0, 1, 2, 3])
    exchange(cache, [0], [1])
    assert calls["map"] - before["map"] == 8
    cache.check_invariants()
    cache.close()


def test_misuse_changes_nothing() -> None:
    cache = PagedKVCache(UNIFORM, 1 << 20, 16)
    for seq, tokens in enumerate((40, 40, 41)):
        cache.admit(seq, tokens)
    before = cache.usage()
    with pytest.raises(ValueError, match="different lengths"):
        exchange(cache, [0, 1], [1, 2])
    with pytest.raises(ValueError, match="twice"):
        exchange(cache, [0, 0], [1, 1])
    with pytest.raises(KeyError):
        exchange(cache, [0, 1], [1, 7])
    assert cache.usage() == before
    cache.check_invariants()


def test_a_failing_driver_leaves_everything_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = VmmKVCache(UNIFORM, 16 << 20, 4096, layout="head-major")
    contents = {seq: [20 * seq + 1] * 300 for seq in range(3)}
    for seq in contents:
        cache.admit(seq, 0)
    for n in range(300):
        cache.grow(list(contents))
        write(cache, {seq: tokens[: n + 1] for seq, tokens in contents.items()})
    before, whole = cache.usage(), cache.physical.driver.map
    countdown = itertools.count(11, -1)

    def fail_late(address: int, num_bytes: int, handle: int) -> None:
        if next(countdown) == 0:
            raise DriverError("map: no more mappings")
        whole(address, num_bytes, handle)

    monkeypatch.setattr(cache.physical.driver, "map", fail_late)
    with pytest.raises(DriverError):
        exchange(cache, [0, 1, 2], [1, 2, 0])
    assert cache.usage() == before
    cache.check_invariants()
    require_stored(cache, contents)
    exchange(cache, [0, 1, 2], [1, 2, 0])
    require_stored(cache, {0: contents[1], 1: contents[2], 2: contents[0]})
    cache.close()
