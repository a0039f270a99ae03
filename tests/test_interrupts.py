"""Ctrl-C in the middle of the long commands: 130, one line, and files that are whole or absent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvalloc.experiments.registry import NAMES
from kvalloc.tests.conformance.conformance import compiler

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups are of POSIX")

# What a command has done when it is interrupted: in a child that raises SIGINT in its own group.
HOOK = """
import os, signal, sys
from importlib import import_module

module, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
owner, _, method = name.rpartition(".")
where = import_module(module)
target = getattr(where, owner) if owner else where
inner = getattr(target, method)

def hooked(*arguments, **options):
    global count
    count -= 1
    if count == 0:
        os.killpg(0, signal.SIGINT)
    return inner(*arguments, **options)

setattr(target, method, hooked)
sys.argv[:] = ["kvalloc", *sys.argv[4:]]
from kvalloc.experiments.__main__ import main
main()
"""
SWEEP = "sweep -t burst -b paged --page 8 --page 16 --model tiny --memory 4MiB --limit 20 --jobs 1"
STEP = "kvalloc.experiments.scheduler Scheduler.step"
MOMENTS = {
    "compare, while it counts": (f"{STEP} 5", "compare article --account --slots 80"),
    "compare, in attention": (
        "kvalloc.kernels.attention attend 9",
        "compare hole -b contiguous:max -b vmm --memory 16MiB",
    ),
    "compare, before its figures": (
        "kvalloc.experiments.compare_figures draw 1",
        "compare article --account --slots 80",
    ),
    "compare, as a file is renamed": (
        "os replace 1",
        "compare article --account --slots 80",
    ),
    "run": (f"{STEP} 20", "run policies --quick"),
    "bench": (
        "kvalloc.experiments.bench.allocators _in_a_process 2",
        "bench allocators --requests 200",
    ),
    "run serve, in the model": (
        "kvalloc.experiments.questions.serve_engine ServeEngine._forward 9",
        "run serve --quick",
    ),
    "run serve, in a verb of the cache": (
        "kvalloc.vmm.space RowSpace.map 3",
        "run serve --quick",
    ),
    "report, in a figure": (
        "kvalloc.experiments.compare_figures draw 1",
        "report made",
    ),
    "report, as the page is renamed": ("os replace 5", "report made"),
    "sweep": ("kvalloc.experiments.sweep write_atomic 2", SWEEP),
    "plot": ("kvalloc.experiments.compare_figures draw 1", "plot made/compare.json --out out"),
    "trace generate": (
        "kvalloc.experiments.generators poisson_arrivals 1",
        "trace generate sharegpt --out share.csv",
    ),
}


def started(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have told its children to ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def require_interrupted(child: subprocess.Popen[str], folder: Path) -> None:
    _, said = child.communicate(timeout=120)
    # A shell shows 130 for both. CPython ends by the signal where it came within an exec().
    assert child.returncode in (130, -signal.SIGINT), said
    assert said.split("\n").count("kvalloc: interrupted") == 1, said
    assert "Traceback" not in said, said
    for file in folder.rglob("*"):
        assert not file.name.startswith("."), f"{file.name} was left"
        if file.suffix == ".json":
            json.loads(file.read_text())


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_leaves_whole_files_or_none(moment: str, tmp_path: Path) -> None:
    hook, command = MOMENTS[moment]
    if "made" in command:
        make = "compare article --account --slots 80 --json made/compare.json"
        again = started(["-m", "kvalloc.experiments", *make.split()], tmp_path)
        assert again.wait(120) == 0
    require_interrupted(started(["-c", HOOK, *hook.split(), *command.split()], tmp_path), tmp_path)
    if command.startswith("sweep"):  # which finds some of its cells finished
        again = started(["-m", "kvalloc.experiments", *command.split()], tmp_path)
        assert again.wait(120) == 0, again.communicate()[1]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came so far"
        time.sleep(0.02)


def test_workers_of_a_sweep_say_nothing(tmp_path: Path) -> None:
    """They are in the terminal's process group, so Ctrl-C reaches them as well."""
    many = SWEEP.replace("--jobs 1", "--jobs 2").replace("burst", "chat")
    child = started(["-m", "kvalloc.experiments", *many.split(), *"-t burst".split()], tmp_path)
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    until(lambda: child.poll() is not None or len(children.read_text().split()) >= 2)
    os.killpg(child.pid, signal.SIGINT)
    require_interrupted(child, tmp_path)


def test_an_interrupt_while_the_command_is_loaded(tmp_path: Path) -> None:
    script = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kvalloc.experiments.sweep_command":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
import kvalloc.experiments.__main__
"""
    require_interrupted(started(["-c", script], tmp_path), tmp_path)


# One after the other in one child, which is loaded once: folder, hook and command of each.
SEVERAL = """
import contextlib, io, json, os, signal, sys
from importlib import import_module
from kvalloc.experiments.__main__ import main

for folder, module, name, count, *command in json.load(sys.stdin):
    owner, _, method = name.rpartition(".")
    where = import_module(module)
    target = getattr(where, owner) if owner else where
    inner, left = getattr(target, method), [count]

    def hooked(*arguments, inner=inner, left=left, **options):
        left[0] -= 1
        if left[0] == 0:
            os.killpg(0, signal.SIGINT)
        return inner(*arguments, **options)

    setattr(target, method, hooked)
    os.mkdir(folder)
    os.chdir(folder)
    sys.argv[:] = ["kvalloc", *command]
    said, code = io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    os.chdir("..")
    setattr(target, method, inner)
    print(json.dumps([command, code, said.getvalue()]), flush=True)
"""
PROGRESS = ("rich.progress", "Progress.update", 2)
COVERED = {"policies", "serve"}  # above
LOOKS = {
    **{f"run {name} --quick": PROGRESS for name in NAMES if name not in COVERED},
    "bench attention --quick --rounds 1": (
        "kvalloc.experiments.bench.attention_rounds",
        "timed",
        9,
    ),
    "bench driver --rounds 30": ("kvalloc.vmm.host", "HostDriver.map", 50),
    "bench mapped": ("kvalloc.kernels.attention", "attend", 3),
    "trace describe chat": ("kvalloc.experiments.trace_command", "summarise", 1),
    "trace convert chat chat.csv": ("tempfile", "mkstemp", 1),
    "size --model tiny --context 9 --json size.json": ("os", "replace", 1),
}
if find_spec("transformers"):
    LOOKS["bench cache --context 64 --rounds 3"] = (
        "kvalloc.experiments.bench.cache_rounds", "Subject.filled", 9,
    )  # fmt: skip
if compiler() is not None:
    LOOKS["gpu-check --dry"] = ("subprocess", "Popen.communicate", 1)


def test_an_interrupt_ends_each_command_with_130_and_no_file(tmp_path: Path) -> None:
    cases = [
        [str(number), *hook, *command.split()]
        for number, (command, hook) in enumerate(LOOKS.items())
    ]
    child = subprocess.run(
        [sys.executable, "-c", SEVERAL],
        cwd=tmp_path,
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert child.returncode == 0, child.stderr
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert [" ".join(command) for command, _, _ in results] == list(LOOKS)
    for command, code, said in results:
        assert code == 130, (command, said)
        assert said.count("kvalloc: interrupted\n") == 1 and "Traceback" not in said, said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
