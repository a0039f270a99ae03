"""A random walk beside kernels that are still queued: no page may go, or change, under them.

With zeros behind every sequence they load whole tiles, and must meet zeros and nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvalloc.contract import DenseView
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.tests import state_machine_backends
from kvalloc.tests.state_machine import Walk
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.driver import Driver, Guard
from kvalloc.vmm.guard import GUARD_TOKENS

PAGE = 4096
TILES = (128, 176, 224, GUARD_TOKENS)
# 16 bytes per token: a page takes 256 of them, so a tile reaches one page.
SMALL = KVGeometry("small", (LayerShape(1, 4),) * 2, 1, "float32", max_context=2000)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one page behind": ("SMALL", 40, {"scrub": True}),
    "token-major": ("PLAIN", 60, {}),
    "scrubbed": ("PLAIN", 60, {"adoption": "fit-prompt", "scrub": True}),
    "head-major": ("PLAIN", 90, {"layout": "head-major", "scrub": True}),
    "interleaved": ("PLAIN", 40, {"layout": "interleaved"}),
    "straddling": ("STRADDLING", 60, {"scrub": True}),
    "windowed": ("WINDOWED", 60, {"scrub": True}),
}

Launch = Callable[[int, int], None]
"""Queue a kernel that reads some addresses."""


def walk(
    layout: str,
    driver: Driver,
    launch: Launch = lambda address, num_bytes: None,
    guard: Guard = "zero",
    num_steps: int = 160,
) -> int:
    """Play a walk; after each step every sequence is read as a tiled kernel would.

    Without zeros behind it, it is read to its end alone.

    Returns
    -------
    int
        Tiles that reached past what their sequence has mapped.
    """
    name, num_pages, options = LAYOUTS[layout]
    geometry = SMALL if name == "SMALL" else getattr(state_machine_backends, name)
    num_past = 0
    with VmmKVCache(
        geometry, num_pages * PAGE, PAGE, driver=driver, guard=guard, max_rows=12, **options
    ) as cache:
        played = Walk(cache, 2, max_prompt=600 if name == "SMALL" else 90)
        for step in range(num_steps):
            played.step()
            tile = TILES[step % len(TILES)] if guard == "zero" else 1
            seqs = sorted(played.tokens)
            for layer in range(len(geometry.layers)):
                view = cache.view(layer, seqs)
                for i in range(len(seqs)):
                    num_past += read_tiles(view, i, tile, launch, is_clean=cache.scrub)
                del view
        for verb in ("admit", "grow", "fork", "offload", "restore", "release"):
            assert played.done[verb], verb
        for seq in [*played.tokens, *played.away]:
            cache.release(seq)
        cache.check_invariants()
    return num_past


def read_tiles(view: DenseView, i: int, tile: int, launch: Launch, *, is_clean: bool) -> int:
    """Read K and V of a sequence in whole tiles; 1 if zeros were met where nothing is mapped."""
    start, length = int(view.starts[i]), int(view.lengths[i])
    stop = start + -(-length // tile) * tile
    found = 0
    for tensor in (view.k, view.v):
        assert stop <= len(tensor), "a tile leaves the buffer"
        read = tensor[start:stop]
        for head in read.unbind(1) if length else ():
            last = head[-1]
            launch(head.data_ptr(), last.data_ptr() - head.data_ptr() + last.nbytes)
        remains = read[length:].isnan().any()
        assert not (is_clean and remains), "remains behind a sequence"
        mapped = -(-(length * tensor.stride(0) * tensor.itemsize) // PAGE) * PAGE
        found |= stop - start > mapped // (tensor.stride(0) * tensor.itemsize) + 1
    return int(found)
