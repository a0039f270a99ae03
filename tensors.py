"""What the three caches do alike around their tensors: check arguments, place tokens, close.

A cache's ``write`` goes through the same steps, all before anything is touched: where the tokens
go is worked out once per step, not once per layer (``BatchMemo``), by ``check_lens`` and
``newest``, and every layer's tensors are held against it (``check_tensors``). ``torch_dtype``
refuses in ``__init__`` what no kernel reads; ``close`` ends with ``seal(self)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .contract import KVCache, Seq
from .geometry import KVGeometry, check_geometry
from .sequences import Ints, count, require_batch

T = TypeVar("T")


def torch_dtype(geometry: KVGeometry) -> torch.dtype:
    """The torch dtype of a geometry's tensors.

    Raises
    ------
    TypeError
        Not a geometry.
    ValueError
        The geometry stores a latent (MLA): no kernel here reads one, it is accounting only.
    """
    check_geometry(geometry)
    if any(shape.tensors != 2 for shape in geometry.layers):
        raise ValueError(
            f"geometry {geometry.name!r} stores one latent tensor per layer, which is accounting "
            "only: use the allocator of this backend, not its cache"
        )
    dtype = getattr(torch, geometry.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


LAYOUTS = ("token-major", "head-major")
"""Memory order of a cache's tensors: ``[token, head, dim]`` or ``[head, token, dim]``."""


def default_layout(device: torch.device | str, layout: str | None) -> str:
    """``layout`` itself, checked; None: what reads faster on the device (docs/decisions.md)."""
    if layout is None:
        return "head-major" if torch.device(device).type == "cpu" else "token-major"
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    return layout


def check_layer(geometry: KVGeometry, layer: int) -> int:
    """Return ``layer`` as a plain int, refusing one that the geometry does not have."""
    num_layers = len(geometry.layers)
    if (layer := count("layer", layer)) >= num_layers:
        raise ValueError(f"layer {layer} does not exist: use 0 to {num_layers - 1}")
    return layer


def check_tensors(
    geometry: KVGeometry,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Refuse K and V that are not ``[num_tokens, H_kv, D]`` of the cache's dtype and device.

    ``device`` must carry its index as tensors do (``cuda:0``): take it from a tensor.

    Raises
    ------
    TypeError
        Not tensors.
    ValueError
        Wrong layer, dtype, device or shape.
    """
    shape = geometry.layers[check_layer(geometry, layer)]
    wanted = (num_tokens, shape.kv_heads, shape.head_dim)
    dtype = getattr(torch, geometry.dtype)  # in every layer's path: no check of all layers here
    for name, tensor in (("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
        if tensor.shape != wanted:
            raise ValueError(
                f"{name} must have shape {wanted} (tokens, KV heads, head dim) in layer {layer}, "
                f"but has {tuple(tensor.shape)}"
            )
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} like the cache, but is {tensor.dtype}")
        if tensor.device != device:
            raise ValueError(
                f"{name} must be on {device} like the cache, but is on {tensor.device}"
            )


def check_lens(
    seqs: Sequence[Seq],
    lengths: Ints,
    lens: Sequence[int] | None,
    sealed: Ints,
    first: Ints | None = None,
) -> Ints:
    """How many of the newest tokens of each sequence are given, int64 ``[S]``; None: one each.

    Parameters
    ----------
    seqs, lengths
        The batch and the tokens that each of its sequences has room for.
    sealed
        Leading tokens of each that others may read as well.
    first
        The first token of each that the layer still stores; None: it lets go of none.

    Raises
    ------
    TypeError, ValueError
        Not integers, not one per sequence, negative, more than a sequence is long, or reaching
        back to tokens that are sealed or gone.
    """
    if lens is None:
        counts = np.ones(len(seqs), np.int64)
    else:
        given = np.asarray(lens)
        if given.shape != (len(seqs),):
            raise ValueError(
                f"lens must name one count per sequence: {len(seqs)} of them, not {given.shape}"
            )
        if len(given) and given.dtype.kind not in "iu":
            raise TypeError(f"lens must be integers, not {given.dtype}")
        counts = given.astype(np.int64)
    floor = sealed if first is None else np.maximum(sealed, first)
    wrong = (counts < 0) | (counts > lengths - floor)
    if wrong.any():
        i = int(np.argmax(wrong))
        why = f"it has {lengths[i]}; make room with grow first"
        if counts[i] < 0:
            why = "lens counts tokens"
        elif counts[i] <= lengths[i]:
            why = f"the first {floor[i]} of its {lengths[i]} " + (
                "fell out of a sliding window; write before the next grow"
                if floor[i] > sealed[i]
                else "were there at a fork or a prefix hit, and others may read them; write before "
                "forking and only what was not hit, or truncate and grow to write anew"
            )
        raise ValueError(f"{counts[i]} tokens of sequence {seqs[i]!r} cannot be written: {why}")
    return counts


def newest(lengths: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """Where the packed tokens of a write go: the newest ``counts[i]`` of each sequence.

    Returns
    -------
    owner, position : int64 ``[sum(counts)]``
        For each packed token its sequence's place in the batch, and its position there:
        ``lengths[i] − counts[i] … lengths[i] − 1``.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    # Packed index minus the index of the sequence's first packed token, plus its position.
    shift = lengths - np.cumsum(counts)
    return owner, np.arange(len(owner)) + shift[owner]


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of a small numpy array as a tensor on ``device``."""
    return torch.from_numpy(array.copy()).to(device)


class BatchMemo(Generic[T]):
    """The last answer, kept while batch and books stay the same: every layer asks again."""

    def __init__(self) -> None:
        self._key: tuple[int, list[Seq], tuple[str, list[int]] | None] | None = None
        self._value: T | None = None

    def get(
        self,
        version: int,
        seqs: Sequence[Seq],
        lens: Sequence[int] | None,
        build: Callable[[], T],
    ) -> T:
        """``build()``, or what it returned for the same arguments last time.

        Parameters
        ----------
        version
            A number that the allocator changes whenever its books change.
        seqs, lens
            The batch; ``lens`` is None where the answer does not depend on it.
        """
        require_batch(seqs)  # of a string the letters could be the last batch
        counts = None
        if lens is not None:
            given = np.asarray(lens)
            counts = given.dtype.kind, given.tolist()  # 1.0 equals 1, and is no count
        key = version, list(seqs), counts
        if self._value is None or key != self._key:
            self._value, self._key = build(), key
        return self._value

    def clear(self) -> None:
        """Let go of the tensors of the last answer."""
        self._key = self._value = None


def seal(cache: KVCache) -> None:
    """Make every verb of a closed cache but ``close`` raise ``RuntimeError``.

    The cache becomes one of a class whose verbs only raise, so an open cache pays nothing for the
    check, and what Python looks up on the class (``with``, properties) is refused as well.
    """
    cache.__class__ = _closed_class(type(cache))


@functools.cache
def _closed_class(kind: type[KVCache]) -> type[KVCache]:
    message = f"this {kind.__name__} is closed: make a new one"

    def closed(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(message)

    verbs: dict[str, Any] = {
        name: closed
        for name in dir(kind)
        if not name.startswith("_") and callable(getattr(kind, name))
    }
    verbs |= {"__enter__": closed, "capacity": property(closed), "close": lambda self: None}
    return type(kind.__name__, (kind,), verbs)


def named_device(device: torch.device | str) -> torch.device:
    """The device of a name; ``ValueError`` if torch knows none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"{device!r} is no device of torch: use 'cpu' or 'cuda'") from None


def check_device(device: torch.device | str) -> torch.device:
    """A device that tensors can be made on and kernels run on.

    Raises
    ------
    ValueError
        Not a device, of a kind that no kernel here runs on, or not there.
    """
    where = named_device(device)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"no kernel here runs on {where}: use 'cpu' or 'cuda'")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"torch finds no GPU for {device!r}: use device='cpu'")
    return where


@contextmanager
def host_memory() -> Iterator[None]:
    """Copy to the host here: memory that is not there is a ``MemoryError`` with its remedy."""
    try:
        yield
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise MemoryError(
            "the host has no memory for a copy of the sequence: release it and compute it again, "
            "or free some"
        ) from error


def made(make: Callable[..., torch.Tensor], *shape: int, **options: Any) -> torch.Tensor:
    """``make(*shape, **options)``, where memory that is not there is a ``MemoryError``."""
    try:
        return make(*shape, **options)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise MemoryError(
            f"a tensor of {' x '.join(map(str, shape))} elements cannot be made on "
            f"{options['device']}: give the cache less memory"
        ) from error
