"""The driver for NVIDIA GPUs: the same verbs over CUDA's virtual memory management.

Nothing here runs at import, so that a machine without a GPU can import everything.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING, Literal

from ..contract import OutOfMemory
from . import dlpack
from .cuda_device import CudaDevice, Fence
from .cuda_library import OUT_OF_MEMORY, CudaError
from .driver import VERBS, DriverError, check_sizes

if TYPE_CHECKING:
    import torch


class CudaDriver:
    """Pages of GPU memory under reserved addresses (see ``vmm.driver`` for the rules).

    Works in the context that is current when it is made, if that belongs to the device, else
    in the device's primary context (torch's own), which it retains. Every verb makes that
    context current for the length of the call, in whatever thread it is called, and restores
    the caller's. Safe to use from several threads, ``close`` excepted.

    Tensors never own the memory: while one lives, ``free`` and ``close`` refuse. A driver that
    is dropped without ``close`` gives its memory back if no tensor looks at it, else it keeps
    it to the end of the process. A forked child must not use it (CUDA's own rule).

    Parameters
    ----------
    device
        Ordinal of the GPU, as torch counts.
    granularity
        The smallest that the driver allows, or the one that it recommends.
    shareable
        Create pages that ``cuMemExportToShareableHandle`` can export as a file descriptor.
    peers
        Other GPUs that may read and write the pages too.

    Attributes
    ----------
    num_calls : dict[str, int]
        Completed calls of each of the seven verbs.

    Raises
    ------
    CudaError
        CUDA refused a call; a ``DriverError`` that names the call and the code.
    DriverError
        No driver, no such function, or a rule was broken that CUDA may not check.
    OutOfMemory
        No physical memory; counted in pages of ``granularity``.
    ValueError
        A size or an address that is not a multiple of the granularity.
    """

    def __init__(
        self,
        device: int = 0,
        *,
        granularity: Literal["minimum", "recommended"] = "minimum",
        shareable: bool = False,
        peers: Sequence[int] = (),
    ) -> None:
        self._closed = True  # until everything below stands
        if granularity not in ("minimum", "recommended"):
            raise ValueError(f"granularity {granularity!r} is unknown: minimum or recommended")
        self._device = CudaDevice(device)
        try:
            self._properties = self._device.page_properties(shareable)
            self._access = self._device.access(peers)
            self._granularity = self._device.granularity(self._properties, granularity)
        except BaseException:
            self._device.close()
            raise
        self._call = self._device.call
        self._ranges: dict[int, int] = {}  # address -> bytes
        self._pages: dict[int, int] = {}  # handle -> bytes
        self._mapped: dict[int, tuple[int, int]] = {}  # address -> bytes, handle
        self._views = dlpack.Views()
        self._process = os.getpid()
        self._lock = Lock()
        self.num_calls = dict.fromkeys(VERBS, 0)
        self._closed = False

    @property
    def granularity(self) -> int:
        """Every size and address is a multiple of this."""
        return self._granularity

    @property
    def reads_zeros(self) -> bool:
        """Never: a GPU faults."""
        return False

    @property
    def bytes_in_use(self) -> int:
        """Physical memory that handles and mappings hold."""
        mapped = {handle: num_bytes for num_bytes, handle in list(self._mapped.values())}
        return sum((mapped | self._pages).values())

    @property
    def num_views(self) -> int:
        """Tensors (storages) over this driver's ranges that are still alive."""
        return self._views.living()

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range; returns its address. No memory is taken."""
        self._check_sizes("reserve", 0, num_bytes)
        with self._verb("reserve"):
            address = int(self._call("cuMemAddressReserve", num_bytes, self._granularity, 0, 0))
            self._ranges[address] = num_bytes
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Give an address range back, exactly as it was reserved, with nothing mapped in it."""
        self._check_sizes("free", address, num_bytes)
        with self._verb("free"):
            self._check_unseen("free", self._views.living(address, num_bytes))
            self._call("cuMemAddressFree", address, num_bytes)
            del self._ranges[address]

    def create(self, num_bytes: int) -> int:
        """Take a page of physical memory; returns its handle. ``OutOfMemory`` if there is none.

        The handle is CUDA's own. What the memory holds is undefined.
        """
        self._check_sizes("create", 0, num_bytes)
        with self._verb("create"), self._physical(num_bytes):
            handle = int(self._call("cuMemCreate", num_bytes, self._properties, 0))
            self._pages[handle] = num_bytes
        return handle

    def release(self, handle: int) -> None:
        """Drop a handle; the memory returns with the last mapping."""
        with self._verb("release"):
            num_bytes = self._pages.pop(handle, None)  # first: two threads must not both pass
            if num_bytes is None:
                raise DriverError(f"release: no page has handle {handle}: release each one once")
            try:
                self._call("cuMemRelease", handle)
            except CudaError:
                self._pages[handle] = num_bytes
                raise

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map a whole page at an unmapped address. Grants no access."""
        self._check_sizes("map", address, num_bytes)
        with self._verb("map"), self._physical(num_bytes):
            # Not left to CUDA: a stale handle is undefined there, and so is a part of a page.
            page_bytes = self._pages.get(handle)
            if page_bytes is None:
                raise DriverError(f"map: no page has handle {handle}: map before the release")
            if page_bytes != num_bytes:
                raise DriverError(
                    f"map: page {handle} has {page_bytes} bytes, not {num_bytes}: map it whole"
                )
            self._call("cuMemMap", address, num_bytes, 0, handle, 0)
            self._mapped[address] = (num_bytes, handle)

    def allow(self, address: int, num_bytes: int, *, write: bool = True) -> None:
        """Make a run of adjacent mappings readable, and writable or not, for the peers too."""
        self._check_sizes("allow", address, num_bytes)
        access = self._access[write]
        with self._verb("allow"), self._physical(num_bytes):
            self._call("cuMemSetAccess", address, num_bytes, access, len(access))

    def unmap(self, address: int, num_bytes: int) -> None:
        """Remove whole mappings from a run of addresses; touching them faults again.

        Takes effect at once, whatever is queued: ``wait`` for the last use before.
        """
        self._check_sizes("unmap", address, num_bytes)
        with self._verb("unmap"):
            self._call("cuMemUnmap", address, num_bytes)
            stop = address + num_bytes
            while address < stop:
                address += self._mapped.pop(address)[0]

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over reserved addresses, mapped or not; nothing is touched.

        In bfloat16, float16, float32, fp8 or uint8. Make one per buffer and slice it: see
        ``dlpack.tensor_at``.
        """
        return self._tensor(address, shape, dtype, (dlpack.CUDA, self._device.ordinal))

    def fence(self) -> object:
        """Mark the work queued so far on torch's current stream of the calling thread.

        On the default stream if torch has not touched CUDA. Work on other streams is not
        covered: let the current one wait for them first.
        """
        with self._verb("fence"):
            return self._device.record()

    def wait(self, fence: object) -> None:
        """Return when the work marked by ``fence`` has completed."""
        if not isinstance(fence, Fence):
            raise TypeError("wait takes what fence returned")
        with self._verb("wait"):
            self._call("cuEventSynchronize", fence.event)

    def close(self) -> None:
        """Wait for the device, then return everything that is still held.

        Closing twice is harmless. After an error, closing again goes on where it stopped.

        Raises
        ------
        DriverError
            Tensors over the memory are still alive; nothing was closed.
        """
        if self._closed:
            return
        self._check_unseen("close", self.num_views)
        with self._device.current():
            self._call("cuCtxSynchronize")
            for address, (num_bytes, _) in list(self._mapped.items()):
                self._call("cuMemUnmap", address, num_bytes)
                del self._mapped[address]
            for address, num_bytes in list(self._ranges.items()):
                self._call("cuMemAddressFree", address, num_bytes)
                del self._ranges[address]
            for handle in list(self._pages):
                self._call("cuMemRelease", handle)
                del self._pages[handle]
            self._device.destroy_events()
        self._device.close()
        self._closed = True

    def __del__(self) -> None:
        # At exit the system takes everything back, and a forked child owns nothing.
        if not self._closed and not sys.is_finalizing() and os.getpid() == self._process:
            with suppress(DriverError):
                self.close()

    @contextmanager
    def _verb(self, name: str) -> Iterator[None]:
        if self._closed:
            raise DriverError(f"{name}: the driver is closed; make a new one")
        with self._device.current():
            yield
        if name in self.num_calls:
            with self._lock:
                self.num_calls[name] += 1

    @contextmanager
    def _physical(self, num_bytes: int) -> Iterator[None]:
        """Say CUDA's "out of memory" in the contract's words (page tables take some too)."""
        try:
            yield
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            needed = num_bytes // self._granularity
            with suppress(CudaError):
                free = int(self._call("cuMemGetInfo")[0]) // self._granularity
                # A part of what is reported free can be out of reach; it is not fragmented.
                free = min(free, needed - 1)
                raise OutOfMemory(needed, free, free, unit="pages") from error
            raise OutOfMemory(needed, 0, 0, unit="pages") from error

    def _tensor(
        self, address: int, shape: tuple[int, ...], dtype: torch.dtype, device: tuple[int, int]
    ) -> torch.Tensor:
        address = operator.index(address)
        stop = address + max(1, math.prod(shape) * dtype.itemsize)
        with self._verb("tensor"):
            for start, num_bytes in list(self._ranges.items()):
                if start <= address and stop <= start + num_bytes:
                    tensor = dlpack.tensor_at(address, shape, dtype, device=device)
                    return self._views.add(tensor, address)
        raise DriverError(f"tensor: {address:#x} to {stop:#x} is not reserved: reserve it first")

    def _check_sizes(self, call: str, address: int, num_bytes: int) -> None:
        check_sizes(call, address, num_bytes, self._granularity)

    def _check_unseen(self, call: str, num_views: int) -> None:
        if num_views:
            raise DriverError(f"{call}: {num_views} tensors are still in use: drop them first")
