"""Where results shall go and cannot: told in one sentence before the work, and nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest

from kvalloc.experiments.gpu import check as gpu_check
from kvalloc.experiments.registry import NAMES
from kvalloc.tests.command import kvalloc

MADE = "compare article --account --slots 80 -b paged:4 --json made/compare.json"
BENCHES = ("allocators", "attention", "cache", "driver", "mapped")
# The command, and the function that begins its work.
WORK = {
    "compare article --account --slots 80": "compare_command._with_progress",
    "sweep -t burst -b paged:16 --model tiny --memory 1MiB": "sweep_command.sweep",
    "plot made/compare.json": "compare_figures.draw",
    "report made": "report.command.write_atomic",
    "gpu-check": "gpu.check._run_stage",
    **{f"bench {name}": f"bench.{name}.run" for name in BENCHES},
    **{f"run {name} --quick": f"questions.{name.replace('-', '_')}.run" for name in NAMES},
    "trace generate uniform": "trace_command.generate",
    "size --model tiny --context 10": "size_command.json",
    "trace describe article": "trace_command.json",
}
TARGETS = ("file", "file/x", "file/x/y", "/proc/none/x", "/dev/null/x", "x" * 5000, "")


def folders(command: str) -> tuple[str, ...]:
    """Options that name a folder."""
    return () if command.startswith(("report", "size", "trace")) else ("--out",)


def files(command: str) -> tuple[str, ...]:
    """Options that name a file."""
    if command.startswith(("report", "trace generate")):
        return ("--out",)
    return () if command.startswith(("plot", "gpu-check")) else ("--json",)


@pytest.mark.parametrize("command", WORK)
def test_a_target_that_cannot_be_is_told_before_the_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the work began")

    if "made" in command:
        assert kvalloc(*MADE.split(), folder=tmp_path).code == 0
    if not WORK[command].endswith(".json"):  # those who look something up have no work
        monkeypatch.setattr(f"kvalloc.experiments.{WORK[command]}", work)
    monkeypatch.setattr(gpu_check, "_environ", lambda kind: {})
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    bad = [(option, target) for option in folders(command) for target in TARGETS]
    bad += [(option, target) for option in files(command) for target in (*TARGETS[1:], ".")]
    for option, target in bad:
        code, _, err = kvalloc(*command.split(), f"{option}={target}", folder=tmp_path)
        assert code == 2, (option, target[:9])
        assert err.startswith("kvalloc: ") and err.count("\n") == 1, err
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"
    assert bad


def test_a_look_at_a_target_leaves_it_as_it_is(tmp_path: Path) -> None:
    """Also when the command ends otherwise: no folder is made, no file emptied, no link lost."""
    (tmp_path / "old.json").write_text("old")
    (tmp_path / "link").symlink_to("folder/beyond")
    before = sorted(tmp_path.iterdir())
    for slots, code in (("1", 2), ("80", 0)):
        for target in ("--json=old.json", "--json=new/er.json", "--out=link/er"):
            if code:
                assert sorted(tmp_path.iterdir()) == before
                assert (tmp_path / "old.json").read_text() == "old"
            words = f"compare hole --account --slots {slots} -b contiguous:max {target}"
            assert kvalloc(*words.split(), folder=tmp_path).code == code
    for written in ("old.json", "new/er.json", "folder/beyond/er/compare.json"):
        assert json.loads((tmp_path / written).read_text())["backends"]
    assert (tmp_path / "link").is_symlink()
