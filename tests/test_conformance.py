"""Both drivers give the same answers, and the conformance library refuses what CUDA refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvalloc.tests.conformance import conformance
from kvalloc.tests.conformance.conformance import run_in_subprocess

G = 65536


def _compare() -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver
    from kvalloc.tests.driver_script import play
    from kvalloc.vmm.host import HostDriver

    for driver in (HostDriver(65536), ConformanceDriver()):
        play(driver)
        print(driver.num_calls)


def test_both_drivers_answer_alike() -> None:
    host, cuda = run_in_subprocess(_compare, granularity=G).splitlines()
    assert host == cuda


def _page_rules() -> None:
    from kvalloc.tests.conformance.conformance import Library

    library = Library()
    call, cuda, g, bad = library.call, library.cuda, 65536, "CUDA_ERROR_INVALID_VALUE"
    call("cuDeviceGet", 0, gives="CUDA_ERROR_NOT_INITIALIZED")
    call("cuInit", 0)
    properties = library.page_properties()
    call("cuMemCreate", g, properties, 0, gives="CUDA_ERROR_INVALID_CONTEXT")
    call("cuMemAddressReserve", g, 0, 0, 0, gives="CUDA_ERROR_INVALID_CONTEXT")
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    call("cuMemCreate", g + 4096, properties, 0, gives=bad)
    call("cuMemCreate", g, cuda.CUmemAllocationProp(), 0, gives=bad)
    call("cuMemCreate", g, properties, 1, gives=bad)
    call("cuMemCreate", 1 << 40, properties, 0, gives="CUDA_ERROR_OUT_OF_MEMORY")
    page = call("cuMemCreate", 2 * g, properties, 0)
    assert library.count("bytes") == 2 * g
    call("cuMemRelease", page)
    call("cuMemRelease", page, gives=bad)
    assert library.count("bytes") == 0
    call("cuMemAddressReserve", g - 4096, 0, 0, 0, gives=bad)
    call("cuMemAddressReserve", g, 3 * g, 0, 0, gives=bad)
    address = call("cuMemAddressReserve", 8 * g, 1 << 21, 0, 0)
    assert address % (1 << 21) == 0
    call("cuMemAddressFree", address, 4 * g, gives=bad)
    call("cuMemAddressFree", address, 8 * g)
    call("cuMemAddressFree", address, 8 * g, gives=bad)


def _mapping_rules() -> None:
    from kvalloc.tests.conformance.conformance import Library

    library = Library()
    call, g, bad = library.call, 65536, "CUDA_ERROR_INVALID_VALUE"
    call("cuInit", 0)
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    page = call("cuMemCreate", 2 * g, library.page_properties(), 0)
    address = call("cuMemAddressReserve", 8 * g, 0, 0, 0)
    call("cuMemMap", address, 2 * g, g, page, 0, gives=bad)  # an offset
    call("cuMemMap", address, g, 0, page, 0, gives=bad)  # a part of the page
    call("cuMemMap", address + 4096, 2 * g, 0, page, 0, gives=bad)
    call("cuMemMap", address, 2 * g, 0, page + 1, 0, gives=bad)
    call("cuMemMap", address, 2 * g, 0, page, 1, gives=bad)  # a flag
    call("cuMemMap", address, 2 * g, 0, page, 0)
    call("cuMemMap", address + g, 2 * g, 0, page, 0, gives=bad)  # onto itself
    call("cuMemMap", address + 7 * g, 2 * g, 0, page, 0, gives=bad)  # past the range
    access = library.access()
    call("cuMemSetAccess", address, g, [access], 1, gives=bad)
    call("cuMemSetAccess", address, 2 * g, [], 0, gives=bad)
    call("cuMemSetAccess", address, 2 * g, [access], 1)
    call("cuMemSetAccess", address, 2 * g, [library.access("READ")], 1)
    access.flags = 2  # to write alone
    call("cuMemSetAccess", address, 2 * g, [access], 1, gives=bad)
    access = library.access()
    access.location.id = 1
    call("cuMemSetAccess", address, 2 * g, [access], 1, gives="CUDA_ERROR_INVALID_DEVICE")
    call("cuMemUnmap", address, g, gives=bad)
    call("cuMemUnmap", address, 4 * g, gives=bad)
    call("cuMemAddressFree", address, 8 * g, gives=bad)
    call("cuMemRelease", page)
    call("cuMemMap", address + 4 * g, 2 * g, 0, page, 0, gives=bad)  # after its release
    assert library.count("bytes") == 2 * g, "the mapping holds the memory"
    call("cuMemUnmap", address, 2 * g)
    assert library.count("bytes") == 0
    call("cuMemUnmap", address, 2 * g, gives=bad)


def _event_rules() -> None:
    from kvalloc.tests.conformance.conformance import Library

    library = Library()
    call = library.call
    call("cuInit", 0)
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    call("cuEventQuery", 12345, gives="CUDA_ERROR_INVALID_HANDLE")
    event = call("cuEventCreate", 2)
    call("cuEventRecord", event, 77, gives="CUDA_ERROR_INVALID_HANDLE")
    library.launch(1 << 40, 1)
    call("cuEventQuery", event)  # recorded nothing yet
    call("cuEventRecord", event, 0)
    library.launch(1 << 41, 1)  # after the event
    call("cuEventQuery", event, gives="CUDA_ERROR_NOT_READY")
    call("cuEventSynchronize", event)
    call("cuEventQuery", event)
    call("cuEventDestroy", event)
    call("cuEventDestroy", event, gives="CUDA_ERROR_INVALID_HANDLE")
    call("cuDevicePrimaryCtxRelease", 0)
    call("cuDevicePrimaryCtxRelease", 0, gives="CUDA_ERROR_INVALID_CONTEXT")
    call("cuCtxSynchronize", gives="CUDA_ERROR_INVALID_CONTEXT")
    assert not any(library.alive().values())


def _shared() -> None:
    import ctypes
    import os

    from kvalloc.tests.conformance.conformance import Library

    library = Library()
    call, cuda, g, bad = library.call, library.cuda, 65536, "CUDA_ERROR_INVALID_VALUE"
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    call("cuInit", 0)
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", 0))
    properties = library.page_properties()
    properties.requestedHandleTypes = kind
    page = call("cuMemCreate", g, properties, 0)
    descriptor = call("cuMemExportToShareableHandle", page, kind, 0)
    call("cuMemImportFromShareableHandle", 1000, kind, gives=bad)  # no file
    other = call("cuMemImportFromShareableHandle", descriptor, kind)
    assert other != page and library.count("handles") == 2 and library.count("bytes") == g
    os.close(descriptor)
    address = call("cuMemAddressReserve", 2 * g, 0, 0, 0)
    for i, handle in enumerate((page, other)):
        call("cuMemMap", address + i * g, g, 0, handle, 0)
    call("cuMemSetAccess", address, 2 * g, [library.access()], 1)
    ctypes.memset(address, 65, 3)
    assert ctypes.string_at(address + g, 3) == b"AAA"
    call("cuMemUnmap", address, 2 * g)
    for handle in (page, other):
        call("cuMemRelease", handle)
    assert library.count("handles") == library.count("bytes") == 0


@pytest.mark.parametrize("rules", [_page_rules, _mapping_rules, _event_rules, _shared])
def test_the_library_is_as_strict_as_cuda(rules: Callable[[], None]) -> None:
    run_in_subprocess(rules, granularity=G)


def _touches(stage: str) -> None:
    import ctypes

    from kvalloc.tests.conformance.conformance import ConformanceDriver

    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(2 * g)
    page = driver.create(g)
    if stage != "reserved":
        driver.map(address, g, page)
    if stage in ("allowed", "neighbour", "unmapped"):
        driver.allow(address, g)
        assert ctypes.string_at(address, 4) == b"\xff" * 4
    if stage == "unmapped":
        driver.unmap(address, g)
    ctypes.memset(address + (g if stage == "neighbour" else 0), 1, 4)
    print("alive")


@pytest.mark.parametrize("stage", ["reserved", "mapped", "allowed", "neighbour", "unmapped"])
def test_only_mapped_and_allowed_memory_can_be_touched(stage: str) -> None:
    if stage == "allowed":
        assert run_in_subprocess(_touches, stage, granularity=G) == "alive\n"
    else:
        with pytest.raises(AssertionError, match="exit status -11"):
            run_in_subprocess(_touches, stage, granularity=G)


def _read_only(touch: str) -> None:
    import ctypes

    from kvalloc.tests.conformance.conformance import ConformanceDriver

    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(2 * g)
    page = driver.create(g)
    for i in range(2):
        driver.map(address + i * g, g, page)
    driver.allow(address, g)
    driver.allow(address + g, g, write=False)
    ctypes.memset(address, 7, 4)
    assert ctypes.string_at(address + g, 4) == b"\7" * 4
    print("ready", flush=True)
    if touch == "write":
        ctypes.memset(address + g, 1, 4)


@pytest.mark.parametrize("touch", ["read", "write"])
def test_read_only_memory_dies_of_a_write_alone(touch: str) -> None:
    if touch == "read":
        assert run_in_subprocess(_read_only, touch, granularity=G) == "ready\n"
    else:
        with pytest.raises(AssertionError, match="exit status -11\nready"):
            run_in_subprocess(_read_only, touch, granularity=G)


def _no_less_access_under_work() -> None:
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.driver import DriverError

    library, driver = Library(), ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(g)
    driver.map(address, g, driver.create(g))
    driver.allow(address, g, write=False)
    library.launch(address, g)
    driver.allow(address, g)  # more is no harm
    try:
        driver.allow(address, g, write=False)
    except DriverError as error:
        print(error)


def test_access_is_not_taken_from_queued_work() -> None:
    said = run_in_subprocess(_no_less_access_under_work, granularity=G)
    assert said == "cuMemSetAccess: CUDA_ERROR_ILLEGAL_ADDRESS\n"


def _aliases() -> None:
    import ctypes

    from kvalloc.tests.conformance.conformance import ConformanceDriver

    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(2 * g)
    page = driver.create(g)
    driver.map(address, g, page)
    driver.map(address + g, g, page)
    driver.allow(address, 2 * g)
    ctypes.memset(address, 65, 3)
    assert ctypes.string_at(address + g, 3) == b"AAA"


def test_a_page_mapped_twice_is_seen_at_both_addresses() -> None:
    run_in_subprocess(_aliases, granularity=G)


def test_without_a_compiler_it_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "compiler", lambda: None)
    monkeypatch.setattr(conformance, "compiled", conformance.compiled.__wrapped__)
    with pytest.raises(pytest.skip.Exception, match="no C compiler"):
        conformance.build()
