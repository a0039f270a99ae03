"""Random walks over every verb of the paged and mapped caches: contents and books never differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest

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


def vmm(geometry: KVGeometry, pages: int, **options: object) -> Callable[[], KVCache]:
    return lambda: VmmKVCache(geometry, pages * PAGE, PAGE, **options)  # type: ignore[arg-type]


def paged(geometry: KVGeometry, tokens: int, size: int, **options: object) -> Callable[[], KVCache]:
    num_bytes = tokens * geometry.bytes_per_token
    return lambda: PagedKVCache(geometry, num_bytes, size, **options)  # type: ignore[arg-type]


CACHES = {
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
    done, hits = 0, 0
    for name in ("paged 8", "vmm"):
        with CACHES[name]() as cache:
            walk = Walk(cache, 5, max_prompt=200)
            walk.run(150)
            done += walk.done["admit refused"] + walk.done["grow refused"]
            hits += walk.num_hits
    assert done and hits
