"""Random walks over every verb of the three caches: contents and books never differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import KVCache
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.paged import PagedKVCache
from kvalloc.tests.cache_walk import Walk
from kvalloc.vmm import VmmKVCache

PAGE = 4096
PLAIN = KVGeometry("plain", (LayerShape(2, 16),) * 2, 4, "float32", max_context=400)
# 40 bytes per token and tensor: no power of two, tokens straddle pages of 4,096.
STRADDLING = KVGeometry("straddling", (LayerShape(1, 10),) * 2, 1, "float32", max_context=700)
WINDOWED = KVGeometry(
    "windowed",
    (LayerShape(2, 16, window=24), LayerShape(2, 16), LayerShape(2, 16, window=24)),
    2,
    "float32",
    max_context=400,
)
UNEQUAL = KVGeometry(
    "unequal", (LayerShape(4, 8), LayerShape(1, 16, window=40)), 4, "float32", max_context=400
)


def vmm(geometry: KVGeometry, pages: int, **options: Any) -> Callable[[], KVCache]:
    return lambda: VmmKVCache(geometry, pages * PAGE, PAGE, **options)


def paged(geometry: KVGeometry, tokens: int, size: int, **options: Any) -> Callable[[], KVCache]:
    return lambda: PagedKVCache(geometry, tokens * geometry.bytes_per_token, size, **options)


def contiguous(geometry: KVGeometry, tokens: int, **options: Any) -> Callable[[], KVCache]:
    return lambda: ContiguousKVCache(geometry, tokens * geometry.bytes_per_token, **options)


CACHES = {
    "contiguous max": contiguous(PLAIN, 500),
    "contiguous max scrub": contiguous(UNEQUAL, 500, scrub=True, layout="token-major"),
    "contiguous pow2 best-fit": contiguous(PLAIN, 500, policy="pow2", placement="best-fit"),
    "contiguous exact": contiguous(PLAIN, 400, policy="exact"),
    "contiguous exact windowed": contiguous(WINDOWED, 400, policy="exact"),
    "contiguous max buddy": contiguous(UNEQUAL, 600, placement="buddy"),
    "contiguous exact buddy": contiguous(PLAIN, 500, policy="exact", placement="buddy"),
    "paged 1": paged(PLAIN, 300, 1),
    "paged 8": paged(PLAIN, 400, 8),
    "paged 16 token-major scrub": paged(PLAIN, 400, 16, layout="token-major", scrub=True),
    "paged 8 windowed": paged(WINDOWED, 400, 8),
    "paged 4 unequal": paged(UNEQUAL, 400, 4),
    "vmm": vmm(PLAIN, 60),
    "vmm fit-prompt": vmm(PLAIN, 60, adoption="fit-prompt"),
    "vmm scrub": vmm(PLAIN, 60, scrub=True),
    "vmm head-major": vmm(PLAIN, 90, layout="head-major"),
    "vmm interleaved": vmm(PLAIN, 40, layout="interleaved"),
    "vmm straddling": vmm(STRADDLING, 60),
    "vmm straddling interleaved": vmm(STRADDLING, 40, layout="interleaved"),
    "vmm windowed": vmm(WINDOWED, 60),
    "vmm windowed interleaved": vmm(WINDOWED, 60, layout="interleaved"),
    "vmm unequal": vmm(UNEQUAL, 60),
    "vmm unequal head-major": vmm(UNEQUAL, 90, layout="head-major"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of tiny copies: on a busy machine, threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CACHES)
def test_contents_and_books_agree_with_the_model(name: str, seed: int) -> None:
    with CACHES[name]() as cache:
        walk = Walk(cache, seed)
        walk.run(120)
        for verb in ("admit", "grow", "fork", "offload", "restore", "release"):
            assert walk.done[verb], f"the walk never came to {verb}"
        assert walk.done["truncate"] + walk.done["truncate beyond window"]


def test_walk_meets_refusals_and_prefix_hits() -> None:
    done: set[str] = set()
    for name in ("paged 8", "vmm", "contiguous exact"):
        with CACHES[name]() as cache:
            walk = Walk(cache, 5, max_prompt=150)
            walk.run(100)
            done = done.union(verb for verb in walk.done if "refused" in verb)
            assert (walk.num_hits > 0) == (not name.startswith("contiguous")), name
    assert done >= {f"{verb} refused" for verb in ("admit", "grow", "fork", "restore")}
