"""Growing a batch in one call is what growing one after the other is, whoever ends in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contract import Allocator
from kvalloc.experiments.scheduler import Scheduler
from kvalloc.experiments.scheduling import OnFailure
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.paged import PagedAllocator
from kvalloc.tests.failing_driver import ShortDriver
from kvalloc.vmm import VmmAllocator, VmmKVCache
from kvalloc.vmm.host import HostDriver

FULL = KVGeometry("full", (LayerShape(1, 8),) * 2, 1, "float16")
MIXED = KVGeometry("mixed", (LayerShape(1, 8, window=24), LayerShape(1, 8)), 1, "float16")
TOKEN = 64  # bytes, over both layers


class OneByOne(Scheduler):
    """The definition: one sequence grows, or is refused, or ends, before the next is looked at."""

    def _grow_all(self) -> None:
        at = 0
        while at < len(self.active):
            refused = self.allocator.grow([self.active[at]])
            if refused:
                at = self._fail(at, *refused.values())
            else:
                self.counts.tokens += 1
                at += 1 - self._retire(at + 1)


BOOKS: dict[str, Callable[[KVGeometry, int], Allocator]] = {
    "paged": lambda geometry, tokens: PagedAllocator(geometry, tokens * TOKEN, 4),
    "vmm": lambda geometry, tokens: VmmAllocator(geometry, tokens * TOKEN, 64),
    "contiguous": lambda geometry, tokens: ContiguousAllocator(
        geometry, tokens * TOKEN, policy="exact"
    ),
}


def play(kind: type[Scheduler], allocator: Allocator, seed: int, on_failure: OnFailure) -> Any:
    """Requests of a few topics in little memory; returns the counts, and the books per step."""
    random = np.random.default_rng(seed)
    num = 60
    prompt, output = random.integers(8, 40, num), random.integers(0, 30, num)
    prefix = [[(int(random.integers(5)), int(n) // 4 * 4)] for n in prompt]
    scheduler = kind(
        allocator, prompt, output, output + 3, on_failure=on_failure, prefix=prefix, max_running=12
    )
    books, arrived = [], 0
    while arrived < num or scheduler.active or scheduler.waiting:
        scheduler.step(range(arrived, min(arrived + 2, num)))
        arrived = min(arrived + 2, num)
        allocator.check_invariants()
        books.append((allocator.usage()._replace(warm=0), list(scheduler.active)))
    return asdict(scheduler.counts) | {"allocations": 0}, books


def test_a_batch_is_its_sequences_on_a_short_system() -> None:
    """The pool has pages, the system has not: what a window lets go of spares a prefix, too."""
    shape = LayerShape(1, 512)
    wide = KVGeometry("wide", (LayerShape(1, 512, window=8), shape), 1, "float32")
    num_hits = 0
    for seed in range(3):
        played = []
        for kind in (Scheduler, OneByOne):
            inner = HostDriver(4096)
            driver = ShortDriver(inner, 240)
            with VmmKVCache(wide, 4000 * 4096, 4096, driver=driver) as cache:
                played.append(play(kind, cache, seed, "recompute"))
            inner.close()
        assert played[0] == played[1]
        num_hits += played[0][0]["hit_tokens"]
    assert num_hits


@pytest.mark.parametrize("on_failure", ["recompute", "swap", "drop"])
@pytest.mark.parametrize("geometry", [FULL, MIXED], ids=["full", "window"])
@pytest.mark.parametrize("backend", BOOKS)
def test_a_batch_is_its_sequences_one_after_the_other(
    backend: str, geometry: KVGeometry, on_failure: OnFailure
) -> None:
    """Prefixes are evicted in the same order, so that later prompts find the same tokens."""
    num_hits = 0
    for seed in range(4):
        batched, single = (
            play(kind, BOOKS[backend](geometry, 130), seed, on_failure)
            for kind in (Scheduler, OneByOne)
        )
        assert batched == single
        num_hits += batched[0]["hit_tokens"]
        assert batched[0]["completed"]
    assert (num_hits > 0) == (backend != "contiguous")
