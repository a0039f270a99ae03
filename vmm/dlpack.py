"""Tensors over addresses that torch did not allocate and that may be unmapped in part.

A DLPack capsule carries the device with it, so torch asks nobody what the address is. (By
source, ``at::fromDLPack`` passes the capsule's device on; ``__cuda_array_interface__`` has
torch query the pointer instead, which fails where nothing is mapped.)

The capsule owns nothing: its deleter is NULL, and the structure behind it is never freed. A
Python function as deleter would be called while the interpreter is being torn down, and torch
reads the ``deleter`` field of the structure whenever the last view dies, at exit too.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU = 1
"""``kDLCPU``"""
CUDA = 2
"""``kDLCUDA``"""

_FLOAT, _UNSIGNED, _BFLOAT = 2, 1, 4
_CODES = {
    "float32": (_FLOAT, 32),
    "float16": (_FLOAT, 16),
    "bfloat16": (_BFLOAT, 16),
    "uint8": (_UNSIGNED, 8),
    # Exported as bytes and then viewed: DLPack has codes for fp8, but not every torch knows them.
    "float8_e4m3fn": (_UNSIGNED, 8),
    "float8_e5m2": (_UNSIGNED, 8),
}
_NAME = b"dltensor"  # the capsule keeps the pointer, not a copy


class _Tensor(ctypes.Structure):
    """``DLManagedTensor`` of DLPack's C interface, its first member ``DLTensor`` spelt out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def tensor_at(
    address: int, shape: tuple[int, ...], dtype: torch.dtype, *, device: tuple[int, int]
) -> torch.Tensor:
    """A contiguous tensor whose first element lies at ``address``. No memory is touched.

    Each call leaves some hundred bytes behind for good, so make one tensor per buffer and
    slice it.

    Parameters
    ----------
    address
        In bytes; stays the caller's.
    shape
        Elements per dimension.
    dtype
        bfloat16, float16, float32, float8_e4m3fn, float8_e5m2 or uint8.
    device
        DLPack's device type (``CPU``, ``CUDA``) and the device's ordinal.

    Raises
    ------
    ValueError
        For any other dtype, or a negative dimension.
    """
    from torch.utils.dlpack import from_dlpack

    name = str(dtype).removeprefix("torch.")
    if name not in _CODES:
        raise ValueError(f"{dtype} cannot lie over mapped memory; use one of {', '.join(_CODES)}.")
    if any(size < 0 for size in shape):
        raise ValueError(f"A tensor cannot have the shape {shape}; give sizes of at least 0.")
    code, bits = _CODES[name]
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * shape[i]
    sizes = (ctypes.c_int64 * (2 * len(shape)))(*shape, *strides)
    at = ctypes.addressof(sizes)
    struct = _Tensor(
        address, *device, len(shape), code, bits, 1, at, at + 8 * len(shape), 0, None, None
    )
    for held in (sizes, struct):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # immortal: see the module's docstring
    tensor = from_dlpack(_capsule(struct))
    return tensor.view(dtype) if tensor.dtype != dtype else tensor


def _capsule(struct: _Tensor) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(struct), _NAME, None)


class Views:
    """The tensors made over a driver's addresses: which of them, or of their slices, live on."""

    def __init__(self) -> None:
        self._storages: list[tuple[int, int, Any]] = []

    def add(self, tensor: torch.Tensor, address: int) -> torch.Tensor:
        """Remember ``tensor``, which starts at ``address``; returns it."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        alive = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._storages = [entry for entry in self._storages if not entry[2].expired()]
        self._storages.append((address, address + storage.nbytes(), alive))
        return tensor

    def living(self, address: int = 0, num_bytes: int = 1 << 64) -> int:
        """How many tensors still look at some of ``[address, address + num_bytes)``.

        All tensors that share one storage (slices, views) count once.
        """
        return sum(
            start < address + num_bytes and address < stop and not storage.expired()
            for start, stop, storage in self._storages
        )
