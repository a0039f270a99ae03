"""What several stages of gpu-check work on: a small mapped cache, its tokens, and bare pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...geometry import KVGeometry, LayerShape
from ...vmm.driver import Driver
from .stage import require

if TYPE_CHECKING:
    import torch

    from ...vmm.cache import VmmKVCache


def make_cache(driver: Driver, *, window: int | None = None, **options: Any) -> VmmKVCache:
    """A cache of two layers, 8 heads × 128 in bfloat16, with 12 pages for each buffer.

    A token takes 2 KiB per tensor: 1,024 of them in a page of 2 MiB.
    """
    from ...vmm.cache import VmmKVCache

    layers = (LayerShape(8, 128, window), LayerShape(8, 128))
    size = driver.granularity
    geometry = KVGeometry("check", layers, 32, "bfloat16", max_context=8 * size // 2048)
    return VmmKVCache(geometry, 48 * size, size, driver=driver, max_rows=16, **options)


def contents(cache: VmmKVCache, layer: int, numbers: Sequence[int]) -> torch.Tensor:
    """K of tokens by their numbers, ``[n, H_kv, D]``; exact in bfloat16. V is K + 1."""
    import torch

    shape = cache.geometry.layers[layer]
    n = torch.tensor(numbers, dtype=torch.int64, device=cache.device)
    k = torch.zeros(len(numbers), shape.kv_heads, shape.head_dim, device=cache.device)
    k[..., 0], k[..., 1], k[..., 2] = (n % 100)[:, None], (n // 100 % 100)[:, None], float(layer)
    return k.to(getattr(torch, cache.geometry.dtype))


def write(cache: VmmKVCache, seq: str, numbers: Sequence[int]) -> None:
    """Store the newest tokens of a sequence in every layer."""
    for layer in range(len(cache.geometry.layers)):
        k = contents(cache, layer, numbers)
        cache.write(layer, [seq], k, k + 1, lens=[len(numbers)])


def holds(cache: VmmKVCache, seq: str, numbers: Sequence[int]) -> None:
    """Check that a sequence reads as its tokens, from the first that a window left."""
    import torch

    for layer in range(len(cache.geometry.layers)):
        view = cache.view(layer, [seq])
        start, length = int(view.starts[0]), int(view.lengths[0])
        expected = contents(cache, layer, numbers[len(numbers) - length :])
        for name, tensor, wanted in (("K", view.k, expected), ("V", view.v, expected + 1)):
            found = tensor[start : start + length]
            require(
                torch.equal(found, wanted), f"{name} of layer {layer}, sequence {seq!r}, differs"
            )


def mapped(driver: Driver, num_pages: int) -> tuple[int, list[int]]:
    """An address, and the pages mapped there."""
    size = driver.granularity
    address = driver.reserve(num_pages * size)
    pages = [driver.create(size) for _ in range(num_pages)]
    for i, page in enumerate(pages):
        driver.map(address + i * size, size, page)
    driver.allow(address, num_pages * size)
    return address, pages


def give_back(driver: Driver, address: int, pages: list[int]) -> None:
    """Undo ``mapped``, once the device has finished with it."""
    size = len(pages) * driver.granularity
    driver.wait(driver.fence())
    driver.unmap(address, size)
    for page in set(pages):
        driver.release(page)
    driver.free(address, size)
