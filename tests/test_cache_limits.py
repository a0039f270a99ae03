"""Whole caches out of addresses, mappings and memory, and killed: nothing is lost or left."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvalloc.tests.host_children import PREAMBLE, run_well

CACHES = """
import gc
from pathlib import Path
import torch
from kvalloc.contiguous import ContiguousKVCache
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.kernels.attention import attend
from kvalloc.paged import PagedKVCache
from kvalloc.vmm import VmmKVCache

P = system.OS_PAGE
WIDE = KVGeometry.uniform("wide", layers=4, q_heads=8, kv_heads=8, head_dim=128, dtype="float32")
DEEP = KVGeometry.uniform("deep", layers=64, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")
MAKERS = {
    "contiguous": lambda shape, memory, **o: ContiguousKVCache(shape, memory, policy="exact", **o),
    "paged": lambda shape, memory, **o: PagedKVCache(shape, memory, **o),
    "vmm": lambda shape, memory, **o: VmmKVCache(shape, memory, 16 * P, **o),
}

def addresses():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[0]) * P

def limit_addresses(room):
    "Let the process take so many bytes more; None lifts the limit."
    most = -1 if room is None else addresses() + room
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

def error_of(call, *kinds):
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("it passed")

def write(cache, seq, value):
    "Every token of a sequence holds its value, in all layers."
    shape = cache.geometry.layers[0]
    tokens = cache.length(seq)
    kv = torch.full((tokens, shape.kv_heads, shape.head_dim), float(value))
    for layer in range(len(cache.geometry.layers)):
        cache.write(layer, [seq], kv, kv, lens=[tokens])

def holds(cache, seq, value):
    q = torch.ones(1, cache.geometry.q_heads, cache.geometry.layers[0].head_dim)
    last = len(cache.geometry.layers) - 1
    outs = [attend(q, cache.view(layer, [seq])) for layer in (0, last)]
    return all(torch.allclose(out, torch.full_like(out, value)) for out in outs)
"""


def test_a_cache_without_addresses_is_refused_and_leaves_none() -> None:
    """Of its four layers some fit: what they took is returned with the refusal."""
    said = run_well(f"""{CACHES}
for kind, make in MAKERS.items():
    make(WIDE, 1 << 26).close()
    before, files = addresses(), len(os.listdir("/proc/self/fd"))
    limit_addresses(700 << 20)
    for _ in range(3):
        say(error_of(lambda: make(WIDE, 1 << 30), MemoryError, DriverError))
    limit_addresses(None)
    assert addresses() - before < 32 << 20, (kind, (addresses() - before) >> 20)
    assert len(os.listdir("/proc/self/fd")) == files, kind
    with make(WIDE, 1 << 30) as cache:
        cache.admit("a", 9)
        write(cache, "a", 7)
        assert holds(cache, "a", 7), kind
""")
    lines = said.splitlines()
    assert len(lines) == 9
    assert all("give the cache less memory" in line for line in lines[:6]), lines
    assert all("ulimit -v" in line for line in lines[6:]), lines


def test_verbs_without_addresses() -> None:
    """Growth needs none; what copies to host memory is refused, and changes nothing."""
    said = run_well(f"""{CACHES}
for kind, make in MAKERS.items():
    cache = make(WIDE, 12_000 * WIDE.bytes_per_token)
    for seq, tokens in (("large", 9000), ("small", 40)):
        cache.admit(seq, tokens)
        write(cache, seq, len(seq))
    assert holds(cache, "large", 5) and holds(cache, "small", 5)
    cache.offload("small"); cache.restore("small")
    limit_addresses(24 << 20)  # a layer of "large" takes more, and malloc keeps no such piece
    say(error_of(lambda: cache.offload("large"), MemoryError))
    cache.check_invariants()
    assert holds(cache, "large", 5) and holds(cache, "small", 5)
    assert not cache.grow(["small"], 2000)
    write(cache, "small", 6)
    assert holds(cache, "small", 6), kind
    cache.release("small")
    assert not cache.grow(["large"])
    limit_addresses(None)
    cache.offload("large"); cache.restore("large")
    assert cache.length("large") == 9001
    cache.check_invariants()
    cache.close()
""")
    lines = said.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("the host has no memory for a copy of the") for line in lines), lines


def test_a_mapped_cache_near_the_most_mappings() -> None:
    """Told before the system's own limit; the others are served on, and what leaves makes room."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    if limit > 1 << 18:
        pytest.skip(f"vm.max_map_count is {limit}: using it up would take too long")
    said = run_well(f"""{CACHES}
limit = system.max_mappings()
cache = VmmKVCache(DEEP, limit * P, P, limit=512, max_rows=limit // 128)
before = system.num_mappings()
seqs = []
def fill():
    while True:
        cache.admit(len(seqs), 3)
        seqs.append(len(seqs))
        write(cache, seqs[-1], seqs[-1])
say(error_of(fill, DriverError))
assert 0.8 * limit < system.num_mappings() < limit, system.num_mappings()
cache.check_invariants()
assert len(seqs) > 100 and all(holds(cache, seq, seq) for seq in seqs)
assert "out of mappings" in error_of(lambda: cache.admit("new", 3), DriverError)
for seq in seqs[::2]:
    cache.release(seq)
assert cache.reclaim() >= 128 * len(seqs[::2])
assert not cache.grow(seqs[1::2], 20)
for seq in seqs[1::2]:
    write(cache, seq, seq)
    assert holds(cache, seq, seq)
cache.admit("new", 3)
write(cache, "new", 4)
assert holds(cache, "new", 4)
cache.check_invariants()
cache.close()
gc.collect()
assert system.num_mappings() < before + 50, (system.num_mappings(), before)
""")
    assert "out of mappings" in said and "sysctl -w vm.max_map_count" in said


@pytest.mark.parametrize("short_of", ["memory", "file size"])
def test_a_mapped_cache_whose_system_has_no_more_memory(short_of: str) -> None:
    """The pool would have pages, the system has not: growth is refused or fails, cleanly."""
    said = run_well(f"""{CACHES}
cache = MAKERS["vmm"](DEEP, 600 * 16 * P)
driver = cache.physical.driver
cache.admit("a", 9); write(cache, "a", 1)
room = driver.bytes_in_use + 200 * 16 * P
if {short_of!r} == "memory":
    from kvalloc.vmm import memfile
    system.available_bytes = lambda: memfile.MARGIN_BYTES + max(0, room - driver.bytes_in_use)
    driver._file._credit = 0
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
cache.admit("b", 9); write(cache, "b", 2)
def check():
    cache.check_invariants()
    assert driver.bytes_in_use == cache.physical.num_created * 16 * P
for _ in range(3):
    say(error_of(lambda: cache.admit("c", 9), OutOfMemory, DriverError))
    check()
def grow():
    if refused := cache.grow(["a", "b"], 1100):
        raise refused["a"]
say(error_of(grow, OutOfMemory, DriverError))
assert cache.length("a") == cache.length("b") == 9
check()
assert holds(cache, "a", 1) and holds(cache, "b", 2)
assert not cache.grow(["a", "b"]), "the page that they have"
write(cache, "b", 2)
cache.release("a")
cache.reclaim()
assert driver.bytes_in_use < 150 * 16 * P
cache.admit("c", 9); write(cache, "c", 3)
assert holds(cache, "b", 2) and holds(cache, "c", 3)
cache.close()
assert driver.bytes_in_use == 0
""")
    lines = said.splitlines()
    assert len(lines) == 4
    told = " needed, " if short_of == "memory" else "ulimit -f"
    assert all(told in line for line in lines), lines


SHARE = 384 << 20
ALIVE = f"""{CACHES}
cache = VmmKVCache(WIDE, {SHARE}, 1 << 21, ahead_tokens=64)
cache.admit("a", cache.capacity)
assert cache.physical.driver.bytes_in_use >= {SHARE} - (32 << 20)
say("alive")
sys.stdin.readline()
"""


def shared_memory() -> int:
    """Shared memory of the whole system."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    pytest.skip("this kernel does not tell shared memory apart (Shmem)")


def test_memory_of_a_killed_cache_returns_to_the_system() -> None:
    """Read from the system, since nobody is left to ask; other tests may take some meanwhile."""
    before = shared_memory()
    child = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + ALIVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "alive\n"
    taken = shared_memory()
    assert taken - before > SHARE // 2, "the system sees what the cache took"
    child.kill()
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while shared_memory() > taken - SHARE // 2:
        assert time.monotonic() < deadline, "the memory did not return"
        time.sleep(0.05)
