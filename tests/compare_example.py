"""A compare.json made by the slow simulator, for tests of what is drawn and printed from one."""

from __future__ import annotations

from typing import Any

from kvalloc.tests import simulator
from kvalloc.tests.simulated_memory import Intervals, Pages


def requests(*rows: tuple[int, int, int, int]) -> list[dict[str, int]]:
    """Requests from rows of (step, prompt, output, max_new)."""
    return [dict(zip(("step", "prompt", "output", "max_new"), row, strict=True)) for row in rows]


BOOKS = ("live", "reserved", "free", "largest_free")
HOLE = requests((0, 4, 20, 20), (0, 4, 2, 12), (0, 4, 12, 12), (0, 4, 4, 4), (2, 10, 10, 10))


class Recording(simulator.Replay):
    """Keeps who holds which slot at the end of each step."""

    rows: list[list[list[int]]]
    waiting: list[int]

    def step(self, now: int, arrivals: list[int]) -> None:
        super().step(now, arrivals)
        if not hasattr(self, "rows"):
            self.rows, self.waiting = [], []
        self.waiting.append(len(self.queue))
        self.rows.append([run for seq in self.active for run in held_runs(self.store, seq)])


def held_runs(store: Intervals | Pages, seq: int) -> list[list[int]]:
    """``[start, stop, request, live]`` of a sequence: slots in token order, tokens stored."""
    if isinstance(store, Intervals):
        start, size = store.slots.index(seq), store.held(seq)
        return [[start, start + size, seq, store.length[seq]]]
    runs, left = [], store.length[seq]
    for page in [i for i, holder in enumerate(store.pages) if holder == seq]:
        start = page * store.page
        runs.append([start, start + store.page, seq, min(left, store.page)])
        left -= runs[-1][3]
    return runs


def compare_example(
    specs: tuple[str, ...] = ("contiguous:max", "paged:4", "vmm:4"),
    trace: list[dict[str, int]] = HOLE,
    slots: int = 80,
    *,
    on_full: str = "reject",
    on_failure: str = "drop",
) -> dict[str, Any]:
    """The dictionary that ``kvalloc compare --account --slots`` writes."""
    backends = []
    for spec in specs:
        counters = simulator.simulate(trace, slots, spec, on_full=on_full, on_failure=on_failure)
        replay = Recording(trace, simulator.memory(spec, slots, None), on_full, on_failure)
        replay.run()
        capacity = counters["series"]["free"][0] + counters["series"]["reserved"][0]
        times = dict.fromkeys(("allocate", "write", "view", "attend", "total"))
        backends.append(
            {
                "spec": spec,
                "capacity_tokens": capacity,
                **counters,
                "allocations": 0,
                "table_bytes": 0,
                "seconds": times,
                "allocate_us": dict.fromkeys(("p50", "p99", "max")),
                "attend_ms": dict.fromkeys(("p50", "p99")),
                "tpot_ms": dict.fromkeys(("p50", "p99")),
                "max_abs_error": None,
                "owners": {
                    "steps": counters["series"]["step"],
                    "slots": capacity,
                    "rows": replay.rows,
                    "numbers": {
                        **{name: list(counters["series"][name]) for name in BOOKS},
                        "waiting": replay.waiting,
                    },
                },
            }
        )
    return {
        "schema": 1,
        "environment": {},
        "trace": {"name": "hole", "requests": len(trace)},
        "backends": backends,
    }
