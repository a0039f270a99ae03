"""gpu-check: what only a GPU can show, stage by stage, each in a process of its own.

Also without the command line's libraries: ``python3 -m kvalloc.experiments.gpu.check``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from ..environment import environment
from ..errors import BadInput
from ..output import check_folder, emit_json
from .stage import CONFORMANCE, LABELS, StageReport, Target

DEFAULT_OUT = Path("out/gpu-check")
DEFAULT_MINUTES = 5.0
MOST_MINUTES = 24 * 60
EXIT_WRONG, EXIT_BAD_INPUT = 1, 2
MODULE = "kvalloc.experiments.gpu.check"


@dataclass(frozen=True)
class Stage:
    """A module with ``run(report, target)``, and its share of the time."""

    name: str
    share: float
    is_dry: bool = False
    """Also runs on the conformance library."""


STAGES = (
    Stage("driver", 0.10, is_dry=True),
    Stage("vmm", 0.10, is_dry=True),
    Stage("guard", 0.10, is_dry=True),
    Stage("flash", 0.15),
    Stage("paged", 0.15),
    Stage("attention", 0.20),
    Stage("trace", 0.10),
    Stage("sharing", 0.05, is_dry=True),
    Stage("hf", 0.05),
)
"""The most valuable first."""


def gpu_check(
    out: Path = DEFAULT_OUT,
    minutes: float = DEFAULT_MINUTES,
    *,
    dry: bool = False,
    kind: str = "",
    say: Callable[[str], None] = print,
) -> bool:
    """Run the stages; returns whether nothing was wrong.

    Parameters
    ----------
    out
        Folder for one JSON per stage, and ``gpu_check.json`` about all of them.
    minutes
        For everything together; a stage that takes more than what is left for it is ended.
    dry
        Only what the conformance library can take in a GPU's place.
    kind
        Of the target, ``""`` for what ``dry`` asks.

    Raises
    ------
    BadInput
        No GPU, or with ``dry`` no conformance library; no time; a folder that is none.
    """
    if not 0 < minutes <= MOST_MINUTES:
        raise BadInput(f"{minutes:g} minutes are no time: give more than 0, at most {MOST_MINUTES}")
    kind = kind or ("conformance" if dry else "cuda")
    environ = _environ(kind)
    check_folder(out)
    stages = [stage for stage in STAGES if stage.is_dry or kind != "conformance"]
    deadline = monotonic() + 60 * minutes
    say(f"gpu-check on the {LABELS[kind]}")
    results = []
    for i, stage in enumerate(stages):
        shares = sum(other.share for other in stages[i:])
        seconds = max(0.0, deadline - monotonic()) * min(1.0, 1.5 * stage.share / shares)
        results.append(_run_stage(stage, kind, out, seconds, environ))
        say(_line(results[-1]))
    document = {
        "schema": 1,
        "experiment": "gpu_check",
        "target": LABELS[kind],
        "environment": environment(),
        "settings": {"minutes": minutes, "dry": dry},
        "stages": results,
    }
    emit_json(document, out / "gpu_check.json")
    for result in results:
        for entry in result["wrong"]:
            say(f"{result['stage']}: {entry}")
    is_right = not any(result["wrong"] for result in results)
    say(f"{'Nothing is wrong' if is_right else 'Something is wrong'}. Written to {out}/.")
    return is_right


def _environ(kind: str) -> dict[str, str]:
    """The stages' environment, after a look at whether they can run at all."""
    environ = dict(os.environ)
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise BadInput(
                "gpu-check needs a GPU that torch can use, and finds none here: --dry checks the "
                "calls without one"
            )
    if kind == "conformance":
        try:
            conformance = import_module(CONFORMANCE)
        except ModuleNotFoundError as error:
            raise BadInput(
                "--dry needs the conformance library, which is in the source tree: run it there"
            ) from error
        try:
            environ["LD_LIBRARY_PATH"] = conformance.search_path(conformance.compiled())
        except conformance.CannotBuild as error:
            raise BadInput(str(error)) from error
        environ |= {"KVALLOC_FAKE_GRANULARITY": "65536", "KVALLOC_FAKE_DEVICES": "2"}
    return environ


def _run_stage(
    stage: Stage, kind: str, out: Path, seconds: float, environ: dict[str, str]
) -> dict[str, Any]:
    """Run a stage in a process; what it wrote counts, however it ended."""
    path = out / f"{stage.name}.json"
    path.unlink(missing_ok=True)
    start, ended = monotonic(), ""
    command = [sys.executable, "-m", MODULE, "--stage", stage.name, "--kind", kind]
    command += ["--out", str(out), "--seconds", f"{seconds:.1f}"]
    try:
        # Twice the time that the stage was given: it looks at the clock between measurements.
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=max(2 * seconds, 20),
            check=False,
            text=True,
            errors="replace",
        )
        said = done.stdout
        if done.returncode not in (0, EXIT_WRONG):
            ended = f"ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        ended = f"was ended after {monotonic() - start:.0f} s"
        words: bytes | str = error.stdout or ""  # bytes, for all that was asked is text
        said = words if isinstance(words, str) else words.decode(errors="replace")
    found: dict[str, Any] = {"checks": [], "headline": ""}
    if path.exists():
        found = json.loads(path.read_text())
    wrong = [f"{e['check']}: {e['detail']}" for e in found["checks"] if e["ok"] is False]
    if ended or not found.get("complete"):
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        wrong.append(f"the stage {ended or 'did not complete'}; last words: {last[0]}")
    return {
        "stage": stage.name,
        "seconds": monotonic() - start,
        "right": sum(e["ok"] is True for e in found["checks"]),
        "left_out": [f"{e['check']}: {e['detail']}" for e in found["checks"] if e["ok"] is None],
        "wrong": wrong,
        "headline": found["headline"],
    }


def _line(result: dict[str, Any]) -> str:
    verdict = "WRONG" if result["wrong"] else "right"
    counts = f"{result['right']:>3} right {len(result['wrong']):>2} wrong"
    return (
        f"{result['stage']:<10} {verdict}  {counts}  {result['seconds']:>5.0f} s  "
        f"{result['headline']}"
    )


def run_stage(name: str, kind: str, out: Path, seconds: float) -> bool:
    """Run one stage in this process; returns whether nothing was wrong."""
    target = Target(kind)
    report = StageReport(name, target, out / f"{name}.json", seconds)
    report.save()
    import_module(f".{name}", __package__).run(report, target)
    report.save(complete=True)
    return report.is_right


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line with nothing but the standard library; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="for all stages")
    parser.add_argument("--dry", action="store_true", help="on the conformance library")
    parser.add_argument("--stage", choices=[stage.name for stage in STAGES], help="this one alone")
    parser.add_argument("--kind", choices=sorted(LABELS), default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        if options.stage:
            kind = options.kind or "cuda"
            return 0 if run_stage(options.stage, kind, options.out, options.seconds) else EXIT_WRONG
        right = gpu_check(options.out, options.minutes, dry=options.dry, kind=options.kind)
    except BadInput as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return 0 if right else EXIT_WRONG


if __name__ == "__main__":
    sys.exit(main())
