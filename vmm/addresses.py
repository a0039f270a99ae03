"""Reserved addresses of the host driver, and the tensors that lie over them.

Addresses must not pass into other hands while a tensor over them lives: a range whose owner
has gone stays reserved, without access, until the last of its tensors is gone too.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right, insort

from . import system
from .driver import DriverError


class AddressRange:
    """One reserved range."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.stop = address + num_bytes
        self.num_mapped = 0
        self.views: set[int] = set()
        self._libc = system.libc()
        self._is_abandoned = False
        self._keys = [0]  # whoever takes the key returns the addresses; two threads may try

    def seal(self) -> None:
        """Empty the range and forbid all access, without giving the addresses up."""
        flags = system.IDLE | system.MAP_FIXED
        self._libc.mmap(self.address, self.num_bytes, system.PROT_NONE, flags, -1, 0)

    def give_up(self) -> None:
        """Return the addresses: now, or with the last tensor over them."""
        if self.views:
            self.seal()
        self._is_abandoned = True
        self._unreserve()

    def forget(self, view: int) -> None:
        """A tensor is gone."""
        self.views.discard(view)
        if self._is_abandoned:
            self._unreserve()

    def _unreserve(self) -> None:
        if self.views:
            return
        try:
            key = self._keys.pop()
        except IndexError:
            return
        if self._libc.munmap(self.address, self.num_bytes):
            error = system.failure("free", self.num_bytes)
            self._is_abandoned = False
            self._keys.append(key)
            raise error


class _View:
    """Rides on the buffer of a tensor: keeps the driver, and tells when the tensor dies."""

    __slots__ = ("_area", "_kept")

    def __init__(self, area: AddressRange, kept: object) -> None:
        self._area = area
        self._kept = kept
        area.views.add(id(self))

    def __del__(self) -> None:
        try:
            self._area.forget(id(self))
        except DriverError:
            pass  # the addresses stay reserved; a destructor has nobody to tell


class AddressSpace:
    """All ranges of one driver, sorted by address. The driver's lock guards it."""

    def __init__(self, granularity: int, protection: int) -> None:
        self._granularity = granularity
        self._protection = protection
        self._libc = system.libc()
        self._bases: list[int] = []
        self._ranges: dict[int, AddressRange] = {}

    @property
    def num_views(self) -> int:
        """Tensors (storages) alive over ranges that are still reserved."""
        return sum(len(area.views) for area in list(self._ranges.values()))

    def reserve(self, num_bytes: int) -> int:
        """Reserve addresses that start at a multiple of the granularity."""
        slack = self._granularity - system.OS_PAGE
        raw = self._libc.mmap(0, num_bytes + slack, self._protection, system.IDLE, -1, 0)
        if raw == system.MAP_FAILED:
            raise system.failure("reserve", num_bytes)
        head = -raw % self._granularity
        address, tail = raw + head, slack - head
        if (head and self._libc.munmap(raw, head)) or (
            tail and self._libc.munmap(address + num_bytes, tail)
        ):
            error = system.failure("reserve", num_bytes)
            self._libc.munmap(raw, num_bytes + slack)
            raise error
        self._ranges[address] = AddressRange(address, num_bytes)
        insort(self._bases, address)
        return address

    def free(self, address: int, num_bytes: int) -> None:
        """Give one whole range back."""
        area = self._ranges.get(address)
        if area is None or area.num_bytes != num_bytes:
            raise DriverError(
                f"free: no range of {num_bytes} bytes is reserved at {address:#x}: "
                "free whole ranges, once each"
            )
        if area.num_mapped:
            raise DriverError(
                f"free: {area.num_mapped} mappings are left at {address:#x}: unmap them first"
            )
        area.give_up()
        del self._ranges[address]
        self._bases.remove(address)

    def find(self, call: str, address: int, num_bytes: int) -> AddressRange:
        """The one range that holds all of these addresses."""
        i = bisect_right(self._bases, address)
        if i:
            area = self._ranges[self._bases[i - 1]]
            if address + num_bytes <= area.stop:
                return area
        raise DriverError(
            f"{call}: {num_bytes} bytes at {address:#x} are not inside one reserved range: "
            "reserve it first"
        )

    def buffer(self, address: int, num_bytes: int, keep: object) -> ctypes.Array[ctypes.c_char]:
        """Bytes over reserved addresses, for a tensor; ``keep`` lives as long as they do."""
        area = self.find("tensor", address, num_bytes)
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        buffer.view = _View(area, keep)  # type: ignore[attr-defined]
        return buffer

    def seal(self) -> None:
        """Forbid all access: what a forked child does with the parent's addresses."""
        for area in self._ranges.values():
            area.seal()

    def close(self) -> None:
        """Give all ranges up, mapped or not."""
        for area in self._ranges.values():
            try:
                area.give_up()
            except DriverError:
                area.seal()  # no more mappings to split off: it stays, but holds nothing
        self._ranges.clear()
        self._bases.clear()
