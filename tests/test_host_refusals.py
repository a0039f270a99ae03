"""A system that refuses a call of the host driver: one error, and the driver goes on as before.

The system cannot be brought to refuse most of these, so its answer is replaced by the one that it
would give.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvalloc.vmm import system
from kvalloc.vmm.driver import DriverError
from kvalloc.vmm.host import HostDriver

G = 1 << 16


def refusing(**answers: int) -> system.Libc:
    """The system calls, of which some fail with ``EPERM``."""

    def answer(value: int) -> Callable[..., int]:
        def call(*_: int) -> int:
            ctypes.set_errno(errno.EPERM)
            return value

        return call

    calls: dict[str, Any] = {name: answer(value) for name, value in answers.items()}
    return system.libc()._replace(**calls)


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(G)
    yield driver
    driver.close()


def state(driver: HostDriver) -> tuple[Any, ...]:
    return dict(driver.num_calls), driver.bytes_in_use, os.fstat(driver._file.fd).st_blocks


@pytest.mark.parametrize("call", ["map", "allow", "populate", "unmap"])
def test_a_refused_call_on_a_mapping_changes_nothing(driver: HostDriver, call: str) -> None:
    address, handle = driver.reserve(G), driver.create(G)
    verbs: dict[str, tuple[Callable[[], object], dict[str, int]]] = {
        "map": (lambda: driver.map(address, G, handle), {"mmap": system.MAP_FAILED}),
        "allow": (lambda: driver.allow(address, G), {"mprotect": -1}),
        "populate": (lambda: driver.allow(address, G), {"madvise": -1}),
        "unmap": (lambda: driver.unmap(address, G), {"mmap": system.MAP_FAILED}),
    }
    verb, answers = verbs[call]
    if call != "map":
        driver.map(address, G, handle)
    before, real = state(driver), driver._libc
    driver._libc = refusing(**answers)
    with pytest.raises(DriverError, match=r"the system refused 65536 bytes \(.*free some first"):
        verb()
    driver._libc = real
    num_calls = dict(before[0])
    if call == "populate":  # access was granted; what is missing is the memory of page tables
        num_calls["allow"] += 1
    assert state(driver) == (num_calls, *before[1:])
    verb()  # and now it works
    if call != "unmap":
        if call == "map":
            driver.allow(address, G)
        ctypes.memset(address, 7, G)
        driver.unmap(address, G)
    driver.release(handle)
    driver.free(address, G)
    assert driver.bytes_in_use == 0


def test_memory_that_the_system_does_not_take_back_is_not_handed_out_again(
    driver: HostDriver,
) -> None:
    """It may hold somebody's tokens still."""
    handle = driver.create(G)
    real = driver._file._libc
    driver._file._libc = refusing(fallocate=-1)
    with pytest.raises(DriverError, match="release: the system refused"):
        driver.release(handle)
    driver._file._libc = real
    address, other = driver.reserve(G), driver.create(G)
    driver.map(address, G, other)
    page = driver._book._mapped[address]
    assert page is not None and page.offset >= G


@pytest.mark.parametrize("answers", [{"mmap": system.MAP_FAILED}, {"munmap": -1}])
def test_a_refused_reserve_reserves_nothing(driver: HostDriver, answers: dict[str, int]) -> None:
    before, real = system.num_mappings(), driver._space._libc
    driver._space._libc = refusing(**answers)
    with pytest.raises(DriverError, match="reserve: the system refused"):
        driver.reserve(64 * G)
    driver._space._libc = real
    assert driver.num_calls["reserve"] == 0
    if "mmap" in answers:
        assert system.num_mappings() <= before + 1
    driver.free(driver.reserve(64 * G), 64 * G)


def test_addresses_that_the_system_does_not_take_back_can_be_freed_later(
    driver: HostDriver,
) -> None:
    address = driver.reserve(G)
    area = driver._space.find("test", address, G)
    real, area._libc = area._libc, refusing(munmap=-1)
    with pytest.raises(DriverError, match="free: the system refused"):
        driver.free(address, G)
    area._libc = real
    driver.free(address, G)
    with pytest.raises(DriverError, match="no range"):
        driver.free(address, G)


def test_close_empties_what_it_cannot_give_back() -> None:
    driver = HostDriver(G)
    address, handle = driver.reserve(G), driver.create(G)
    driver.map(address, G, handle)
    driver.allow(address, G)
    area = driver._space.find("test", address, G)
    area._libc = system.libc()._replace(munmap=refusing(munmap=-1).munmap)
    driver.close()
    with open("/proc/self/maps") as maps:
        (line,) = [line for line in maps if is_inside(address, line)]
    assert " ---p " in line and "memfd" not in line, "no access, and no memory"
    assert system.libc().munmap(address, G) == 0


def is_inside(address: int, line: str) -> bool:
    """Whether a line of the process's mappings is about an address."""
    begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
    return begin <= address < end
