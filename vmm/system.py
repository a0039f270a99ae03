"""What the host driver asks of Linux: a few system calls, why one failed, what memory is left."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

from .driver import DriverError

# Linux' values on x86-64, arm64 and riscv; the standard library names only some of them.
PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
IDLE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE
"""Address space that holds nothing."""
MAP_FAILED = (1 << 64) - 1
MADV_POPULATE_WRITE = 23
FALLOC_PUNCH = 0x02 | 0x01  # PUNCH_HOLE | KEEP_SIZE
OS_PAGE = mmap.PAGESIZE
UNLIMITED = 1 << 60


class Libc(NamedTuple):
    """The system calls, as plain functions of integers; each releases the interpreter lock."""

    mmap: Callable[[int, int, int, int, int, int], int]
    munmap: Callable[[int, int], int]
    mprotect: Callable[[int, int, int], int]
    madvise: Callable[[int, int, int], int]
    fallocate: Callable[[int, int, int, int], int]
    can_populate: bool
    """``MADV_POPULATE_WRITE`` is known (Linux 5.14 and later)."""


@cache
def libc() -> Libc:
    """Load the calls.

    Raises
    ------
    DriverError
        This is not a 64-bit Linux with ``memfd_create``.
    """
    if not hasattr(os, "memfd_create") or sys.maxsize < 1 << 32:
        raise DriverError(
            "the host driver needs memfd_create of a 64-bit Linux; "
            f"on this {sys.platform} use the contiguous or the paged backend"
        )
    library = ctypes.CDLL(None, use_errno=True)
    word, number, offset = ctypes.c_size_t, ctypes.c_int, ctypes.c_longlong
    # Addresses are declared as words: then an int in is an int out, without a pointer object.
    library.mmap.argtypes = [word, word, number, number, number, offset]
    library.mmap.restype = word
    library.munmap.argtypes = [word, word]
    library.mprotect.argtypes = [word, word, number]
    library.madvise.argtypes = [word, word, number]
    library.fallocate.argtypes = [number, number, offset, offset]
    # Advice over nothing is refused only if it is unknown.
    can_populate = library.madvise(0, 0, MADV_POPULATE_WRITE) == 0
    return Libc(
        library.mmap,
        library.munmap,
        library.mprotect,
        library.madvise,
        library.fallocate,
        can_populate,
    )


def failure(call: str, num_bytes: int) -> DriverError:
    """The error for a call that has just failed, by ``errno`` and by the limit that was met."""
    number = ctypes.get_errno()
    if number == errno.ENOMEM:
        if num_mappings() >= max_mappings() - 8:
            return out_of_mappings(call)
        if call == "reserve":
            return DriverError(
                f"reserve: out of address space for {num_bytes} bytes "
                f"(limit {_address_limit()}): reserve less, or raise the limit with `ulimit -v`"
            )
    reason = os.strerror(number)
    return DriverError(f"{call}: the system refused {num_bytes} bytes ({reason}); free some first")


def out_of_mappings(call: str) -> DriverError:
    """The error for the limit that an ever more scattered memory meets."""
    limit = max_mappings()
    return DriverError(
        f"{call}: out of mappings ({limit} for a process): use larger pages, "
        f"or raise the limit with `sysctl -w vm.max_map_count={4 * limit}`"
    )


def max_mappings() -> int:
    """The most mappings that a process may have."""
    return _number("/proc/sys/vm/max_map_count", UNLIMITED)


def num_mappings() -> int:
    """Mappings that this process has now, those of everybody else in it included."""
    try:
        with open("/proc/self/maps", "rb", buffering=0) as maps:
            # In small bites: where mappings are short, a large buffer cannot be had.
            return sum(bite.count(b"\n") for bite in iter(lambda: maps.read(1 << 14), b""))
    except OSError:
        return 0


class MappingBudget:
    """Stops short of the limit, since at the limit nothing works: no unmap, no malloc.

    Counting takes milliseconds, so it is done again only when the calls since the last count
    could have used up what it found. One for the process, as the limit is.
    """

    headroom = 512
    stride = 64
    """Calls between two counts at the least; they use a part of the headroom."""

    def __init__(self) -> None:
        self._credit = 0

    def spend(self) -> None:
        """A call that may split mappings: one makes three at the most."""
        self._credit -= 1

    def try_spend(self) -> bool:
        """Spend, or return False: the limit is near, and nothing more should be mapped."""
        if self._credit <= 0 and not self._recount():
            return False
        self._credit -= 1
        return True

    def _recount(self) -> bool:
        room = max_mappings() - self.headroom - num_mappings()
        self._credit = max(self.stride, room // 2) if room > 0 else 0
        return room > 0


budget = MappingBudget()


def available_bytes(root: str = "/") -> int:
    """Memory that this process can still take without pushing anything out.

    The least of what the machine has (``MemAvailable``) and what each enclosing cgroup allows,
    version 1 or 2. Page cache of files counts as available, shared memory does not.

    Parameters
    ----------
    root
        Where ``proc`` and ``sys`` are; a test gives a folder of its own.
    """
    room = _field(os.path.join(root, "proc/meminfo"), "MemAvailable:", UNLIMITED >> 10) << 10
    for folder, names in _cgroups(root):
        limit = _number(os.path.join(folder, names.limit), UNLIMITED)
        if limit < UNLIMITED:
            used = _number(os.path.join(folder, names.usage), 0)
            stat = os.path.join(folder, "memory.stat")
            cached = sum(_field(stat, prefix + "ctive_file", 0) for prefix in names.cached)
            room = min(room, max(0, limit - used + cached))
    return room


class _Names(NamedTuple):
    """What the files of a memory cgroup are called, and the two sorts of page cache."""

    limit: str
    usage: str
    cached: tuple[str, str]


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_ina", "total_a"))
_VERSION_2 = _Names("memory.max", "memory.current", ("ina", "a"))


def _cgroups(root: str) -> Iterator[tuple[str, _Names]]:
    """The folder of each memory cgroup around this process, inner ones first."""
    mounts = os.path.join(root, "sys/fs/cgroup")
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names, tops = _VERSION_2, [mounts, os.path.join(mounts, "unified")]
        elif "memory" in controllers.split(","):
            names, tops = _VERSION_1, [os.path.join(mounts, "memory")]
        else:
            continue
        # In a container the path may not exist here; what is mounted at the top then holds.
        steps = [step for step in path.split("/") if step]
        for top in tops:
            for depth in range(len(steps), -1, -1):
                yield os.path.join(top, *steps[:depth]), names


def _address_limit() -> str:
    import resource  # not on every platform that can import this module

    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "of the processor" if soft == resource.RLIM_INFINITY else f"{soft} bytes"


def _text(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _number(path: str, default: int) -> int:
    text = _text(path).strip()
    return int(text) if text.isdigit() else default


def _field(path: str, name: str, default: int) -> int:
    for line in _text(path).splitlines():
        if line.startswith(name):
            words = line.split()
            if words[0] == name:
                return int(words[1])
    return default
