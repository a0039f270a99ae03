"""Which driver serves which torch device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .driver import Driver, DriverError, Guard

if TYPE_CHECKING:
    import torch


def make_driver(device: torch.device, page_bytes: int, guard: Guard) -> Driver:
    """The driver for a device, for pages of ``page_bytes``.

    Parameters
    ----------
    device
        ``cpu``, ``cuda`` (torch's current device) or ``cuda:N``.
    page_bytes
        The host driver takes it as its granularity; a GPU's driver tells its own, of which
        pages must be multiples.
    guard
        What unmapped addresses do: see ``HostDriver``. A GPU faults: there the cache lays zeros.

    Raises
    ------
    DriverError
        No GPU, or none that offers what is needed.
    ValueError
        Another kind of device.
    """
    if device.type == "cpu":
        from .host import HostDriver

        return HostDriver(page_bytes, guard)
    if device.type != "cuda":
        raise ValueError(f"no driver for {device}: use cpu or cuda")
    import torch

    from .cuda import CudaDriver

    if not torch.cuda.is_available():
        raise DriverError("torch finds no GPU here: use device='cpu'")
    return CudaDriver(torch.cuda.current_device() if device.index is None else device.index)
