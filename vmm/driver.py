"""The driver protocol: seven verbs with the semantics of CUDA's virtual memory management.

``host`` (memfd + mmap) and ``cuda`` (cuMemCreate, cuMemMap, …) speak it alike, so that the
allocator above them is the same code. Rules, enforced by both:

- sizes and addresses are multiples of ``granularity``;
- a page (handle) is mapped whole, and only onto unmapped addresses;
- a mapping cannot be touched before ``allow``;
- ``unmap`` covers whole mappings; everything is unmapped before the range is freed;
- a page's memory returns when its handle is released *and* its last mapping is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch

VERBS = ("reserve", "free", "create", "release", "map", "allow", "unmap")
"""The seven; ``tensor``, ``fence``, ``wait`` and ``close`` come beside them."""

Guard = Literal["fault", "zero"]
"""What an address without a page does when it is read."""


def check_guard(guard: str) -> None:
    """Raise ``ValueError`` unless there is such a guard."""
    if guard not in ("fault", "zero"):
        raise ValueError(f"guard {guard!r} is unknown: give 'fault' or 'zero'")


def check_driver(driver: object) -> None:
    """Refuse what has not the seven verbs, and a class in the place of a driver."""
    if isinstance(driver, type) or not all(callable(getattr(driver, verb, None)) for verb in VERBS):
        raise TypeError(
            f"driver must be a Driver, such as kvalloc.vmm.host.HostDriver(), not {driver!r}"
        )


def check_sizes(call: str, address: int, num_bytes: int, granularity: int) -> None:
    """Raise ``ValueError`` unless a verb's address and size are multiples of the granularity."""
    if num_bytes <= 0 or num_bytes % granularity or address % granularity:
        raise ValueError(
            f"{call}: address {address:#x} and size {num_bytes} must be multiples of the "
            f"granularity, and the size above 0: round up to {granularity} bytes"
        )


class DriverError(RuntimeError):
    """The driver refused a call: a broken rule, or a limit of the system.

    The message names the call and the remedy. Being out of physical memory is
    ``OutOfMemory`` instead, since it is a refusal that may pass.
    """


class Driver(Protocol):
    """Address ranges, physical pages, and mappings between them. Addresses and sizes in bytes."""

    @property
    def granularity(self) -> int:
        """Every size and address is a multiple of this."""
        ...

    @property
    def reads_zeros(self) -> bool:
        """Unmapped reserved addresses read as zeros by themselves; otherwise they fault."""
        ...

    @property
    def num_views(self) -> int:
        """Tensors (storages: slices share one) over the driver's ranges that are alive."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range; returns its address. No memory is taken."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Give an address range back, exactly as it was reserved, with nothing mapped in it."""
        ...

    def create(self, num_bytes: int) -> int:
        """Take a page of physical memory; returns its handle. ``OutOfMemory`` if there is none.

        What it holds is undefined (the host's is zero).
        """
        ...

    def release(self, handle: int) -> None:
        """Drop a handle; the memory returns with the last mapping."""
        ...

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map a whole page at an unmapped address. Grants no access."""
        ...

    def allow(self, address: int, num_bytes: int, *, write: bool = True) -> None:
        """Make a run of adjacent mappings readable, and writable or not: one call per run."""
        ...

    def unmap(self, address: int, num_bytes: int) -> None:
        """Remove whole mappings from a run of addresses; touching them faults again."""
        ...

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over reserved addresses, mapped or not; the caller keeps them."""
        ...

    def fence(self) -> object:
        """Mark the work queued on the device so far; see ``wait``."""
        ...

    def wait(self, fence: object) -> None:
        """Return when the work marked by ``fence`` has completed."""
        ...

    def close(self) -> None:
        """Return everything that is still held. Closing twice is harmless."""
        ...
