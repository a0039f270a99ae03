"""The cuda driver's own doings: what it asks of CUDA, where, and what it gives back.

Against the conformance library (``tests/conformance``): the calls are checked, not a GPU. Each
function whose name starts with ``_`` runs in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvalloc.tests.conformance.conformance import run_in_subprocess

G = 65536  # granularity of the library in these tests: small is fast


def _run_of_three() -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver

    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(4 * g)
    pages = [driver.create(g) for _ in range(3)]
    for i, page in enumerate(pages):
        driver.map(address + i * g, g, page)
    driver.allow(address, 3 * g)
    driver.unmap(address, 3 * g)
    for page in pages:
        driver.release(page)
    driver.free(address, 4 * g)
    print(driver.num_calls)
    driver.close()


def test_one_grant_and_one_unmap_per_run(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    counted = run_in_subprocess(_run_of_three, granularity=G, log=log)
    calls = [line.split() for line in log.read_text().splitlines()]
    assert all(call[-1] == "0" for call in calls)
    memory = [call for call in calls if call[0].startswith("cuMem")]
    assert [call[0].removeprefix("cuMem") for call in memory] == [
        "GetAllocationGranularity",
        "AddressReserve",
        *["Create"] * 3,
        *["Map"] * 3,
        "SetAccess",
        "Unmap",
        *["Release"] * 3,
        "AddressFree",
    ]
    assert memory[8][1].endswith(f"+{3 * G}") and memory[8][2] == "devices=1"
    assert all("types=0" in call for call in memory if call[0] == "cuMemCreate")
    assert eval(counted) == dict(reserve=1, free=1, create=3, release=3, map=3, allow=1, unmap=1)


def _granularities() -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    smallest, larger = ConformanceDriver(), ConformanceDriver(granularity="recommended")
    print(smallest.granularity, larger.granularity)
    before = Library().count()
    for call in (larger.create, larger.reserve, lambda size: larger.map(1 << 40, size, 1)):
        for size in (smallest.granularity, 0, -larger.granularity, larger.granularity + 1):
            try:
                call(size)
            except ValueError as error:
                assert "round up to 131072 bytes" in str(error)
            else:
                raise AssertionError(size)
    assert Library().count() == before, "refused at the door"
    try:
        ConformanceDriver(granularity="large")  # type: ignore[arg-type]  # pyright: ignore
    except ValueError as error:
        print(error)


def test_granularity_is_asked_and_enforced_at_the_door() -> None:
    """Case 32."""
    said = run_in_subprocess(_granularities, granularity=G, recommended=2 * G).splitlines()
    assert said[0] == f"{G} {2 * G}"
    assert "'large' is unknown" in said[1]


def _contexts() -> None:
    import threading

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    def current() -> int:
        return int(cuda.cuCtxGetCurrent()[1])

    library = Library()
    cuda = library.cuda
    first = ConformanceDriver(0)
    assert library.count("contexts") == 1, "the primary context, retained"
    assert current() == 0, "and not left behind"
    other = cuda.cuDevicePrimaryCtxRetain(1)[1]
    cuda.cuCtxPushCurrent(other)
    address, g = first.reserve(1 << 20), first.granularity
    page = first.create(g)
    assert current() == int(other), "the caller's context is restored"

    def map_page() -> None:
        first.map(address, g, page)
        first.allow(address, g)
        first.wait(first.fence())
        found.append(current())

    found: list[int] = []
    thread = threading.Thread(target=map_page)
    thread.start()
    thread.join()
    assert found == [0], "a thread without a context works, and stays without"
    second = ConformanceDriver(1)
    assert library.count("contexts") == 2, "a current context of the device is used as it is"
    pushes = library.count("cuCtxPushCurrent")
    second.create(g)
    assert library.count("cuCtxPushCurrent") == pushes, "and costs no switch"
    try:
        first.unmap(address + g, g)
    except Exception:
        assert current() == int(other), "restored after a refusal too"
    for driver in (first, second, first):
        driver.close()
    assert library.count("contexts") == 1, "only what was retained is released, once"
    assert library.count("handles") == library.count("bytes") == 0


def test_context_is_current_wherever_a_verb_is_called_and_restored_after() -> None:
    run_in_subprocess(_contexts, granularity=G, devices=2)


def _everything_returns() -> None:
    import gc

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    library = Library()
    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(64 * g)
    pages = [driver.create(g) for _ in range(64)]
    for i, page in enumerate(pages):
        driver.map(address + i * g, g, page)
    driver.release(pages[0])
    try:
        driver.release(pages[0])
    except DriverError as error:
        assert "release each one once" in str(error)
    else:
        raise AssertionError
    assert library.count("cuMemRelease") == 1
    assert driver.bytes_in_use == library.count("bytes") == 64 * g, "the mapping holds it"
    driver.unmap(address, g)
    assert driver.bytes_in_use == library.count("bytes") == 63 * g
    fences = [driver.fence() for _ in range(3)]
    assert library.count("events") == 3
    del fences
    driver.fence()
    assert library.count("events") == 3, "a fence that is gone leaves its event to the next"
    library.fail("cuMemUnmap", 10)
    try:
        driver.close()
    except DriverError as error:
        assert str(error) == "cuMemUnmap: CUDA_ERROR_UNKNOWN"
    driver.close()
    driver.close()
    assert not any(library.alive().values()), library.alive()
    verbs = {"reserve": (g,), "create": (g,), "fence": (), "map": (address, g, 1), "release": (1,)}
    for verb, args in verbs.items():
        try:
            getattr(driver, verb)(*args)
        except DriverError as error:
            assert str(error) == f"{verb}: the driver is closed; make a new one"
        else:
            raise AssertionError(verb)
    dropped = ConformanceDriver()
    dropped.create(g)
    del dropped
    gc.collect()
    assert not any(library.alive().values()), "dropped without close"


def test_everything_returns_measured_not_assumed() -> None:
    """Case 31."""
    run_in_subprocess(_everything_returns, granularity=G)


def _peers(granted: bool) -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    try:
        driver = ConformanceDriver(0, peers=[1])
    except DriverError as error:
        assert not granted
        assert str(error).startswith("Device 1 cannot reach the memory of device 0")
        assert Library().count("contexts") == 0
        return
    address, g = driver.reserve(1 << 20), driver.granularity
    driver.map(address, g, driver.create(g))
    driver.allow(address, g)
    cuda = Library().cuda
    where = cuda.CUmemLocation()
    where.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    cuda.cuCtxPushCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
    for where.id in range(3):
        status, flags = cuda.cuMemGetAccess(where, address)
        assert (status, int(flags)) == (0, 3 if where.id < 2 else 0)
    assert granted


@pytest.mark.parametrize("granted", [True, False])
def test_peers_get_access_or_are_refused_clearly(granted: bool) -> None:
    """Case 35."""
    run_in_subprocess(_peers, granted, granularity=G, devices=3, peers=int(granted))


def _shareable() -> None:
    import os

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    cuda = Library().cuda
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    for shareable in (True, False):
        driver = ConformanceDriver(shareable=shareable)
        page = driver.create(driver.granularity)
        cuda.cuCtxPushCurrent(cuda.cuDevicePrimaryCtxRetain(0)[1])
        status, descriptor = cuda.cuMemExportToShareableHandle(page, kind, 0)
        assert (status == 0) is shareable
        if shareable:
            os.close(int(descriptor))
        cuda.cuCtxPopCurrent()


def test_only_shareable_pages_can_be_exported() -> None:
    run_in_subprocess(_shareable, granularity=G)
