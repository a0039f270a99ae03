"""What the tests of the host driver share: raw memory, and what the system says about it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from kvalloc.vmm import system
from kvalloc.vmm.host import HostDriver

if not hasattr(os, "memfd_create"):
    pytest.skip("the host driver needs Linux", allow_module_level=True)

G = 4 * system.OS_PAGE
"""The granularity of these tests: small, and not the OS page itself."""


def poke(address: int, text: bytes) -> None:
    ctypes.memmove(address, text, len(text))


def peek(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def file_bytes(driver: HostDriver) -> int:
    """Memory behind the driver as the system counts it."""
    return os.fstat(driver._file.fd).st_blocks * 512


def shared_bytes() -> int:
    """Shared memory entered in the page tables of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss_Shmem:"):
            return int(line.split()[1]) << 10
    pytest.skip("this kernel does not tell shared memory apart (Pss_Shmem)")


def is_reserved(address: int) -> bool:
    """The address is held without access; once given up, anybody may map it otherwise."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, protection = line.split()[:2]
        start, stop = (int(word, 16) for word in span.split("-"))
        if start <= address < stop:
            return protection == "---p"
    return False


def mapped(driver: HostDriver, num_pages: int, num_free: int = 0) -> tuple[int, list[int]]:
    """A range with pages at its beginning, ready to be touched."""
    address = driver.reserve((num_pages + num_free) * G)
    handles = [driver.create(G) for _ in range(num_pages)]
    for i, handle in enumerate(handles):
        driver.map(address + i * G, G, handle)
    driver.allow(address, num_pages * G)
    return address, handles
