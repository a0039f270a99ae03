"""A million random operations over every backend, counted: ``make soak``.

The operations are those of state_machine.py. They are dealt out in walks of a few thousand over
all cores, each from a seed of its own, so that one that fails can be repeated alone:

    python -m kvalloc.tests.soak --backend "failing vmm" --seed 17 --operations 2000
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

WALK = 2000
SHARES = {"books": 55, "cache": 27, "failing": 15}
"""Parts of a hundred operations: books alone are fast, tensors are slow; the rest is readers."""
VERBS = ("admit", "grow", "fork", "truncate", "offload", "restore", "release", "reclaim", "rewrite")
REPORT = Path(__file__).resolve().parent.parent / "docs" / "results" / "cpu" / "soak.json"
"""What docs/reliability.md tells; written only where ``--json`` names it."""
DEFAULT = Path("out/soak.json")

Count = Counter[str]


def kind_of(name: str) -> str:
    return name.split()[0] if name.startswith(("books", "failing")) else "cache"


def walk_once(name: str, seed: int, num_operations: int) -> Count:
    """One walk from start to drain and close; its counts.

    ``lost``: tokens were not what was written; ``leaked``: memory or books were not in order at a
    refusal, at the drain or after the close.
    """
    import torch

    from kvalloc.tests.state_machine import Leaked
    from kvalloc.tests.state_machine_backends import walking

    torch.set_num_threads(1)
    logging.disable()  # windows that cannot let go of a page warn, thousands of times
    count = Count()
    walk: Any = None
    try:
        with walking(name, seed, max_prompt=random.Random(seed).choice([20, 90, 250])) as walk:
            walk.run(num_operations)
    except Exception as error:
        traceback.print_exc()
        print(f"{name!r} with seed {seed} fails", file=sys.stderr)
        count["leaked" if isinstance(error, Leaked) else "lost"] += 1
    if walk is not None:
        done = walk.done
        count.update({verb: done[verb] for verb in VERBS})
        count["refused"] = sum(n for verb, n in done.items() if verb.endswith("refused"))
        count["never_fit"] = sum(n for verb, n in done.items() if verb.endswith("never fits"))
        count["beyond_window"] = done["truncate beyond window"]
        count["misuses"], count["faults"] = done["misuse"], walk.num_faults
        count["checks"], count["tokens_read"] = walk.num_checks, walk.num_read
        count["prefix_hit_tokens"] = walk.num_hits
    count["operations"] = num_operations
    return count


def read_hostile_files(name: str, seed: int, num_operations: int) -> Count:
    """Read mutated trace files: each is a trace or one sentence."""
    from kvalloc.tests.hostile_traces import mutated, trace_or_sentence

    chance, count = random.Random(seed), Count(operations=num_operations)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        for _ in range(num_operations):
            path.write_bytes(mutated(chance))
            try:
                count["files_read" if trace_or_sentence(path) else "files_refused"] += 1
            except Exception:
                traceback.print_exc()
                print(f"{name!r} with seed {seed} fails", file=sys.stderr)
                count["readers_failed"] += 1
    return count


def plan(num_operations: int, seed: int, only: str | None) -> list[tuple[str, int, int]]:
    """Walks as (backend, seed, operations), every backend in turn."""
    from kvalloc.tests.state_machine_backends import NAMES

    walks: list[tuple[str, int, int]] = []
    names = [only] if only else [*NAMES, "readers"]
    for name in names:
        alike = sum(kind_of(other) == kind_of(name) for other in NAMES)
        share = 100 - sum(SHARES.values())
        if name != "readers":
            share = -(-SHARES[kind_of(name)] * 1000 // alike)  # thousandths, rounded up
            todo = -(-num_operations * share // 100_000)
        else:
            todo = num_operations * share // 100
        todo = num_operations if only else todo
        for at in range(0, todo, WALK):
            walks.append((name, seed + len(walks), min(WALK, todo - at)))
    if only:
        return [(only, seed + i, n) for i, (_, _, n) in enumerate(walks)]
    random.Random(seed).shuffle(walks)  # both cores have something of everything to the end
    return walks


def soak(walks: list[tuple[str, int, int]], jobs: int) -> dict[str, Count]:
    """Make the walks; counts by backend, progress on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    counts: dict[str, Count] = {}
    with (
        ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task("operations", total=sum(n for _, _, n in walks))
        futures = {
            pool.submit(read_hostile_files if walk[0] == "readers" else walk_once, *walk): walk
            for walk in walks
        }
        for future in as_completed(futures):
            name, _, num_operations = futures[future]
            counts.setdefault(name, Count()).update(future.result())
            progress.advance(bar, num_operations)
    return counts


def report(counts: dict[str, Count], head: dict[str, Any]) -> dict[str, Any]:
    """The JSON document: totals, and a row for each backend."""
    total: Count = sum(counts.values(), Count())
    names = ["lost", "leaked", "readers_failed", *sorted(total)]
    total["bad_inputs"] = total["misuses"] + total["files_refused"]
    return {
        **head,
        "totals": {name: total[name] for name in dict.fromkeys([*names, "bad_inputs"])},
        "rows": [
            {"backend": name, "kind": kind_of(name), **{key: n for key, n in row.items() if n}}
            for name, row in sorted(counts.items())
        ],
    }


def main() -> int:
    """Soak, print the totals and write the report; 1 if anything was lost or leaked."""
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--backend", help="one backend only, by its name in the report")
    parser.add_argument("--json", type=Path, default=DEFAULT, help=f"report (default: {DEFAULT})")
    options = parser.parse_args()
    from kvalloc.experiments.environment import environment
    from kvalloc.experiments.output import emit_json, to_json

    command = shlex.join(["python", "-m", "kvalloc.tests.soak", *sys.argv[1:]])
    head = {
        "schema": 1,
        "experiment": "soak",
        "environment": environment() | {"command": command},  # as it was when the run began
        "settings": {"operations": options.operations, "seed": options.seed, "jobs": options.jobs},
    }
    begin = time.monotonic()
    walks = plan(options.operations, options.seed, options.backend)
    counts = soak(walks, options.jobs)
    document = report(counts, head | {"seconds": round(time.monotonic() - begin, 1)})
    print(to_json(document["totals"]), end="")
    emit_json(document, options.json)
    print(f"Written to {options.json}")
    failed = sum(document["totals"][name] for name in ("lost", "leaked", "readers_failed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
