"""The driver for machines without a GPU: the same verbs over ``memfd`` and ``mmap``.

One range of a memory file is one page, mapped wherever it is wanted, also at two addresses at
once. It is not a mock: the processor faults on an unmapped address, and memory is really taken
and really returned. It refuses whatever CUDA would refuse.
"""

from __future__ import annotations

import math
import operator
import os
import weakref
from threading import Lock
from typing import TYPE_CHECKING

from ..sequences import at_least_one
from . import system
from .addresses import AddressSpace
from .driver import VERBS, DriverError, Guard, check_guard, check_sizes
from .mappings import Mappings, Page
from .memfile import MemFile

if TYPE_CHECKING:
    import torch


class HostDriver:
    """Pages of main memory under reserved addresses (see ``vmm.driver`` for the rules).

    Safe to use from several threads; the interpreter lock is free while the system works.

    After ``close`` or ``free`` a tensor that is still alive does not pass into foreign memory:
    its addresses stay reserved, without access and without memory, until it is gone; touching
    it ends the process with SIGSEGV. ``num_views`` tells beforehand. A driver that was never
    closed lives as long as its tensors. A forked child gets neither the memory nor the driver.

    Parameters
    ----------
    granularity
        Bytes; any multiple of the OS page.
    guard
        What an unmapped reserved address does: ``"fault"`` kills the process with SIGSEGV,
        ``"zero"`` reads as zeros, at the cost of no memory (writes still kill).

    Attributes
    ----------
    num_calls : dict[str, int]
        Completed calls of each of the seven verbs.

    Raises
    ------
    DriverError
        The platform has no ``memfd_create``, or a rule was broken: the message names the call
        and the remedy. Nothing has changed then.
    ValueError
        A size or an address that is not a multiple of the granularity.
    """

    def __init__(self, granularity: int = 2 << 20, guard: Guard = "fault") -> None:
        granularity = at_least_one("granularity", granularity)
        if granularity % system.OS_PAGE:
            raise ValueError(
                f"granularity {granularity} is not a multiple of the OS page: "
                f"give a multiple of {system.OS_PAGE}"
            )
        check_guard(guard)
        self._libc = system.libc()
        self._granularity = granularity
        self._idle = system.PROT_NONE if guard == "fault" else system.PROT_READ
        self._file = MemFile(granularity)
        self._space = AddressSpace(granularity, self._idle)
        self._book = Mappings(granularity)
        self._refusal = ""
        self._lock = Lock()
        self.num_calls = dict.fromkeys(VERBS, 0)
        self._finalizer = weakref.finalize(self, _return_all, self._file, self._space)
        self._finalizer.atexit = False  # the system returns everything, and threads may still read
        _living.add(self)

    @property
    def granularity(self) -> int:
        """Every size and address is a multiple of this."""
        return self._granularity

    @property
    def reads_zeros(self) -> bool:
        """Made with ``guard="zero"``."""
        return self._idle == system.PROT_READ

    @property
    def bytes_in_use(self) -> int:
        """Physical memory that handles and mappings hold."""
        return self._file.bytes_in_use

    @property
    def num_views(self) -> int:
        """Tensors (storages) over this driver's ranges that are still alive."""
        return self._space.num_views

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range; returns its address. No memory is taken."""
        self._check_sizes("reserve", 0, num_bytes)
        with self._lock:
            self._check_open("reserve")
            address = self._space.reserve(num_bytes)
            self.num_calls["reserve"] += 1
            return address

    def free(self, address: int, num_bytes: int) -> None:
        """Give an address range back, exactly as it was reserved, with nothing mapped in it."""
        self._check_sizes("free", address, num_bytes)
        with self._lock:
            self._check_open("free")
            self._space.free(address, num_bytes)
            self.num_calls["free"] += 1

    def create(self, num_bytes: int) -> int:
        """Take a page of physical memory; returns its handle. ``OutOfMemory`` if there is none."""
        self._check_sizes("create", 0, num_bytes)
        self._check_open("create")
        page = Page(self._file.take(num_bytes), num_bytes)
        with self._lock:
            self.num_calls["create"] += 1
            return self._book.add(page)

    def release(self, handle: int) -> None:
        """Drop a handle; the memory returns with the last mapping."""
        with self._lock:
            self._check_open("release")
            page = self._book.drop(handle)
            is_gone = page.is_gone
        try:
            if is_gone:
                self._file.give(page.offset, page.num_bytes)
        except BaseException:
            with self._lock:  # nobody else has the page: it is as it was, and can be released again
                self._book.hold(handle, page)
            raise
        with self._lock:
            self.num_calls["release"] += 1

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        """Map a whole page at an unmapped address. Grants no access."""
        self._check_sizes("map", address, num_bytes)
        with self._lock:
            self._check_open("map")
            area = self._space.find("map", address, num_bytes)
            page = self._book.check_map(address, num_bytes, handle)
            if not system.budget.try_spend():
                raise system.out_of_mappings("map")
            flags = system.MAP_SHARED | system.MAP_FIXED
            result = self._libc.mmap(
                address, num_bytes, system.PROT_NONE, flags, self._file.fd, page.offset
            )
            if result == system.MAP_FAILED:
                raise system.failure("map", num_bytes)
            self._book.enter(address, page)
            area.num_mapped += 1
            self.num_calls["map"] += 1

    def allow(self, address: int, num_bytes: int, *, write: bool = True) -> None:
        """Make a run of adjacent mappings readable, and writable or not: one call per run.

        To be written, it is entered into the page tables too: the first write must not pay for it.
        """
        self._check_sizes("allow", address, num_bytes)
        with self._lock:
            self._check_open("allow")
            self._space.find("allow", address, num_bytes)
            self._book.run("allow", address, num_bytes)
            rights = system.PROT_READ_WRITE if write else system.PROT_READ
            if self._libc.mprotect(address, num_bytes, rights):
                raise system.failure("allow", num_bytes)
            self.num_calls["allow"] += 1
        # Outside the lock: this is what takes time, and it changes no book.
        if (
            write
            and self._libc.can_populate
            and self._libc.madvise(address, num_bytes, system.MADV_POPULATE_WRITE)
        ):
            raise system.failure("allow", num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Remove whole mappings from a run of addresses; touching them faults again."""
        self._check_sizes("unmap", address, num_bytes)
        with self._lock:
            self._check_open("unmap")
            area = self._space.find("unmap", address, num_bytes)
            pages = self._book.run("unmap", address, num_bytes)
            system.budget.spend()
            # One call replaces the run: there is no moment at which somebody else could take it.
            flags = system.IDLE | system.MAP_FIXED
            result = self._libc.mmap(address, num_bytes, self._idle, flags, -1, 0)
            if result == system.MAP_FAILED:
                raise system.failure("unmap", num_bytes)
            gone = self._book.remove(address, num_bytes, pages)
            area.num_mapped -= len(pages)
            self.num_calls["unmap"] += 1
        for page in gone:
            self._file.give(page.offset, page.num_bytes, later=True)  # the mappings are gone

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over reserved addresses, mapped or not; nothing is touched."""
        import torch

        address = operator.index(address)
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            self._check_open("tensor")
            buffer = self._space.buffer(address, num_bytes, keep=self)
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    def fence(self) -> None:
        """Nothing is queued on a host: every call has completed when it returns."""

    def wait(self, fence: object) -> None:
        """Return at once; see ``fence``."""

    def close(self) -> None:
        """Return everything that is still held. Closing twice is harmless."""
        with self._lock:
            if not self._refusal:
                self._refusal = "the driver is closed; make a new one"
                self._finalizer()
                self._book.clear()

    def _disown(self) -> None:
        """In a forked child: neither share the parent's memory nor read it by accident."""
        self._lock = Lock()  # its holder may not exist here
        if not self._refusal:
            self._refusal = "the driver belongs to the parent process; make one after the fork"
            self._finalizer.detach()
            self._space.seal()
            self._file.disown()
            self._book.clear()

    def _check_open(self, call: str) -> None:
        if self._refusal:
            raise DriverError(f"{call}: {self._refusal}")

    def _check_sizes(self, call: str, address: int, num_bytes: int) -> None:
        check_sizes(call, address, num_bytes, self._granularity)


def _return_all(file: MemFile, space: AddressSpace) -> None:
    space.close()
    file.close()


_living: weakref.WeakSet[HostDriver] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in list(_living):
        driver._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
