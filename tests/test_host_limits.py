"""Case 36: the host driver out of mappings, addresses, memory and files: each its own error."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvalloc.contract import OutOfMemory
from kvalloc.tests.host_children import run_well
from kvalloc.tests.host_memory import G, file_bytes, mapped, peek, poke, shared_bytes
from kvalloc.vmm import memfile, system
from kvalloc.vmm.host import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(G)
    yield driver
    driver.close()


def test_out_of_address_space_is_its_own_error() -> None:
    """Case 36."""
    said = run_well("""
driver = HostDriver(G)
address = mapped(driver, 1, 1)
before = system.num_mappings()
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
for _ in range(20):
    try:
        driver.reserve(9 << 30)
    except DriverError as error:
        message = str(error)
    else:
        raise AssertionError("reserved beyond the limit")
say(message)
assert abs(system.num_mappings() - before) < 4, "nothing leaked"
driver.map(address + G, G, driver.create(G)); driver.allow(address + G, G)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
driver.free(driver.reserve(9 << 30), 9 << 30)
try:
    driver.reserve(1 << 60)
except DriverError as error:
    say(str(error))
driver.close()
""")
    limited, unlimited = said.splitlines()
    assert "out of address space" in limited and f"{8 << 30} bytes" in limited
    assert "ulimit -v" in limited
    assert "out of address space" in unlimited


SCATTER = """
P, limit = system.OS_PAGE, system.max_mappings()
driver = HostDriver(P)
run = driver.reserve(3 * P)
for i in range(3):
    driver.map(run + i * P, P, driver.create(P))
driver.allow(run, 3 * P)
ctypes.memset(run, 3, 3 * P)
page = driver.create(P)
address = driver.reserve((limit + 10) * P)
before = system.num_mappings()
count = 0
try:
    # Every second address, so that no two mappings are one to the system.
    while count < limit:
        driver.map(address + 2 * count * P, P, page)
        count += 1
except DriverError as error:
    say(str(error))

def refused(call, *args):
    try:
        call(*args)
    except DriverError as error:
        return "out of mappings" in str(error)
"""


@pytest.fixture(scope="module")
def limit() -> int:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 18:
        pytest.skip(f"vm.max_map_count is {limit}: using it up would take too long")
    return limit


def test_out_of_mappings_is_its_own_error(limit: int) -> None:
    """Case 36: told while the rest of the process can still live, and every way back works."""
    said = run_well(f"""{SCATTER}
assert limit // 2 - before - 600 < count < limit // 2
assert driver.num_calls["map"] == count + 3
assert refused(driver.map, address + 2 * count * P, P, page), "and again"
filler = [bytearray(1 << 20) for _ in range(100)]
# State unchanged: the refused address is unmapped, the last one that passed is mapped.
for i in range(200):
    driver.unmap(address + 2 * (count - 1 - i) * P, P)
driver.map(address + 2 * count * P, P, page)
driver.allow(address + 2 * count * P, P)
ctypes.memset(address + 2 * count * P, 5, P)
driver.unmap(run + P, P)
assert driver.bytes_in_use == 4 * P
driver.close()
assert system.num_mappings() < before + 10, "nothing leaked"
""")
    assert said.startswith("map: out of mappings")
    assert f"sysctl -w vm.max_map_count={4 * limit}" in said


def test_unmap_at_the_hard_limit_is_refused_and_changes_nothing(limit: int) -> None:
    """Case 36: when others use up what the driver leaves, its calls fail one by one, cleanly."""
    run_well(f"""{SCATTER}
libc = system.libc()
filler = libc.mmap(0, 2048 * P, 0, system.IDLE, -1, 0)
used = 0
while libc.mprotect(filler + 2 * used * P, P, system.PROT_READ) == 0:
    used += 1
assert 0 < used < 1024
assert refused(driver.unmap, run + P, P)
assert any(refused(driver.reserve, P) for _ in range(8))
assert peek(run + P) == 3 and driver.num_calls["unmap"] == 0
libc.munmap(filler, 2048 * P)
driver.unmap(run + P, P)
assert peek(run) == peek(run + 2 * P) == 3
driver.free(driver.reserve(P), P)
""")


def test_out_of_physical_memory_is_a_refusal() -> None:
    """Case 36: asked for more than the machine has, the driver says no and nobody is killed."""
    run_well("""
driver = HostDriver(2 << 20)
huge = (system.available_bytes() // (2 << 20) + 1) * (2 << 20)
for _ in range(3):
    try:
        driver.create(huge)
    except OutOfMemory as error:
        assert error.unit == "pages" and 0 < error.free < error.needed == huge >> 21
    else:
        raise AssertionError("memory out of nothing")
assert driver.bytes_in_use == 0 == os.fstat(driver._file.fd).st_size
driver.create(2 << 20)
""")


def test_out_of_open_files_is_a_driver_error() -> None:
    said = run_well("""
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
try:
    HostDriver(G)
except DriverError as error:
    say(str(error))
resource.setrlimit(resource.RLIMIT_NOFILE, limits)  # whoever measures coverage opens a file
""")
    assert "ulimit -n" in said


def test_create_looks_at_the_available_memory(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 36, physical memory: refused before the system would kill."""
    available = memfile.MARGIN_BYTES + 10 * G + 5
    monkeypatch.setattr(
        system, "available_bytes", lambda: available - file_bytes(driver), raising=True
    )
    handles = [driver.create(G) for _ in range(8)]
    with pytest.raises(OutOfMemory) as caught:
        driver.create(4 * G)
    assert (caught.value.needed, caught.value.free, caught.value.unit) == (4, 2, "pages")
    handles += [driver.create(G), driver.create(G)]
    with pytest.raises(OutOfMemory):
        driver.create(G)
    assert driver.bytes_in_use == file_bytes(driver) == 10 * G
    driver.release(handles.pop())
    driver.create(G)


def test_a_refused_fallocate_leaves_the_file_as_it_was(
    driver: HostDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 36, physical memory: the system itself says no."""

    def refuse(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    driver.create(G)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(OutOfMemory) as caught:
            driver.create(2 * G)
    assert not caught.value.fragmented, "it is not there, whatever the system said is available"
    assert driver.bytes_in_use == file_bytes(driver) == G
    driver.create(2 * G)
    assert os.fstat(driver._file.fd).st_size == 3 * G


CGROUPS = {
    "none": ({}, 900 << 10),
    "v2": (
        {
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": "500000\n",
            "sys/fs/cgroup/outer/memory.current": "400000\n",
            "sys/fs/cgroup/outer/memory.stat": "anon 1\ninactive_file 30000\nactive_file 4000\n",
        },
        134_000,
    ),
    "v1": (
        {
            "proc/self/cgroup": "3:cpu:/x\n4:memory:/not/visible/here\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "200000\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 7000\n",
        },
        107_000,
    ),
    "v1 without a limit": (
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
        900 << 10,
    ),
    "overdrawn": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "100\n",
            "sys/fs/cgroup/memory.current": "200\n",
        },
        0,
    ),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_available_memory_respects_cgroups(tmp_path: Path, name: str) -> None:
    files, expected = CGROUPS[name]
    meminfo = {"proc/meminfo": "MemTotal: 5000 kB\nMemAvailable:    900 kB\n"}
    for path, text in {**meminfo, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert system.available_bytes(str(tmp_path)) == expected


def test_without_populate_the_driver_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.14 does not know MADV_POPULATE_WRITE."""
    old = system.libc()._replace(can_populate=False)
    monkeypatch.setattr(system, "libc", lambda: old)
    driver = HostDriver(G)
    gc.collect()  # what earlier tests forgot must not go in between
    before = shared_bytes()
    address, _ = mapped(driver, 8)
    assert shared_bytes() == before
    poke(address, b"works")
    assert peek(address, 5) == b"works"
    driver.close()
