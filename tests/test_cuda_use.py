"""The cuda driver in use: failures at every call, unmapping after the last use, threads.

Against the conformance library; each function whose name starts with ``_`` runs in a process of
its own.
"""

from __future__ import annotations

import pytest

from kvalloc.tests.conformance.conformance import run_in_subprocess
from kvalloc.tests.guard_walk import PAGE

G = 65536


def _fails_at_every_call(code: int) -> None:
    from kvalloc.contract import OutOfMemory
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    library = Library()
    device = library.cuda

    def session(driver: ConformanceDriver) -> None:
        g = driver.granularity
        address = driver.reserve(4 * g)
        pages = [driver.create(g), driver.create(2 * g)]
        driver.map(address, g, pages[0])
        driver.map(address + g, 2 * g, pages[1])
        driver.allow(address, 3 * g)
        driver.wait(driver.fence())
        driver.unmap(address + g, 2 * g)
        driver.release(pages[1])
        driver.release(pages[0])
        driver.reserve(g)

    n, came_to_fail = 0, True
    while came_to_fail:
        n += 1
        driver = None
        library.fail("", n, code)
        before = library.count()
        try:
            driver = ConformanceDriver()
            session(driver)
            driver.close()
        except (DriverError, OutOfMemory) as error:
            assert not isinstance(error, OutOfMemory) or code == 2, error
            if driver is not None:
                driver.close()
        came_to_fail = library.count() - before >= n
        library.fail("", 0)
        assert not any(library.alive().values()), (n, library.alive())
        while int(device.cuCtxGetCurrent()[1] or 0):
            device.cuCtxPopCurrent()  # popping itself had failed
    assert n > 60, "every call of the session came to fail once"


@pytest.mark.parametrize("code", [2, 999])
def test_failing_at_any_call_leaks_nothing(code: int) -> None:
    """Cases 9 and 31: whatever fails, what was made is known and goes back."""
    run_in_subprocess(_fails_at_every_call, code, granularity=G)


def _verbs_refuse_whole() -> None:
    from collections.abc import Callable

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    library, driver = Library(), ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(4 * g)
    page = driver.create(g)

    def fails_once(verb: Callable[..., object], call: str, *args: int) -> None:
        before, calls = library.alive(), dict(driver.num_calls)
        library.fail(call)
        try:
            verb(*args)
        except DriverError as error:
            assert str(error) == f"{call}: CUDA_ERROR_UNKNOWN"
        else:
            raise AssertionError(call)
        assert (library.alive(), driver.num_calls) == (before, calls)
        verb(*args)  # nothing changed, so a retry works

    fails_once(driver.reserve, "cuMemAddressReserve", g)
    fails_once(driver.create, "cuMemCreate", g)
    fails_once(driver.map, "cuMemMap", address, g, page)
    fails_once(driver.allow, "cuMemSetAccess", address, g)
    fails_once(driver.unmap, "cuMemUnmap", address, g)
    fails_once(driver.release, "cuMemRelease", page)
    fails_once(driver.free, "cuMemAddressFree", address, 4 * g)


def test_a_refused_verb_changes_nothing_and_can_be_retried() -> None:
    """Case 9."""
    run_in_subprocess(_verbs_refuse_whole, granularity=G)


def _last_use() -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    library, driver = Library(), ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(4 * g)
    for i in range(4):
        driver.map(address + i * g, g, driver.create(g))
    library.launch(address, g)
    fence = driver.fence()
    library.launch(address + g, g)
    driver.wait(fence)
    driver.wait(fence)
    driver.unmap(address, g)
    library.launch(address + 2 * g, g)
    driver.wait(driver.fence())
    driver.unmap(address + g, 2 * g)
    library.launch(address + 3 * g, g)
    try:
        driver.wait("now")
    except TypeError as error:
        assert str(error) == "wait takes what fence returned"
    fence = driver.fence()
    try:
        driver.unmap(address + 3 * g, g)
    except DriverError as error:
        print(error)
    try:
        driver.create(g)
    except DriverError as error:
        print(error)


def test_unmapping_waits_for_the_last_use() -> None:
    """Cases 10 and 34; without waiting it is a fault that every later call tells."""
    assert run_in_subprocess(_last_use, granularity=G).splitlines() == [
        "cuMemUnmap: CUDA_ERROR_ILLEGAL_ADDRESS",
        "cuMemCreate: CUDA_ERROR_ILLEGAL_ADDRESS",
    ]


def _walks_under_kernels() -> None:
    from kvalloc.tests import guard_walk
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    for layout in ("straddling", "windowed"):
        driver = ConformanceDriver()
        guard_walk.walk(layout, driver, Library().launch, "fault", num_steps=90)
        driver.close()


def test_no_page_is_unmapped_under_a_kernel() -> None:
    """Cases 10 and 34: in every verb the cache itself waits for what reads its pages."""
    run_in_subprocess(_walks_under_kernels, granularity=PAGE, memory=1 << 20)


def _closing_waits() -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    library, driver = Library(), ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(g)
    driver.map(address, g, driver.create(g))
    library.launch(address, g)
    driver.close()
    assert not any(library.alive().values())


def test_closing_waits_for_the_device() -> None:
    run_in_subprocess(_closing_waits, granularity=G)


def _streams() -> None:
    import sys
    from unittest.mock import Mock, patch

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    library, driver = Library(), ConformanceDriver()
    cuda = library.cuda
    cuda.cuCtxPushCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
    non_blocking = int(cuda.cuStreamCreate(1)[1])
    cuda.cuCtxPopCurrent()
    g = driver.granularity
    address = driver.reserve(2 * g)
    for i in range(2):
        driver.map(address + i * g, g, driver.create(g))
    library.launch(address, g, non_blocking)
    torch = Mock()
    torch.cuda.is_initialized.return_value = True
    torch.cuda.current_stream.return_value.cuda_stream = non_blocking
    with patch.dict(sys.modules, torch=torch):
        fence = driver.fence()
    torch.cuda.current_stream.assert_called_once_with(0)
    driver.wait(fence)
    driver.unmap(address, g)
    library.launch(address + g, g, non_blocking)
    driver.wait(driver.fence())  # torch asleep: the default stream, which does not wait for that
    try:
        driver.unmap(address + g, g)
    except DriverError as error:
        print(error)


def test_fence_is_on_the_current_stream_of_torch() -> None:
    said = run_in_subprocess(_streams, granularity=G)
    assert said == "cuMemUnmap: CUDA_ERROR_ILLEGAL_ADDRESS\n"


def _two_threads(rounds: int) -> None:
    from threading import Thread

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    library, driver = Library(), ConformanceDriver()
    g = driver.granularity

    def work(address: int) -> None:
        for _ in range(rounds):
            page = driver.create(g)
            driver.map(address, g, page)
            driver.allow(address, g)
            driver.wait(driver.fence())
            driver.unmap(address, g)
            driver.release(page)
        finished.append(address)

    finished: list[int] = []
    address = driver.reserve(2 * g)
    mapper = Thread(target=work, args=(address + g,))
    mapper.start()
    work(address)
    mapper.join()
    assert sorted(finished) == [address, address + g]
    assert driver.num_calls["map"] == driver.num_calls["unmap"] == 2 * rounds
    assert library.count("mappings") == library.count("handles") == library.count("bytes") == 0
    assert library.count("events") <= 2
    driver.close()


def test_mapper_and_main_thread_at_full_speed() -> None:
    """Case 33."""
    run_in_subprocess(_two_threads, 1500, granularity=G)
