"""What ``write`` may reach: tokens that the layer still stores and that nobody else may read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import KVCache
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.paged import PagedKVCache
from kvalloc.pages.exchange import exchange
from kvalloc.pages.moves import PageMoves
from kvalloc.tests.state_machine_contents import stored
from kvalloc.vmm import VmmKVCache

PLAIN = KVGeometry.uniform("plain", layers=2, q_heads=2, kv_heads=2, head_dim=64, dtype="float32")
# 3 × 256 float32: tokens straddle the pages of 4,096 bytes.
STRADDLING = KVGeometry("odd", (LayerShape(3, 256),), 3, "float32")
SHAPE = PLAIN.layers[0]
MIXED = KVGeometry("mixed", (SHAPE, LayerShape(2, 64, window=8)), 2, "float32")

CACHES: dict[str, Callable[[KVGeometry], KVCache]] = {
    "contiguous": lambda shape: ContiguousKVCache(shape, 1 << 20, policy="limit", limit=80),
    "paged:1": lambda shape: PagedKVCache(shape, 1 << 20, 1),
    "paged:8": lambda shape: PagedKVCache(shape, 1 << 20, 8),
    "paged:16": lambda shape: PagedKVCache(shape, 1 << 20, 16),
    "vmm": lambda shape: VmmKVCache(shape, 1 << 20, 4096),
    "vmm interleaved": lambda shape: VmmKVCache(shape, 1 << 20, 4096, layout="interleaved"),
}
every_cache = pytest.mark.parametrize("name", CACHES)
pages = pytest.mark.parametrize("name", [name for name in CACHES if name != "contiguous"])


def write(cache: KVCache, seq: str, numbers: list[int], layer: int | None = None) -> None:
    """Store the newest tokens of a sequence: each is a number, in one layer or in all."""
    for i, shape in enumerate(cache.geometry.layers):
        if layer in (None, i):
            dtype = getattr(torch, cache.geometry.dtype)
            k = torch.tensor(numbers, dtype=dtype)[:, None, None]
            k = k.expand(-1, shape.kv_heads, shape.head_dim)
            cache.write(i, [seq], k, k, lens=[len(numbers)])


def read(cache: KVCache, seq: str, layer: int = 0) -> list[int]:
    """The numbers that a layer still stores."""
    _, k, _ = stored(cache.view(layer, [seq]), 0)
    return [int(number) for number in k[:, 0, 0].tolist()]


@every_cache
def test_the_newest_tokens_before_a_fork_are_written_before_it(name: str) -> None:
    """A page that grow took and nobody has written is shared as well: both would write there."""
    with CACHES[name](PLAIN) as cache:
        cache.admit("parent", 15)
        write(cache, "parent", list(range(15)))
        cache.grow(["parent"])
        cache.fork("parent", "child")
        for seq in ("parent", "child"):
            with pytest.raises(ValueError, match=r"the first 16 of its 16 .* before forking"):
                write(cache, seq, [99])
        for seq, number in (("parent", 100), ("child", 200)):  # the remedy that the error names
            cache.truncate(seq, 15)
            assert not cache.grow([seq])
            write(cache, seq, [number])
        assert read(cache, "parent") == [*range(15), 100]
        assert read(cache, "child") == [*range(15), 200]
        cache.check_invariants()


@every_cache
@pytest.mark.parametrize("geometry", [PLAIN, STRADDLING], ids=lambda shape: shape.name)
def test_neither_side_of_a_fork_rewrites_what_was_there(name: str, geometry: KVGeometry) -> None:
    """The same on every backend and at any page size, also where the tail was copied."""
    with CACHES[name](geometry) as cache:
        cache.admit("parent", 37)
        write(cache, "parent", list(range(37)))
        cache.fork("parent", "child")
        own = {"parent": [60, 61, 62], "child": [70, 71, 72]}
        for seq, numbers in own.items():
            assert not cache.grow([seq], 3)
            write(cache, seq, [9, 9, 9])
            for reach in (4, 10, 40):
                with pytest.raises(ValueError, match="the first 37 of its 40 were there at a fork"):
                    write(cache, seq, [99] * reach)
            write(cache, seq, numbers)  # all that is its own, as often as one likes
        for seq, numbers in own.items():
            assert read(cache, seq) == [*range(37), *numbers]


@every_cache
def test_what_was_sealed_stays_so_until_it_is_cut_away(name: str) -> None:
    with CACHES[name](PLAIN) as cache:
        cache.admit("a", 20)
        write(cache, "a", list(range(20)))
        cache.fork("a", "b")
        cache.release("b")  # nobody else reads it now; the rule does not ask
        cache.offload("a")
        cache.restore("a")
        with pytest.raises(ValueError, match="the first 20 of its 20"):
            write(cache, "a", [99])
        cache.truncate("a", 18)
        assert not cache.grow(["a"], 4)
        with pytest.raises(ValueError, match="the first 18 of its 22"):
            write(cache, "a", [99] * 5)
        write(cache, "a", [30, 31, 32, 33])
        cache.fork("a", "c")
        with pytest.raises(ValueError, match="the first 22 of its 22"):
            write(cache, "c", [99])
        cache.check_invariants()
        cache.release("a")
        cache.admit("d", 16)  # in the row that was free: nothing of it is sealed
        write(cache, "d", list(range(50, 66)))
        assert read(cache, "c") == [*range(18), 30, 31, 32, 33]


@every_cache
def test_a_batch_is_refused_whole_for_one_of_its_sequences(name: str) -> None:
    with CACHES[name](PLAIN) as cache:
        for seq in ("a", "b"):
            cache.admit(seq, 4)
            write(cache, seq, [1, 2, 3, 4])
        cache.fork("b", "c")
        cache.grow(["a", "b"])
        k = torch.full((3, 2, 64), 9.0)
        with pytest.raises(ValueError, match="2 tokens of sequence 'b'"):
            cache.write(0, ["a", "b"], k, k, lens=[1, 2])
        cache.write(0, ["a", "b"], k, k, lens=[2, 1])
        assert read(cache, "a")[:4] == [1, 2, 3, 9] and read(cache, "c") == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["paged:1", "paged:8", "paged:16", "vmm"])
def test_a_hit_is_never_written_by_who_hit_it(name: str) -> None:
    """Who brought the prefix writes it, also after somebody hit it; nobody else does."""
    runs = [(f"token {i}", 1) for i in range(32)]
    with CACHES[name](PLAIN) as cache:
        assert cache.admit("a", 35, prefix=runs) == 0
        hits = cache.admit("b", 35, prefix=runs)
        assert hits == 32
        write(cache, "a", list(range(35)))
        with pytest.raises(ValueError, match=r"the first 32 of its 35 .* what was not hit"):
            write(cache, "b", [99] * 35)
        write(cache, "b", [50, 51, 52])
        assert read(cache, "a") == list(range(35))
        assert read(cache, "b") == [*range(32), 50, 51, 52]


@pages
def test_beams_that_changed_places_rewrite_nothing(name: str) -> None:
    with CACHES[name](PLAIN) as cache:
        assert isinstance(cache, PageMoves)
        for seq, number in (("a", 1), ("b", 2), ("c", 3)):
            cache.admit(seq, 32)
            write(cache, seq, [number] * 32)
        exchange(cache, ["a", "b"], ["b", "b"])
        for seq in ("a", "b"):
            with pytest.raises(ValueError, match="the first 32 of its 32"):
                write(cache, seq, [99])
        write(cache, "c", [4] * 32)  # had no part in it
        cache.grow(["a", "b"])
        write(cache, "a", [5])
        write(cache, "b", [6])
        assert read(cache, "a") == [*[2] * 32, 5] and read(cache, "b") == [*[2] * 32, 6]
        cache.check_invariants()


@pages
@pytest.mark.parametrize("layer", [0, 1])
def test_a_write_does_not_reach_behind_a_window(name: str, layer: int) -> None:
    """Of pages that were let go another sequence may hold the memory, or nobody."""
    with CACHES[name](MIXED) as cache:
        cache.admit("a", 64)
        cache.grow(["a"])  # the pages before the window go, though nothing was written
        cache.admit("b", 32)
        write(cache, "b", [7] * 32)
        first = 65 - len(stored(cache.view(1, ["a"]), 0)[1])  # not read: nothing was written
        assert first > 32
        if layer == 0:  # sees all; the other layer's answer is not taken for it
            with pytest.raises(ValueError, match="sliding window"):
                write(cache, "a", [99] * 65, 1)
            write(cache, "a", list(range(65)), 0)
            assert read(cache, "a", 0) == list(range(65))
        write(cache, "a", list(range(first, 65)), 1)
        for reach in (65 - first + 1, 65):
            with pytest.raises(
                ValueError, match=rf"the first {first} of its 65 fell out .* before the next grow"
            ):
                write(cache, "a", [99] * reach, 1)
        assert read(cache, "a", 1) == list(range(first, 65))
        assert read(cache, "b", 0) == read(cache, "b", 1) == [7] * 32
