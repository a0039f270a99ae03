"""How many bytes a token costs, layer by layer, and the shapes of well-known models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of the dtypes that a cache can hold; torch's names."""


@dataclass(frozen=True)
class LayerShape:
    """One layer's share of a token.

    Attributes
    ----------
    kv_heads, head_dim : int
        A token stores ``kv_heads × head_dim`` elements per tensor.
    window : int | None
        Sliding attention window in tokens (the token itself included), or None.
    tensors : int
        2 for K and V; 1 for a latent that serves as both (MLA).
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    tensors: int = 2


@dataclass(frozen=True)
class KVGeometry:
    """Shape of the KV cache of one model (replica or shard).

    ``bytes_per_token = Σ_layers tensors · kv_heads · head_dim · itemsize``
    """

    name: str
    layers: tuple[LayerShape, ...]
    q_heads: int
    dtype: str
    max_context: int | None = None

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""
        return sum(self.layer_bytes(i) for i in range(len(self.layers)))

    def layer_bytes(self, layer: int) -> int:
        """Bytes that one token takes in one layer (K and V together)."""
        return self.layers[layer].tensors * self.tensor_bytes(layer)

    def tensor_bytes(self, layer: int) -> int:
        """Bytes that one token takes in one K *or* V tensor of one layer."""
        shape = self.layers[layer]
        return shape.kv_heads * shape.head_dim * self.itemsize

    def with_dtype(self, dtype: str) -> KVGeometry:
        """The same model with its cache stored in another dtype."""
        return replace(self, dtype=dtype)


SLOTS = KVGeometry("slots", (LayerShape(1, 1, tensors=1),), 1, "float8_e4m3fn")
"""No model at all: one token is one byte. What ``--slots N`` counts in."""
