"""What a row consists of under each layout: one address run per buffer."""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import KVGeometry

LAYOUTS = ("token-major", "head-major", "interleaved")


@dataclass(frozen=True)
class Buffer:
    """One address run per row: K or V of a layer, one head of it, or several layers whole.

    Attributes
    ----------
    layers : tuple of int
        The layers stored, more than one only if interleaved.
    tensor, head : int
        0 for K, 1 for V, and the KV head; −1 where the buffer holds them all.
    token_bytes : int
        Distance between the tokens of a row.
    """

    layers: tuple[int, ...]
    tensor: int
    head: int
    token_bytes: int


def buffers_of(geometry: KVGeometry, layout: str) -> list[list[Buffer]]:
    """The buffers of a layout, grouped by pace and window: a group crosses pages together."""
    groups: dict[tuple[int, int | None], list[Buffer]] = {}

    def add(layers: tuple[int, ...], tensor: int, head: int, token_bytes: int) -> None:
        window = geometry.layers[layers[0]].window
        buffer = Buffer(layers, tensor, head, token_bytes)
        groups.setdefault((token_bytes, window), []).append(buffer)

    if layout == "interleaved":
        windows = [shape.window for shape in geometry.layers]
        for window in dict.fromkeys(windows):
            layers = tuple(i for i, other in enumerate(windows) if other == window)
            add(layers, -1, -1, sum(map(geometry.layer_bytes, layers)))
        return list(groups.values())
    for i, shape in enumerate(geometry.layers):
        for tensor in range(shape.tensors):
            if layout == "token-major":
                add((i,), tensor, -1, geometry.tensor_bytes(i))
            else:
                for head in range(shape.kv_heads):
                    add((i,), tensor, head, geometry.tensor_bytes(i) // shape.kv_heads)
    return list(groups.values())
