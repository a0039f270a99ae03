"""The rules that CUDA enforces, enforced by the host driver: each broken once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvalloc.contract import OutOfMemory
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.host_memory import G, mapped, peek, poke
from kvalloc.vmm import system
from kvalloc.vmm.driver import DriverError
from kvalloc.vmm.host import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(G)
    yield driver
    driver.close()


Call = Callable[[HostDriver, int, list[int]], object]
BROKEN_RULES: dict[str, tuple[str, Call]] = {
    "map of a part": ("map: .* whole", lambda d, a, h: d.map(a + 2 * G, 2 * G, h[0])),
    "map over a mapping": ("map: .* unmap it first", lambda d, a, h: d.map(a + G, G, h[0])),
    "map outside": ("map: .* reserve it first", lambda d, a, h: d.map(a + 4 * G, G, h[0])),
    "map at 0": ("map: .* reserve it first", lambda d, a, h: d.map(0, G, h[0])),
    "map of an unknown handle": ("map: no page", lambda d, a, h: d.map(a + 2 * G, G, 99)),
    "allow over a gap": ("allow: no mapping", lambda d, a, h: d.allow(a, 3 * G)),
    "allow of nothing": ("allow: no mapping", lambda d, a, h: d.allow(a + 2 * G, G)),
    "allow outside": ("allow: .* reserve", lambda d, a, h: d.allow(a + 4 * G, G)),
    "unmap over a gap": ("unmap: no mapping", lambda d, a, h: d.unmap(a + G, 2 * G)),
    "unmap outside": ("unmap: .* reserve", lambda d, a, h: d.unmap(a - 4 * G, G)),
    "free while mapped": ("free: 2 mappings", lambda d, a, h: d.free(a, 4 * G)),
    "free of a part": ("free: no range of .* whole", lambda d, a, h: d.free(a, G)),
    "free of the unknown": ("free: no range", lambda d, a, h: d.free(a + G, 4 * G)),
    "release of the unknown": ("release: no page", lambda d, a, h: d.release(99)),
    "tensor past the end": (
        "tensor: .* reserve",
        lambda d, a, h: d.tensor(a, (4 * G + 1,), torch.uint8),
    ),
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_broken_rules_raise_and_change_nothing(driver: HostDriver, rule: str) -> None:
    message, call = BROKEN_RULES[rule]
    address, handles = mapped(driver, 2, num_free=2)
    poke(address, b"intact")
    before = dict(driver.num_calls), driver.bytes_in_use
    with pytest.raises(DriverError, match=message):
        call(driver, address, handles)
    assert (dict(driver.num_calls), driver.bytes_in_use) == before
    assert peek(address, 6) == b"intact"
    driver.unmap(address, 2 * G)
    driver.free(address, 4 * G)
    for handle in handles:
        driver.release(handle)
    assert driver.bytes_in_use == 0


def test_pages_of_several_granules_are_mapped_and_unmapped_whole(driver: HostDriver) -> None:
    address = driver.reserve(8 * G)
    page = driver.create(3 * G)
    driver.map(address + G, 3 * G, page)
    for call in (driver.allow, driver.unmap):
        with pytest.raises(DriverError, match="no mapping starts"):
            call(address + 2 * G, 2 * G)
        with pytest.raises(DriverError, match="ends inside a mapping"):
            call(address + G, 2 * G)
    with pytest.raises(DriverError, match="mapped already"):
        driver.map(address + 3 * G, 3 * G, page)
    driver.map(address + 4 * G, 3 * G, page)
    driver.allow(address + G, 6 * G)
    poke(address + G, b"abc")
    assert peek(address + 4 * G, 3) == b"abc"
    driver.unmap(address + G, 6 * G)


def test_mappings_must_not_cross_ranges(driver: HostDriver) -> None:
    page = driver.create(2 * G)
    first, second = sorted(driver.reserve(2 * G) for _ in range(2))
    with pytest.raises(DriverError, match="not inside one reserved range"):
        driver.map(first + G, 2 * G, page)
    assert second >= first + 2 * G


def test_used_up_handles_and_ranges_stay_used_up(driver: HostDriver) -> None:
    address, (page,) = mapped(driver, 1)
    driver.unmap(address, G)
    driver.release(page)
    driver.free(address, G)
    with pytest.raises(DriverError, match="release each one once"):
        driver.release(page)
    with pytest.raises(DriverError, match="once each"):
        driver.free(address, G)
    with pytest.raises(DriverError, match="before the release"):
        driver.map(driver.reserve(G), G, page)
    assert driver.create(G) != page, "a stale handle never fits a new page"


@pytest.mark.parametrize("num_bytes", [0, -G, G - 1, G + system.OS_PAGE])
def test_sizes_are_refused_at_the_door(driver: HostDriver, num_bytes: int) -> None:
    """Case 32: not a multiple of the granularity."""
    address, (page,) = mapped(driver, 1)
    calls: list[Callable[[], object]] = [
        lambda: driver.reserve(num_bytes),
        lambda: driver.create(num_bytes),
        lambda: driver.map(address, num_bytes, page),
        lambda: driver.allow(address, num_bytes),
        lambda: driver.unmap(address, num_bytes),
        lambda: driver.free(address, num_bytes),
        lambda: driver.unmap(address + system.OS_PAGE, G),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"round up to {G}"):
            call()
    assert driver.bytes_in_use == G


@pytest.mark.parametrize("granularity", [0, -system.OS_PAGE, 1000, system.OS_PAGE + 1])
def test_a_granularity_is_a_multiple_of_the_os_page(granularity: int) -> None:
    told = f"multiple of {system.OS_PAGE}" if granularity > 0 else "at least 1|not be negative"
    with pytest.raises(ValueError, match=f"granularity.*({told})"):
        HostDriver(granularity)


def test_an_unknown_guard_is_refused() -> None:
    with pytest.raises(ValueError, match="'fault' or 'zero'"):
        HostDriver(G, "none")  # type: ignore[arg-type]


def test_every_verb_after_close_raises() -> None:
    driver = HostDriver(G)
    address, (page,) = mapped(driver, 1)
    driver.close()
    calls: list[Callable[[], object]] = [
        lambda: driver.reserve(G),
        lambda: driver.free(address, G),
        lambda: driver.create(G),
        lambda: driver.release(page),
        lambda: driver.map(address, G, page),
        lambda: driver.allow(address, G),
        lambda: driver.unmap(address, G),
        lambda: driver.tensor(address, (1,), torch.uint8),
    ]
    for call in calls:
        with pytest.raises(DriverError, match="closed; make a new one"):
            call()


def test_the_failing_driver_fails_once_and_changes_nothing(driver: HostDriver) -> None:
    failing = FailingDriver(driver, fail_at=2, verbs=("create",))
    failing.create(G)
    address = failing.reserve(G)
    with pytest.raises(DriverError, match="create: made to fail"):
        failing.create(G)
    assert failing.failed and driver.bytes_in_use == G and driver.num_calls["create"] == 1
    failing.create(G)
    failing.arm(1, OutOfMemory(1, 0, 0, unit="pages"))
    with pytest.raises(OutOfMemory):
        failing.free(address, G)
    failing.free(address, G)
    assert failing.calls == ["create", "reserve", "create", "create", "free", "free"]
    assert failing.bytes_in_use == 2 * G, "what is no verb comes from the driver beneath"
