"""Where and with what a result was measured, so that it can be judged and repeated."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from .output import format_bytes

_ROOT = Path(__file__).resolve().parent.parent
_LIBRARIES = ("numpy", "torch", "numba", "triton", "matplotlib", "cuda-bindings", "transformers")


def environment() -> dict[str, Any]:
    """Describe this process and machine in plain JSON values; None where unknown.

    Versions come from the installed metadata, so nothing is imported for them. ``device`` and
    ``driver`` are told only if torch is loaded already and sees a GPU.
    """
    device, driver = _gpu()
    return {
        "command": command_line(),
        "kvalloc": _version("kvalloc"),
        **_git(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": _usable_cores(),
        "memory_bytes": _memory_bytes(),
        "device": device,
        "driver": driver,
        "versions": {library: _version(library) for library in _LIBRARIES},
    }


def in_short(environment: dict[str, Any]) -> str:
    """Machine, commit and day of a described environment, as far as they are known.

    >>> in_short({"cpu": "EPYC", "cores": 2, "memory_bytes": 1 << 34, "date": "2026-11-29T18:52"})
    'EPYC, 2 cores, 16 GiB, 2026-11-29'
    """
    cores, memory, commit, date = map(environment.get, ("cores", "memory_bytes", "commit", "date"))
    told = [
        environment.get("cpu"),
        f"{cores} cores" if cores else None,
        format_bytes(memory) if memory else None,
        f"commit {commit[:7]}" if commit else None,
        date[:10] if date else None,
    ]
    return ", ".join(str(part) for part in told if part)


def command_line() -> str:
    """This process's command as one would type it, without the path of the program."""
    program = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
    if program in ("__main__.py", "kvalloc"):
        program = "kvalloc"
    return shlex.join([program, *sys.argv[1:]])


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Commit of the checkout that the code runs from, and whether tracked files differ from it."""
    unknown = {"commit": None, "dirty": None}
    # An installed copy may lie inside somebody else's repository: only our own root counts.
    if not (_ROOT / ".git").exists():
        return unknown
    commit = _git_says("rev-parse", "HEAD")
    status = _git_says("status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return unknown
    return {"commit": commit, "dirty": bool(status)}


def _git_says(*arguments: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine() or None
    for line in lines:
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            return value.strip()
    return platform.machine() or None


def _usable_cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _gpu() -> tuple[str | None, str | None]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None, None
    try:
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        driver = None
    return torch.cuda.get_device_name(), driver
