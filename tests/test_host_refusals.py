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

from kvalloc.tests.failure_scenes import PAGE, SCENARIOS
from kvalloc.tests.failure_script import closing_fails_at, fails_at, making_fails_at
from kvalloc.tests.host_memory import file_bytes
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
    """It may hold somebody's tokens still. Its handle goes on, and can be released again."""
    handle = driver.create(G)
    before, real = state(driver), driver._file._libc
    driver._file._libc = refusing(fallocate=-1)
    with pytest.raises(DriverError, match="release: the system refused"):
        driver.release(handle)
    assert state(driver) == before
    driver._file._libc = real
    address, other = driver.reserve(2 * G), driver.create(G)
    driver.map(address, G, other)
    page = driver._book._mapped[address]
    assert page is not None and page.offset >= G
    driver.map(address + G, G, handle)
    driver.unmap(address, 2 * G)
    driver.release(handle)
    driver.release(other)
    assert driver.bytes_in_use == file_bytes(driver) == 0


def test_memory_of_a_last_mapping_is_given_back_later_if_the_system_refuses(
    driver: HostDriver,
) -> None:
    """The addresses are free by then, and there is no handle to be released again."""
    address, handle = driver.reserve(G), driver.create(G)
    driver.map(address, G, handle)
    driver.release(handle)
    real = driver._file._libc
    driver._file._libc = refusing(fallocate=-1)
    driver.unmap(address, G)
    assert driver.bytes_in_use == file_bytes(driver) == G, "it is counted as long as it is there"
    driver._file._libc = real
    other = driver.create(G)
    assert driver.bytes_in_use == file_bytes(driver) == G
    driver.map(address, G, other)
    driver.unmap(address, G)
    driver.release(other)
    assert driver.bytes_in_use == file_bytes(driver) == 0


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


class SystemFaults:
    """One kind of system call, of which the n-th is refused; a driver that makes them."""

    def __init__(self, call: str, patch: pytest.MonkeyPatch) -> None:
        self._left, self._failed = 0, False
        real = system.libc()
        if call == "posix_fallocate":
            patch.setattr(os, call, self._counted(os.posix_fallocate, None))
        else:
            value = system.MAP_FAILED if call == "mmap" else -1
            counted: dict[str, Any] = {call: self._counted(getattr(real, call), value)}
            real = real._replace(**counted)
        patch.setattr(system, "libc", lambda: real)
        self.driver = HostDriver(PAGE)

    def _counted(self, real: Callable[..., Any], value: int | None) -> Callable[..., Any]:
        def call(*arguments: int) -> Any:
            self._left -= 1
            if self._left != 0:
                return real(*arguments)
            self._failed = True
            if value is None:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            ctypes.set_errno(errno.EPERM)
            return value

        return call

    def arm(self, n: int) -> None:
        self._left, self._failed = n, False

    def has_failed(self) -> bool:
        return self._failed

    def num_mapped(self) -> int:
        return sum(area.num_mapped for area in self.driver._space._ranges.values())

    def bytes_in_use(self) -> int:
        assert self.driver.bytes_in_use == file_bytes(self.driver)
        return self.driver.bytes_in_use


SCENES = (
    "grow past a window",
    "reclaim",
    "restore where warm pages are taken back",
    "truncate inside a unit beside a holder, scrubbed",
)


@pytest.mark.parametrize("call", ["mmap", "mprotect", "madvise", "fallocate", "posix_fallocate"])
def test_a_refused_system_call_of_any_verb_leaves_no_trace(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the driver's verbs; ``test_cuda_failures`` lets them fail as a whole."""
    num_refused = 0
    for name in SCENES:
        n, failed = 0, True
        while failed:
            n += 1
            with monkeypatch.context() as patch:
                faults = SystemFaults(call, patch)
                failed, refused = fails_at(SCENARIOS[name], faults.driver, faults, n)
                num_refused += refused
                faults.driver.close()
    assert num_refused > 0


@pytest.mark.parametrize(
    ("play", "call"),
    [
        *((making_fails_at, call) for call in ("mmap", "mprotect", "madvise")),
        *((closing_fails_at, call) for call in ("mmap", "munmap", "fallocate")),
    ],
)
def test_a_refused_system_call_while_making_or_closing_leaves_nothing(
    play: Callable[..., tuple[bool, bool]], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, failed = 0, True
    while failed:
        n += 1
        with monkeypatch.context() as patch:
            faults = SystemFaults(call, patch)
            failed, _ = play(faults.driver, faults, n, guard="zero")
            assert not faults.driver._space._ranges
            assert faults.num_mapped() == faults.bytes_in_use() == faults.driver.num_views == 0
            faults.driver.close()
    assert n > 1, "nothing was refused"


def is_inside(address: int, line: str) -> bool:
    """Whether a line of the process's mappings is about an address."""
    begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
    return begin <= address < end
