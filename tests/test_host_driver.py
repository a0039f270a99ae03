"""The host driver's mappings: contents follow pages, and memory is really taken and returned."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from kvalloc.tests.host_memory import G, file_bytes, is_reserved, mapped, peek, poke, shared_bytes
from kvalloc.vmm import system
from kvalloc.vmm.driver import Driver, DriverError
from kvalloc.vmm.host import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(G)
    yield driver
    driver.close()


def test_speaks_the_protocol_with_two_mebibytes_by_default() -> None:
    driver: Driver = HostDriver()
    assert driver.granularity == 2 << 20
    assert driver.reserve(2 << 20) % (2 << 20) == 0
    driver.wait(driver.fence())
    driver.close()


@pytest.mark.parametrize("num_os_pages", [1, 3, 512])
def test_addresses_are_multiples_of_any_granularity(num_os_pages: int) -> None:
    granularity = num_os_pages * system.OS_PAGE
    driver = HostDriver(granularity)
    for num_granules in (1, 2, 7):
        address = driver.reserve(num_granules * granularity)
        assert address % granularity == 0
        driver.map(address, granularity, driver.create(granularity))
        driver.allow(address, granularity)
        poke(address + granularity - 1, b"x")
    driver.close()


def test_a_page_can_be_seen_at_two_addresses(driver: HostDriver) -> None:
    address, (page, _) = mapped(driver, 2, num_free=1)
    driver.map(address + 2 * G, G, page)
    driver.allow(address + 2 * G, G)
    poke(address + 5, b"written here")
    assert peek(address + 2 * G + 5, 12) == b"written here"
    poke(address + 2 * G + 5, b"written THERE")
    assert peek(address + 5, 13) == b"written THERE"
    assert peek(address + G, 20) == bytes(20), "the other page is untouched"


def test_an_alias_keeps_the_page_when_handle_and_first_mapping_are_gone(
    driver: HostDriver,
) -> None:
    address, (page,) = mapped(driver, 1, num_free=1)
    poke(address, b"kept")
    driver.map(address + G, G, page)
    driver.allow(address + G, G)
    driver.release(page)
    driver.unmap(address, G)
    assert peek(address + G, 4) == b"kept"
    assert driver.bytes_in_use == file_bytes(driver) == G
    driver.unmap(address + G, G)
    assert driver.bytes_in_use == file_bytes(driver) == 0


def test_a_handle_keeps_the_page_without_mappings(driver: HostDriver) -> None:
    address, (page,) = mapped(driver, 1)
    poke(address, b"kept")
    driver.unmap(address, G)
    driver.map(address, G, page)
    driver.allow(address, G)
    assert peek(address, 4) == b"kept"


def test_a_page_twice_in_one_unmapped_run_goes_once(driver: HostDriver) -> None:
    address = driver.reserve(2 * G)
    page = driver.create(G)
    driver.map(address, G, page)
    driver.map(address + G, G, page)
    driver.release(page)
    driver.unmap(address, 2 * G)
    assert driver.bytes_in_use == 0
    mapped(driver, 3)
    assert driver.bytes_in_use == file_bytes(driver) == 3 * G, "no range is handed out twice"


def test_memory_is_taken_at_create_and_returned_at_the_end(driver: HostDriver) -> None:
    """Case 31: measured in the file and in the process, not assumed."""
    num_pages = 256
    gc.collect()  # what earlier tests forgot must not go in between
    before = shared_bytes()
    address, handles = mapped(driver, num_pages)
    taken = num_pages * G
    assert file_bytes(driver) == driver.bytes_in_use == taken
    assert shared_bytes() - before == taken, "allow enters the run into the page tables"
    driver.unmap(address, taken)
    assert shared_bytes() == before
    for handle in handles:
        driver.release(handle)
    assert file_bytes(driver) == driver.bytes_in_use == 0


def test_recycled_memory_reads_as_zeros(driver: HostDriver) -> None:
    address, (page,) = mapped(driver, 1)
    poke(address, b"secret")
    driver.unmap(address, G)
    driver.release(page)
    again, _ = mapped(driver, 1)
    assert peek(again, 6) == bytes(6)


def test_ten_thousand_rounds_leave_nothing(driver: HostDriver) -> None:
    """Case 31."""
    address = driver.reserve(2 * G)
    num_mappings, num_files = system.num_mappings(), len(os.listdir("/proc/self/fd"))
    for i in range(10_000):
        handle = driver.create(G)
        driver.map(address + i % 2 * G, G, handle)
        driver.allow(address + i % 2 * G, G)
        driver.unmap(address + i % 2 * G, G)
        driver.release(handle)
    assert file_bytes(driver) == driver.bytes_in_use == 0
    assert os.fstat(driver._file.fd).st_size == G, "the lowest range is reused"
    assert abs(system.num_mappings() - num_mappings) < 10
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert driver.num_calls["map"] == driver.num_calls["release"] == 10_000


def test_a_run_of_pages_is_one_mapping_of_the_system(driver: HostDriver) -> None:
    address, handles = mapped(driver, 64)
    before = system.num_mappings()
    driver.unmap(address, 64 * G)
    for handle in random.Random(0).sample(handles, 64):
        driver.release(handle)
    for i in range(64):
        driver.map(address + i * G, G, driver.create(G))
    driver.allow(address, 64 * G)
    assert abs(system.num_mappings() - before) < 10, "ranges are reused lowest first"


def test_close_returns_everything_twice() -> None:
    """Case 31."""
    num_files, before = len(os.listdir("/proc/self/fd")), shared_bytes()
    driver = HostDriver(G)
    address, _ = mapped(driver, 64)
    driver.create(G)
    driver.close()
    driver.close()
    assert shared_bytes() == before
    assert len(os.listdir("/proc/self/fd")) == num_files
    assert driver.bytes_in_use == driver.num_views == 0
    assert not is_reserved(address)


def test_a_forgotten_driver_closes_itself() -> None:
    gc.collect()  # what earlier tests forgot must not go in between
    before = shared_bytes()
    driver = HostDriver(G)
    mapped(driver, 64)
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    assert gone() is None
    assert shared_bytes() == before


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_agree_with_a_model(seed: int) -> None:
    """Contents follow pages, not addresses, whatever is created, mapped and dropped."""
    rng, driver = random.Random(seed), HostDriver(G)
    bases = [driver.reserve(12 * G) for _ in range(2)]
    handles: dict[int, tuple[int, bytes]] = {}  # handle -> granules, content
    places: dict[int, tuple[int, bytes]] = {}  # address -> handle, content
    sizes: dict[int, int] = {}  # every page ever
    for i in range(1500):
        action = rng.choice(["create", "release", "map", "map", "unmap"])
        if action == "create" and len(handles) < 12:
            size = rng.choice([1, 1, 2, 3])
            handle = driver.create(size * G)
            handles[handle], sizes[handle] = (size, bytes(8)), size
        elif action == "release" and handles:
            handle = rng.choice(list(handles))
            driver.release(handle)
            del handles[handle]
        elif action == "map" and handles:
            handle = rng.choice(list(handles))
            size, content = handles[handle]
            address = rng.choice(bases) + rng.randrange(12) * G
            stop = address + size * G
            is_free = all(
                stop <= other or other + sizes[places[other][0]] * G <= address for other in places
            ) and any(base <= address and stop <= base + 12 * G for base in bases)
            if not is_free:
                with pytest.raises(DriverError):
                    driver.map(address, size * G, handle)
                continue
            driver.map(address, size * G, handle)
            driver.allow(address, size * G)
            assert peek(address, 8) == content
            content = i.to_bytes(8, "little")
            poke(address, content)
            handles[handle] = size, content
            places[address] = handle, content
            for other in places:
                if places[other][0] == handle:
                    places[other] = handle, content
        elif action == "unmap" and places:
            address = rng.choice(list(places))
            driver.unmap(address, sizes[places.pop(address)[0]] * G)
        for address, (_, content) in places.items():
            assert peek(address, 8) == content
        held = set(handles) | {handle for handle, _ in places.values()}
        assert driver.bytes_in_use == sum(sizes[handle] for handle in held) * G
    assert file_bytes(driver) == driver.bytes_in_use
    driver.close()


def test_several_threads_share_a_driver(driver: HostDriver, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # they change places wherever they can
    bases, errors = [driver.reserve(4 * G) for _ in range(4)], []

    def work(base: int) -> None:
        try:
            for i in range(300):
                handle = driver.create(G)
                driver.map(base + i % 4 * G, G, handle)
                driver.allow(base + i % 4 * G, G)
                assert peek(base + i % 4 * G, 8) == bytes(8), "handed out twice"
                poke(base + i % 4 * G, b"mine" * 2)
                driver.release(handle)
                driver.unmap(base + i % 4 * G, G)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(base,)) for base in bases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert driver.bytes_in_use == file_bytes(driver) == 0


VERBS: dict[str, Callable[[HostDriver, int, list[int]], object]] = {
    "reserve": lambda driver, at, pages: driver.reserve(G),
    "create": lambda driver, at, pages: driver.create(G),
    "map": lambda driver, at, pages: driver.map(at + 2 * G, G, pages[0]),
    "allow": lambda driver, at, pages: driver.allow(at, G),
    "unmap": lambda driver, at, pages: driver.unmap(at, G),
    "release": lambda driver, at, pages: driver.release(pages[2]),
    "tensor": lambda driver, at, pages: driver.tensor(at, (8,), torch.uint8),
    "close": lambda driver, at, pages: driver.close(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_of_two_threads_take_turns(driver: HostDriver, verb: str) -> None:
    """Each waits for the one that has the books, and for the one that has the memory file."""
    address, pages = mapped(driver, 2, 1)
    pages.append(driver.create(G))
    locks = [driver._lock]
    if verb in ("create", "release"):
        locks.append(driver._file._lock)
    for lock in locks:
        thread = threading.Thread(target=VERBS[verb], args=(driver, address, pages))
        with lock:
            thread.start()
            thread.join(0.05)
            assert thread.is_alive(), f"{verb} did not wait"
        thread.join(60)
        assert not thread.is_alive()
        pages[2] = driver.create(G) if verb == "release" else pages[2]
