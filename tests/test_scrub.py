"""With ``scrub=True`` no verb leaves remains where no token is, whatever fails in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import KVCache
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.paged import PagedKVCache
from kvalloc.pages.exchange import exchange
from kvalloc.tests.remains import check_no_remains
from kvalloc.tests.state_machine import Walk
from kvalloc.tests.state_machine_backends import PLAIN, STRADDLING, UNEQUAL, WINDOWED
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.host import HostDriver
from kvalloc.vmm.physical import PhysicalPool

PAGE = 4096
ONE = KVGeometry("one", (LayerShape(1, 16),), 1, "float32", max_context=400)
PAGED: dict[str, dict[str, Any]] = {
    "head-major": {"geometry": PLAIN},
    "token-major, windowed": {"geometry": WINDOWED, "layout": "token-major"},
    "unequal": {"geometry": UNEQUAL, "page_size": 7},
}
MAPPED: dict[str, dict[str, Any]] = {
    "plain": {"geometry": PLAIN},
    "straddling": {"geometry": STRADDLING},
    "windowed, interleaved": {"geometry": WINDOWED, "layout": "interleaved"},
    "unequal, head-major": {"geometry": UNEQUAL, "layout": "head-major"},
    "zeros behind": {"geometry": PLAIN, "guard": "zero"},
    "mapping ahead": {"geometry": PLAIN, "ahead_tokens": 16, "ahead_pages": 2},
}


def walk_over(cache: PagedKVCache | VmmKVCache, num_steps: int = 80) -> None:
    with cache:
        walk = Walk(cache, 5)
        for _ in range(num_steps):
            walk.step()
            with cache.pool.lock:  # a mapping thread may be at work
                check_no_remains(cache)
        assert min(walk.done[verb] for verb in ("truncate", "fork", "restore", "release")) > 0


@pytest.mark.parametrize("name", PAGED)
def test_no_verb_of_a_paged_cache_leaves_remains(name: str) -> None:
    options = {"page_size": 8, **PAGED[name]}
    num_bytes = 400 * options["geometry"].bytes_per_token
    walk_over(PagedKVCache(memory_bytes=num_bytes, scrub=True, **options))


@pytest.mark.parametrize("name", MAPPED)
def test_no_verb_of_a_mapped_cache_leaves_remains(name: str) -> None:
    walk_over(VmmKVCache(memory_bytes=70 * PAGE, page_bytes=PAGE, scrub=True, **MAPPED[name]))


CACHES: dict[str, Callable[[], KVCache]] = {
    "contiguous": lambda: ContiguousKVCache(ONE, 100_000, scrub=True),
    "paged": lambda: PagedKVCache(ONE, 100_000, page_size=8, scrub=True),
    "vmm": lambda: VmmKVCache(ONE, 20 * PAGE, PAGE, scrub=True, guard="zero"),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_cut_token_is_gone_from_the_sequence_and_its_forks(name: str) -> None:
    """Rejected tokens may be NaN, which a kernel that loads whole tiles multiplies by 0."""
    with CACHES[name]() as cache:
        cache.admit("parent", 8, max_new=8)
        keys = torch.ones(8, 1, 16)
        keys[5:] = torch.nan
        cache.write(0, ["parent"], keys, keys, lens=[8])
        cache.truncate("parent", 5)
        cache.fork("parent", "child")
        cache.offload("parent")
        cache.restore("parent")
        cache.grow(["parent", "child"], 3)
        for seq in ("parent", "child"):
            assert tokens(cache, seq) == [1.0] * 5 + [0.0] * 3


@pytest.mark.parametrize("name", ["paged", "vmm"])
def test_beams_that_change_places_leave_no_remains(name: str) -> None:
    with CACHES[name]() as cache:
        assert isinstance(cache, PagedKVCache | VmmKVCache)
        for seq, value in (("a", 7.0), ("b", 8.0)):
            keys = torch.full((80, 1, 16), value)
            cache.admit(seq, 80)
            cache.write(0, [seq], keys, keys, lens=[80])
            cache.truncate(seq, 77)
        exchange(cache, ["a", "b"], ["b", "a"])
        check_no_remains(cache)
        cache.grow(["a", "b"], 3)
        assert tokens(cache, "a") == [8.0] * 77 + [0.0] * 3
        exchange(cache, ["b"], ["a"])
        check_no_remains(cache)
        cache.check_invariants()


@pytest.mark.parametrize("name", ["paged", "vmm"])
def test_a_copy_that_is_undone_leaves_no_remains(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CACHES[name]() as cache:
        assert isinstance(cache, PagedKVCache | VmmKVCache)
        cache.admit("parent", 64)
        keys = torch.full((64, 1, 16), 7.0)
        cache.write(0, ["parent"], keys, keys, lens=[64])
        cache.fork("parent", "child")
        write_back = cache._write_back

        def fail(*arguments: Any) -> None:
            write_back(*arguments)
            raise RuntimeError("device out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(cache, "_write_back", fail)
            with pytest.raises(RuntimeError):
                cache.truncate("child", 61)
        cache.check_invariants()
        check_no_remains(cache)
        assert tokens(cache, "child") == [7.0] * 64


def tokens(cache: KVCache, seq: str) -> list[float]:
    view: Any = cache.view(0, [seq])
    if isinstance(cache, PagedKVCache):
        return view.k[view.block_table[0].long()].flatten(0, 1)[: view.lengths[0], 0, 0].tolist()  # type: ignore[no-any-return]
    start = int(view.starts[0])
    return view.k[start : start + int(view.lengths[0]), 0, 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["freed before", "freed after", "warm"])
def test_pages_of_a_cache_that_does_not_scrub_come_without_remains(how: str) -> None:
    driver = HostDriver(PAGE)
    pool = PhysicalPool(driver, 16 * PAGE, PAGE)
    with VmmKVCache(ONE, pool=pool) as careless:
        careless.admit("a", 400)
        secret = torch.full((400, 1, 16), 7.0)
        careless.write(0, ["a"], secret, secret, lens=[400])
        if how == "freed before":
            careless.release("a")
            careless.give_back(16)
        with VmmKVCache(ONE, pool=pool, scrub=True) as careful:
            if how != "freed before":
                careless.release("a")
            if how == "freed after":
                careless.give_back(16)
            careful.admit("b", 400)
            assert tokens(careful, "b") == [0.0] * 400
            check_no_remains(careful)
    driver.close()
