"""What a sequence and what a killed process leave behind, and what chance may decide."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import KVCache
from kvalloc.geometry import KVGeometry
from kvalloc.paged import PagedKVCache
from kvalloc.tests.host_children import run
from kvalloc.vmm import VmmKVCache

SECRET = 1234.5
PATTERN = torch.full((16,), SECRET).numpy().tobytes()
TINY = KVGeometry.uniform("t", layers=2, q_heads=1, kv_heads=1, head_dim=16, dtype="float32")


def arenas(cache: Any) -> bytes:
    return b"".join(t.contiguous().numpy().tobytes() for t in cache._arenas())


def pools(cache: Any) -> bytes:
    return b"".join(t.contiguous().numpy().tobytes() for t in (*cache._k, *cache._v))


def file_of_pages(cache: Any) -> bytes:
    fd = cache.physical.driver._file.fd
    return os.pread(fd, os.fstat(fd).st_size, 0)


CACHES: dict[str, tuple[Callable[[bool], KVCache], Callable[[Any], bytes]]] = {
    "contiguous": (
        lambda scrub: ContiguousKVCache(
            TINY, 400 * TINY.bytes_per_token, policy="exact", scrub=scrub
        ),
        arenas,
    ),
    "paged": (lambda scrub: PagedKVCache(TINY, 400 * TINY.bytes_per_token, scrub=scrub), pools),
    "vmm": (lambda scrub: VmmKVCache(TINY, 40 * 4096, 4096, limit=400, scrub=scrub), file_of_pages),
}


@pytest.mark.parametrize("leave", ["release", "truncate", "offload"])
@pytest.mark.parametrize("name", CACHES)
def test_scrub_leaves_no_secret_in_raw_memory(name: str, leave: str) -> None:
    """Whole memory is searched; without scrub the search finds the secret, so it can."""
    make, raw = CACHES[name]
    for scrub in (False, True):
        with make(scrub) as cache:
            cache.admit("a", 150)
            for layer in range(2):
                secret = torch.full((150, 1, 16), SECRET)
                cache.write(layer, ["a"], secret, secret, lens=[150])
            assert PATTERN in raw(cache)
            cache.truncate("a", 0) if leave == "truncate" else getattr(cache, leave)("a")
            assert (PATTERN in raw(cache)) != scrub
            cache.admit("b", 100)
            view: Any = cache.view(0, ["b"])
            assert bool((view.k == SECRET).any()) != scrub if name != "vmm" else True
            del view


def test_a_killed_process_leaves_no_memory_file() -> None:
    folder = Path("/dev/shm")
    before = set(folder.iterdir()) if folder.exists() else set()
    child = run("""
driver = HostDriver(G); mapped(driver, 8)
say(os.readlink(f"/proc/self/fd/{driver._file.fd}"))
os.kill(os.getpid(), 9)
""")
    assert child.returncode == -signal.SIGKILL
    assert child.stdout.startswith("/memfd:"), "a file without a name in any folder"
    assert (set(folder.iterdir()) if folder.exists() else set()) <= before


TIMES = {"environment", "seconds", "allocate_us", "attend_ms", "tpot_ms"}


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "command",
    [
        "compare shared-prefix --account --model tiny --memory 8MiB --limit 60 --seed 3",
        "compare chat --run --limit 4 --memory 8MiB --seed 3 -b contiguous:max -b paged:16 -b vmm",
    ],
)
def test_the_same_seed_gives_the_same_result_whatever_the_hashes(command: str) -> None:
    results = []
    for hash_seed in ("0", "4242"):
        done = subprocess.run(
            [sys.executable, "-m", "kvalloc.experiments", *command.split(), "--json", "-"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        results.append(without_times(json.loads(done.stdout)))
    assert results[0] == results[1]
    assert results[0]["backends"][0]["tokens"] > 0
