"""What kills a process, and what must not: the host driver in children of its own."""

from __future__ import annotations

import pytest

from kvalloc.tests.host_children import run_to_death, run_well

FAULTS = {
    "read of an unmapped address": """
address = HostDriver(G).reserve(G); say("ready"); peek(address)""",
    "read past the mapped pages": """
driver = HostDriver(G); address = mapped(driver, 2, 1)
peek(address + 2 * G - 1); say("ready"); peek(address + 2 * G)""",
    "read of a mapping without access": """
driver = HostDriver(G); address = driver.reserve(G)
driver.map(address, G, driver.create(G)); say("ready"); peek(address)""",
    "read after unmap": """
driver = HostDriver(G); address = mapped(driver, 1)
peek(address); driver.unmap(address, G); say("ready"); peek(address)""",
    "read after close": """
driver = HostDriver(G); address = mapped(driver, 1)
peek(address); driver.close(); say("ready"); peek(address)""",
    "guard zero: write to an unmapped address": """
driver = HostDriver(G, "zero"); address = driver.reserve(G)
assert peek(address) == 0; say("ready"); ctypes.memset(address, 0, 1)""",
    "write to a page that may be read alone": """
driver = HostDriver(G); address = mapped(driver, 1)
ctypes.memset(address, 7, 1); driver.allow(address, G, write=False)
assert peek(address) == 7; say("ready"); ctypes.memset(address, 0, 1)""",
    "a forked child reads the parent's memory": """
driver = HostDriver(G); address = mapped(driver, 1)
if os.fork() == 0:
    say("ready"); peek(address)
status = os.wait()[1]; assert peek(address) == 0
os.kill(os.getpid(), os.WTERMSIG(status))""",
}


@pytest.mark.parametrize("name", FAULTS)
def test_dies_of_a_fault(name: str) -> None:
    assert run_to_death(FAULTS[name]) == "ready\n"


def test_tensors_die_of_the_same_faults() -> None:
    """One child imports torch, its own children fault."""
    run_well("""
import signal, torch
torch.set_num_threads(1)

def over_read():
    driver = HostDriver(G); address = mapped(driver, 2, 1)
    tensor = driver.tensor(address, (3 * G // 4,), torch.float32)
    return tensor[: 2 * G // 4].sum, tensor.sum

def touched_after_close():
    driver = HostDriver(G)
    tensor = driver.tensor(mapped(driver, 1), (G,), torch.uint8)
    return tensor.sum, lambda: driver.close() or tensor.sum()

def touched_after_free_under_guard_zero():
    driver = HostDriver(G, "zero"); address = driver.reserve(G)
    tensor = driver.tensor(address, (G,), torch.uint8)
    return tensor.sum, lambda: driver.free(address, G) or tensor.sum()

for make in (over_read, touched_after_close, touched_after_free_under_guard_zero):
    good, bad = make()
    for call, death in ((good, 0), (bad, signal.SIGSEGV)):
        if os.fork() == 0:
            good, bad = make()  # a driver of its own: the parent's is refused here
            assert float(good()) == 0
            if call is not good and death:
                bad()
            os._exit(0)
        status = os.wait()[1]
        assert os.WIFEXITED(status) != bool(death), (make, status)
        assert os.waitstatus_to_exitcode(status) == -death, (make, status)
""")


def test_guard_zero_reads_zeros_and_takes_no_memory() -> None:
    run_well("""
import mmap
def private_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(l.split()[1]) for l in file if l.startswith("Anonymous:"))

driver = HostDriver(G, "zero")
num_pages = (64 << 20) // G
address = driver.reserve(num_pages * G)
before = private_kib()
assert not any(peek(address + i * G) for i in range(num_pages))
assert private_kib() - before < 1024, "64 MiB were read"
driver.map(address, G, driver.create(G)); driver.allow(address, G)
ctypes.memset(address, 7, G)
assert peek(address) == 7 and peek(address + G) == 0
driver.unmap(address, G)
assert peek(address) == 0, "zeros again"
""")


def test_the_interpreter_ends_silently_with_everything_open() -> None:
    said = run_well("""
import torch
driver = HostDriver(G)
tensor = driver.tensor(mapped(driver, 2), (G,), torch.uint8)
other = HostDriver(G); mapped(other, 1)
cycle = [tensor, other]; cycle.append(cycle)
if os.fork() == 0:
    sys.exit()  # a child ends silently too
assert os.wait()[1] == 0
if os.fork() == 0:
    late = HostDriver(G)
    tensor = late.tensor(mapped(late, 1), (G,), torch.uint8)
    late.close()
    sys.exit()
assert os.wait()[1] == 0
del driver
say(int(tensor.sum()))
""")
    assert said == "0\n"


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    run_well("""
driver = HostDriver(G); address = mapped(driver, 1)
ctypes.memset(address, 7, G)
child = os.fork()
if child == 0:
    try:
        driver.create(G)
    except DriverError as error:
        assert "make one after the fork" in str(error)
        driver.close()
        own = HostDriver(G)
        ctypes.memset(mapped(own, 3), 1, 3 * G)
        own.close()
        os._exit(42)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
assert peek(address) == 7
driver.map(driver.reserve(G), G, driver.create(G))
assert driver.bytes_in_use == 2 * G
driver.unmap(address, G)
driver.close()
""")


def test_a_platform_without_memfd_is_told_in_one_sentence() -> None:
    said = run_well("""
del os.memfd_create
sys.platform = "darwin"
try:
    HostDriver(G)
except DriverError as error:
    say(str(error))
""")
    assert said == (
        "the host driver needs memfd_create of a 64-bit Linux; "
        "on this darwin use the contiguous or the paged backend\n"
    )
