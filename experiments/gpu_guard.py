"""gpu-check, stage guard: reading what is not mapped ends the reader, and nobody else.

A fault on a GPU leaves its process without a usable context, so each touch has its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ..vmm.driver import Driver
from .gpu_stage import NotHere, Report, Target, require
from .gpu_vmm import make_cache, write

MODULE = "kvalloc.experiments.gpu_guard"
FAULTS = ("read", "write")


def run(report: Report, target: Target) -> None:
    """One child per way of touching."""
    with report.check("what is mapped can be read"):
        require(_touch(target, "inside") == "survived", "a read of mapped memory failed")
    for mode in FAULTS:
        with report.check(f"guard fault: a {mode} past the last page faults"):
            ended = _touch(target, mode)
            report.add(touch=mode, ended=ended)
            require(ended != "survived", f"a {mode} of unmapped addresses went through")
    with report.check("guard zero: a read past the last page reads zeros"):
        if target.kind != "cpu":
            raise NotHere("not offered on a GPU, where such a read faults")
        require(_touch(target, "zero") == "survived", "a read under guard zero failed")
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
    target = Target(kind)
    cache = make_cache(_driver(target, mode))
    num_tokens = cache.prefix_index.unit_tokens
    cache.admit("a", num_tokens)
    write(cache, "a", range(num_tokens))
    k = cache.view(0, ["a"]).k
    target.synchronize()
    beyond = slice(0, 3) if mode == "inside" else slice(num_tokens, num_tokens + 3)
    print("touching", flush=True)
    try:
        if mode == "write":
            k[beyond] = 1
        else:
            seen = float(k[beyond].float().abs().sum())
            require(mode != "zero" or seen == 0, f"guard zero reads as {seen}")
        target.synchronize()
        print("survived", flush=True)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
    os._exit(0)  # the context may be gone: no destructor should meet it


def _driver(target: Target, mode: str) -> Driver:
    if mode == "zero":
        from ..vmm.host import HostDriver

        return HostDriver(65536, "zero")
    return target.driver()


if __name__ == "__main__":
    touch(*sys.argv[1:3])
