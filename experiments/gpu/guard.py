"""gpu-check, stage guard: what reads and writes past the last page of a sequence meet.

A fault on a GPU leaves its process without a usable context, so each touch has its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from .mapped import make_cache, write
from .stage import StageReport, Target, require

if TYPE_CHECKING:
    import torch

    from ...vmm.cache import VmmKVCache

MODULE = "kvalloc.experiments.gpu.guard"
SURVIVES = {
    "inside": "what is mapped can be read",
    "zero": "guard zero: a tile past the last page reads zeros",
    "zero-grow": "guard zero: a sequence grows under queued reads of whole tiles",
}
FAULTS = {
    "read": "guard fault: a read past the last page faults",
    "write": "guard fault: a write past the last page faults",
    "zero-write": "guard zero: a write to the zeros faults",
    "zero-beyond": "guard zero: a read behind the zeros faults",
}


def run(report: StageReport, target: Target) -> None:
    """One child per way of touching."""
    for mode, name in (SURVIVES | FAULTS).items():
        with report.check(name):
            ended = _touch(target, mode)
            report.add(touch=mode, ended=ended)
            require((ended == "survived") is (mode in SURVIVES), f"{mode}: {ended}")
    with report.check("this process is unharmed"):
        import torch

        total = int(torch.ones(1000, device=target.device).sum())
        require(total == 1000, f"a sum of a thousand ones is {total}")
    report.headline = "; ".join(f"{row['touch']}: {row['ended']}" for row in report.rows)


def _touch(target: Target, mode: str) -> str:
    """``survived``, or how the child that touched was stopped."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, target.kind, mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stdout.strip().splitlines()[-1:]
    if done.returncode == 0 and last:
        return last[0]
    if last == ["touching"] and done.returncode == -signal.SIGSEGV:
        return "SIGSEGV"
    words = (done.stderr or done.stdout).strip().splitlines()[-1:]
    raise RuntimeError(f"the child did not come to it: {done.returncode}, {words}")


def touch(kind: str, mode: str) -> None:
    """Touch memory and say what became of it; ends the process."""
    target, guard = Target(kind), "zero" if mode.startswith("zero") else "fault"
    cache = make_cache(target.driver(), guard=guard, scrub=True)
    length = cache.prefix_index.unit_tokens
    cache.admit("a", length)
    write(cache, "a", range(length))
    k = cache.view(0, ["a"]).k
    target.synchronize()
    print("touching", flush=True)
    try:
        if mode == "zero-grow":
            _grow(cache)
        else:
            _at(k, length, cache.page_bytes, mode)
        target.synchronize()
        print("survived", flush=True)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
    os._exit(0)  # the context may be gone: no destructor should meet it


def _at(k: torch.Tensor, length: int, page_bytes: int, mode: str) -> None:
    """Touch a tensor around the end of its tokens, which is the end of a page."""
    from ...vmm.guard import GUARD_TOKENS

    per_page = page_bytes // (k.stride(0) * k.itemsize)
    behind = length + -(-GUARD_TOKENS // per_page) * per_page
    if mode.endswith("write"):
        k[length : length + 3] = 1
    elif mode == "zero":
        seen = float(k[length : length + GUARD_TOKENS].float().abs().sum())
        require(seen == 0, f"zeros read as {seen}")
    else:
        start = {"inside": 0, "read": length, "zero-beyond": behind}[mode]
        float(k[start : start + 3].float().sum())


def _grow(cache: VmmKVCache) -> None:
    """Reads past the end stay queued while pages take the place of the zeros."""
    from ...vmm.guard import GUARD_TOKENS

    step, numbers = cache.prefix_index.unit_tokens // 2 + 1, cache.length("a")
    sums, expected = [], []
    for _ in range(8):
        v = cache.view(1, ["a"]).v[: numbers + GUARD_TOKENS, :, 2]  # 1 + the layer's number
        sums.append(v.float().sum())
        expected.append(numbers * 8 * 2.0)
        del v
        require(not cache.grow(["a"], step), "growth was refused")
        write(cache, "a", range(step))
        numbers += step
    seen = [float(value) for value in sums]
    require(seen == expected, f"queued kernels read {seen}, not {expected}")


if __name__ == "__main__":
    touch(*sys.argv[1:3])
