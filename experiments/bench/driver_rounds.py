"""The rounds that ``bench driver`` times: a page's life, and a growth, beside bare system calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from functools import partial
from itertools import cycle, pairwise
from time import perf_counter_ns

from ...vmm import system
from ...vmm.host import HostDriver

Step = Callable[[], object]
Times = dict[str, tuple[int, int | None]]
"""Nanoseconds of each operation, and of the bare system calls in its place if it makes any."""

VERBS = ("reserve", "create", "map", "allow", "unmap", "release", "free")
NUM_BUFFERS = 2  # K and V of one layer
PAGE_TOKENS = 16  # of the sequence that grows


class BareCalls:
    """The system calls behind each verb, for one page and without any rule or book.

    The page is the ``at``-th of a range of ``num_pages``: the system works harder within a range,
    which it must split, than for one that is replaced whole. Pages that are neighbours in
    addresses are none in the file, as where two buffers grow in turn.
    """

    def __init__(self, page_bytes: int, num_pages: int = 1) -> None:
        self._libc = system.libc()
        self._size = page_bytes
        self._range = page_bytes * num_pages
        self._fd = os.memfd_create("kvalloc-bench", os.MFD_CLOEXEC)
        self._base = self._address = self._offset = 0

    def turn_to(self, at: int) -> None:
        """Mean this page of the range from now on."""
        self._address = self._base + at * self._size
        self._offset = 2 * at * self._size

    def reserve(self) -> None:
        """Reserve addresses for the range, aligned to the page."""
        slack = self._size - system.OS_PAGE
        raw = self._libc.mmap(0, self._range + slack, system.PROT_NONE, system.IDLE, -1, 0)
        head = -raw % self._size
        self._base = self._address = raw + head
        if head:
            self._libc.munmap(raw, head)
        if slack - head:
            self._libc.munmap(self._base + self._range, slack - head)

    def create(self) -> None:
        """Let the file have memory for the page."""
        os.posix_fallocate(self._fd, self._offset, self._size)

    def map(self) -> None:
        """Map the page without access."""
        flags = system.MAP_SHARED | system.MAP_FIXED
        self._libc.mmap(self._address, self._size, system.PROT_NONE, flags, self._fd, self._offset)

    def allow(self) -> None:
        """Grant access and populate the page."""
        self._libc.mprotect(self._address, self._size, system.PROT_READ_WRITE)
        if self._libc.can_populate:
            self._libc.madvise(self._address, self._size, system.MADV_POPULATE_WRITE)

    def unmap(self) -> None:
        """Put idle addresses in its place."""
        flags = system.IDLE | system.MAP_FIXED
        self._libc.mmap(self._address, self._size, system.PROT_NONE, flags, -1, 0)

    def release(self) -> None:
        """Give the memory of the page back."""
        self._libc.fallocate(self._fd, system.FALLOC_PUNCH, self._offset, self._size)

    def free(self) -> None:
        """Return the addresses."""
        self._libc.munmap(self._base, self._range)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def verb_rounds(page_bytes: int) -> Generator[Times]:
    """Endless rounds of one page's life: each verb once, by the driver and bare."""
    driver, bare = HostDriver(page_bytes), BareCalls(page_bytes)
    address = handle = 0

    def reserve() -> None:
        nonlocal address
        address = driver.reserve(page_bytes)

    def create() -> None:
        nonlocal handle
        handle = driver.create(page_bytes)

    ours: list[Step] = [
        reserve,
        create,
        lambda: driver.map(address, page_bytes, handle),
        lambda: driver.allow(address, page_bytes),
        lambda: driver.unmap(address, page_bytes),
        lambda: driver.release(handle),
        lambda: driver.free(address, page_bytes),
    ]
    theirs: list[Step] = [getattr(bare, verb) for verb in VERBS]
    try:
        while True:
            yield dict(zip(VERBS, zip(_time(ours), _time(theirs), strict=True), strict=True))
    finally:
        driver.close()
        bare.close()


def grow_rounds(page_bytes: int) -> Generator[Times]:
    """Endless rounds of one sequence that takes its second page under each of two buffers.

    ``grow`` creates the pages, ``grow pooled`` maps pages that were created before, ``grow warm``
    adopts what a finished sequence left mapped, ``grow inside`` stays within the page.
    """
    from ...geometry import KVGeometry, LayerShape
    from ...vmm.allocator import VmmAllocator
    from ...vmm.cache import VmmKVCache

    layer = LayerShape(kv_heads=1, head_dim=page_bytes // PAGE_TOKENS // 2)
    geometry = KVGeometry("bench", (layer,), 1, "float16")
    driver = HostDriver(page_bytes)
    cache = VmmKVCache(geometry, 8 * NUM_BUFFERS * page_bytes, page_bytes, driver=driver)
    bares = [BareCalls(page_bytes, cache.max_rows * 8) for _ in range(NUM_BUFFERS)]
    for bare in bares:
        bare.reserve()

    def grow(*, creates: int = 0, maps: int = 0) -> int:
        before = dict(driver.num_calls)
        took = sum(_time([lambda: cache.grow(["a"])]))
        made = [driver.num_calls[verb] - before[verb] for verb in ("create", "map", "allow")]
        assert made == [creates, maps, maps], "the round does not time what it says"
        return took

    def bare_calls(at: int, *verbs: str) -> int:
        for bare in bares:
            bare.turn_to(at)
        return sum(_time([getattr(bare, verb) for bare in bares for verb in verbs]))

    try:
        for bare_first in cycle((True, False)):
            times: Times = {}
            cache.admit("a", PAGE_TOKENS)
            bare_calls(0, "create", "map", "allow")
            new = partial(bare_calls, 1, "create", "map", "allow")
            times["grow"] = _both(
                partial(grow, creates=NUM_BUFFERS, maps=NUM_BUFFERS), new, bare_first
            )
            times["grow inside"] = grow(), None
            for at in range(2):  # here, so that both sides find their pages equally cold below
                bare_calls(at, "unmap")
            cache.release("a")
            cache.admit("a", PAGE_TOKENS)
            times["grow warm"] = grow(), None
            cache.release("a")
            VmmAllocator.reclaim(cache)  # unmaps, but keeps the pages
            cache.admit("a", PAGE_TOKENS)
            bare_calls(0, "map", "allow")
            pooled = partial(bare_calls, 1, "map", "allow")
            times["grow pooled"] = _both(partial(grow, maps=NUM_BUFFERS), pooled, bare_first)
            cache.release("a")
            cache.reclaim()
            for at in range(2):
                bare_calls(at, "unmap", "release")
            yield times
    finally:
        cache.close()
        driver.close()
        for bare in bares:
            bare.free()
            bare.close()


def _both(ours: Callable[[], int], bare: Callable[[], int], bare_first: bool) -> tuple[int, int]:
    """Both times, taken one after the other: neither side always meets the colder machine."""
    if bare_first:
        theirs = bare()
        return ours(), theirs
    return ours(), bare()


def _time(steps: list[Step]) -> list[int]:
    """Nanoseconds of each step."""
    stamps = [perf_counter_ns()]
    for step in steps:
        step()
        stamps.append(perf_counter_ns())
    return [stop - start for start, stop in pairwise(stamps)]
