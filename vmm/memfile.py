"""Physical memory of the host driver: a file without a name, whose ranges are really there."""

from __future__ import annotations

import errno
import os
import time
from bisect import bisect_right
from threading import Lock

from ..contract import OutOfMemory
from . import system
from .driver import DriverError

MARGIN_BYTES = 128 << 20
"""Left to the rest of the machine, page tables included: beyond it the system kills."""
CREDIT_BYTES = 64 << 20
"""Bytes taken on one look at the available memory; a look costs as much as a small page."""
CREDIT_SECONDS = 1.0
"""How long a look is believed, since others take memory too."""


class MemFile:
    """Ranges of a memfd, each backed by memory before it is handed out.

    Ranges are reused lowest first and neighbours are joined, so that what is taken in a row
    is a row in the file too: the system then keeps one mapping for it instead of many.
    Safe to use from several threads.
    """

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._libc = system.libc()
        try:
            self.fd = os.memfd_create("kvalloc", os.MFD_CLOEXEC)
        except OSError as error:
            raise DriverError(f"memfd_create: {error.strerror}; raise `ulimit -n`") from None
        self.bytes_in_use = 0
        self._lock = Lock()
        self._closed = False
        # Free intervals of the file, sorted; the last one is the endless rest.
        self._starts = [0]
        self._stops = [1 << 62]
        self._owed: list[tuple[int, int]] = []
        self._credit = 0
        self._credit_until = 0.0

    def take(self, num_bytes: int) -> int:
        """Back a range with memory; returns its offset in the file.

        Raises
        ------
        OutOfMemory
            The memory is not there; nothing was taken.
        """
        with self._lock:
            if self._closed:
                raise DriverError("create: the driver is closed")
            self._retry()
            self._check_room(num_bytes)
            offset = self._cut(num_bytes)
            try:
                # Not left to the first write: there a shortage would end in SIGBUS.
                os.posix_fallocate(self.fd, offset, num_bytes)
            except BaseException as error:
                self._join(offset, num_bytes)
                if isinstance(error, OSError):
                    if error.errno in (errno.ENOSPC, errno.ENOMEM):
                        raise self._refusal(num_bytes, system.available_bytes()) from None
                    raise DriverError(
                        f"create: the system refused {num_bytes} bytes ({error.strerror}); "
                        "raise `ulimit -f`"
                    ) from None
                raise
            self._credit -= num_bytes
            self.bytes_in_use += num_bytes
            return offset

    def give(self, offset: int, num_bytes: int, *, later: bool = False) -> None:
        """Return a range: its memory is free at once, and reads as zeros when taken again.

        Parameters
        ----------
        later
            If the system refuses: keep the range in use, and try again with the next call, rather
            than raise. For who cannot give it a second time.
        """
        with self._lock:
            if self._closed:
                return  # closing returned everything
            self._retry()
            if self._punch(offset, num_bytes):
                return
            # The range is not reused then: it may still hold somebody's tokens.
            if not later:
                raise system.failure("release", num_bytes)
            self._owed.append((offset, num_bytes))

    def _punch(self, offset: int, num_bytes: int) -> bool:
        """Return a range to the system, or False: it refused."""
        if self._libc.fallocate(self.fd, system.FALLOC_PUNCH, offset, num_bytes):
            return False
        self._join(offset, num_bytes)
        self.bytes_in_use -= num_bytes
        return True

    def _retry(self) -> None:
        """Return what the system did not take back before."""
        if self._owed:
            self._owed = [owed for owed in self._owed if not self._punch(*owed)]

    def close(self) -> None:
        """Give up the file; its memory returns with the last mapping."""
        with self._lock:
            self.disown()

    def disown(self) -> None:
        """Close without the lock: after a fork its holder may not exist."""
        if not self._closed:
            self._closed = True
            self.bytes_in_use = 0
            os.close(self.fd)

    def _check_room(self, num_bytes: int) -> None:
        now = time.monotonic()
        if num_bytes > self._credit or now > self._credit_until:
            available = system.available_bytes()
            room = available - MARGIN_BYTES
            if num_bytes > room:
                self._credit = 0
                raise self._refusal(num_bytes, available)
            # Near the end look more often.
            self._credit = max(num_bytes, min(CREDIT_BYTES, room // 8))
            self._credit_until = now + CREDIT_SECONDS

    def _refusal(self, num_bytes: int, available: int) -> OutOfMemory:
        needed = num_bytes // self._granularity
        free = max(0, available - MARGIN_BYTES) // self._granularity
        free = min(free, needed - 1)  # the system may count what it does not give
        return OutOfMemory(needed, free, free, unit="pages")

    def _cut(self, num_bytes: int) -> int:
        starts, stops = self._starts, self._stops
        for i, start in enumerate(starts):
            if stops[i] - start >= num_bytes:
                if stops[i] - start == num_bytes:
                    del starts[i], stops[i]
                else:
                    starts[i] = start + num_bytes
                return start
        raise AssertionError("the file has no end")

    def _join(self, start: int, num_bytes: int) -> None:
        starts, stops, stop = self._starts, self._stops, start + num_bytes
        i = bisect_right(starts, start)
        joins_left = i > 0 and stops[i - 1] == start
        joins_right = i < len(starts) and starts[i] == stop
        if joins_left and joins_right:
            stops[i - 1] = stops[i]
            del starts[i], stops[i]
        elif joins_left:
            stops[i - 1] = stop
        elif joins_right:
            starts[i] = start
        else:
            starts.insert(i, start)
            stops.insert(i, stop)
