"""How many bytes a token costs, layer by layer: the one formula that every backend counts with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes per element of the dtypes that a cache can hold; torch's names."""

DTYPE_ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Short names that people type, and the torch names that they stand for."""


def canonical_dtype(name: str) -> str:
    """Return torch's name of a cache dtype.

    >>> canonical_dtype("BF16"), canonical_dtype("torch.float16"), canonical_dtype("fp8")
    ('bfloat16', 'float16', 'float8_e4m3fn')

    Raises
    ------
    ValueError
        For a dtype that a cache cannot hold.
    """
    plain = str(name).strip().lower().removeprefix("torch.")
    plain = DTYPE_ALIASES.get(plain, plain)
    if plain not in ITEMSIZE:
        known = ", ".join([*ITEMSIZE, *DTYPE_ALIASES])
        raise ValueError(f"unknown cache dtype {name!r}; use one of {known}")
    return plain


@dataclass(frozen=True)
class LayerShape:
    """One layer's share of a token.

    Attributes
    ----------
    kv_heads, head_dim : int
        A token stores ``kv_heads × head_dim`` elements per tensor.
    window : int | None
        Sliding attention window in tokens (the token itself included), or None. The views of a
        cache carry it, and ``attend`` holds to it.
    tensors : int
        2 for K and V; 1 for a latent that serves as both (MLA).
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    tensors: int = 2

    def __post_init__(self) -> None:
        _require_positive("kv_heads", self.kv_heads)
        _require_positive("head_dim", self.head_dim)
        if self.window is not None:
            _require_positive("window", self.window)
        if self.tensors not in (1, 2):
            raise ValueError(
                f"tensors must be 2 (K and V) or 1 (a latent that serves as both), "
                f"got {self.tensors!r}"
            )


@dataclass(frozen=True)
class KVGeometry:
    """Shape of the KV cache of one model (replica or shard).

    ``bytes_per_token = Σ_layers tensors · kv_heads · head_dim · itemsize``

    Attributes
    ----------
    name : str
        Free text for tables and titles.
    layers : tuple[LayerShape, ...]
        One entry a layer; layers may differ.
    q_heads : int
        Query heads, a multiple of each layer's KV heads (GQA); they cost no cache bytes.
    dtype : str
        Of the cache, not of the weights. Short names are stored as torch's.
    max_context : int | None
        Most tokens of one sequence, or None for no limit.

    Raises
    ------
    TypeError, ValueError
        For a shape that no model can have; one sentence that names the field.
    """

    name: str
    layers: tuple[LayerShape, ...]
    q_heads: int
    dtype: str
    max_context: int | None = None

    def __post_init__(self) -> None:
        # A frozen dataclass can only normalise its fields by this door.
        object.__setattr__(self, "layers", _shapes(self.layers))
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        _require_positive("q_heads", self.q_heads)
        if self.max_context is not None:
            _require_positive("max_context", self.max_context)
        if not self.layers:
            raise ValueError(f"{self.name}: a geometry needs at least one layer")
        for layer, shape in enumerate(self.layers):
            if self.q_heads % shape.kv_heads:
                raise ValueError(
                    f"{self.name}: {self.q_heads} query heads cannot share "
                    f"{shape.kv_heads} KV heads evenly in layer {layer}"
                )

    @classmethod
    def uniform(
        cls,
        name: str,
        *,
        layers: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "bfloat16",
        max_context: int | None = None,
        window: int | None = None,
    ) -> KVGeometry:
        """Build a geometry whose layers are all alike.

        >>> KVGeometry.uniform(
        ...     "mine", layers=32, q_heads=32, kv_heads=8, head_dim=128
        ... ).bytes_per_token
        131072
        """
        _require_positive("layers", layers)
        shape = LayerShape(kv_heads, head_dim, window)
        return cls(name, (shape,) * layers, q_heads, dtype, max_context)

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

    def windowed_bytes(self, context: int) -> int:
        """Bytes of one sequence of ``context`` tokens, tokens outside the windows evicted.

        A layer without a window keeps all of them; equals ``context · bytes_per_token``
        for a model without windows.
        """
        try:
            context = index(context)
        except TypeError:
            raise TypeError(f"context must be an integer, not {context!r}") from None
        if context < 0:
            raise ValueError(f"context must be 0 or more tokens, got {context}")
        return sum(
            min(context, shape.window or context) * self.layer_bytes(layer)
            for layer, shape in enumerate(self.layers)
        )

    def with_dtype(self, dtype: str) -> KVGeometry:
        """The same model with its cache stored in another dtype."""
        return replace(self, dtype=dtype)

    def shard(self, tp: int) -> KVGeometry:
        """One GPU's share under tensor parallelism over ``tp`` GPUs.

        KV heads are divided; with fewer of them than GPUs each GPU keeps one whole head,
        so every head is stored on several GPUs (a latent is always replicated).

        Raises
        ------
        ValueError
            If query or KV heads do not divide evenly.
        """
        _require_positive("tp", tp)
        if tp == 1:
            return self
        if self.q_heads % tp:
            raise ValueError(
                f"{self.name}: {self.q_heads} query heads cannot be divided evenly over {tp} GPUs"
            )
        layers = tuple(
            replace(shape, kv_heads=_heads_per_gpu(self.name, shape.kv_heads, tp))
            for shape in self.layers
        )
        return replace(self, name=f"{self.name} / {tp}", layers=layers, q_heads=self.q_heads // tp)


def check_geometry(geometry: object) -> None:
    """Refuse what is no geometry, such as the name of a model."""
    if not isinstance(geometry, KVGeometry):
        name = geometry if isinstance(geometry, str) else "tiny"
        raise TypeError(
            f"geometry must be a KVGeometry, not {geometry!r}: "
            f"kvalloc.models.geometry({name!r}) makes one"
        )


def _shapes(layers: object) -> tuple[LayerShape, ...]:
    shapes: list[LayerShape] = []
    for shape in layers if isinstance(layers, Iterable) else (layers,):
        if not isinstance(shape, LayerShape):
            raise TypeError(
                f"layers must be a tuple of LayerShape, one a layer, not of {shape!r}: "
                "KVGeometry.uniform makes layers that are all alike"
            )
        shapes.append(shape)
    return tuple(shapes)


def _require_positive(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{field} must be a positive integer, got {value!r}")


def _heads_per_gpu(name: str, kv_heads: int, tp: int) -> int:
    if kv_heads % tp and tp % kv_heads:
        verb = "divided" if kv_heads > tp else "replicated"
        raise ValueError(f"{name}: {kv_heads} KV heads cannot be {verb} evenly over {tp} GPUs")
    return max(1, kv_heads // tp)


SLOTS = KVGeometry("slots", (LayerShape(1, 1, tensors=1),), 1, "float8_e4m3fn")
"""No model at all: one token is one byte. What ``--slots N`` counts in."""
