"""gpu-check without a GPU: its stages in the form for a CPU, its dry run, and what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kvalloc.experiments.compare_command import choose_device
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.gpu import check as gpu_check
from kvalloc.experiments.gpu import flash as gpu_flash
from kvalloc.experiments.gpu import mapped as gpu_mapped
from kvalloc.experiments.gpu.stage import CheckFailed, NotHere, StageReport, Target, require
from kvalloc.tests.conformance import conformance

NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


# ---------------------------------------------------------------------- stages


@pytest.mark.parametrize("stage", [stage.name for stage in gpu_check.STAGES])
def test_every_stage_runs_and_is_right_on_a_cpu(stage: str, tmp_path: Path) -> None:
    assert gpu_check.run_stage(stage, "cpu", tmp_path, 1.0)
    document = load(tmp_path / f"{stage}.json")
    assert document["complete"] and document["headline"]
    assert document["target"] == "host driver (no GPU)"
    assert all(entry["ok"] is not False for entry in document["checks"])
    assert len(document["rows"]) > 1 or stage in ("vmm", "sharing", "hf")


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = import_module("kvalloc.kernels.attention")
    right: Callable[..., torch.Tensor] = attention.attend

    def wrong(q: torch.Tensor, view: Any, **options: Any) -> torch.Tensor:
        out = right(q, view, **options)
        out[-1, 0] *= 1.1
        return out

    monkeypatch.setattr(attention, "attend", wrong)
    for stage in ("flash", "paged"):
        assert not gpu_check.run_stage(stage, "cpu", tmp_path, 0.0)
        document = load(tmp_path / f"{stage}.json")
        failed = [entry for entry in document["checks"] if entry["ok"] is False]
        assert failed and all("relative error" in entry["detail"] for entry in failed)


def test_nan_is_no_small_error() -> None:
    from kvalloc.contract import DenseView

    k = torch.randn(4, 1, 8)
    view = DenseView(k, k, torch.tensor([0]), torch.tensor([4], dtype=torch.int32))
    out = torch.full((1, 1, 8), torch.nan)
    error = gpu_flash.relative_error(out, torch.randn(1, 1, 8), view)
    assert not error <= gpu_flash.TOLERANCE


def test_a_lost_token_is_found() -> None:
    driver = Target("cpu").driver()
    with gpu_mapped.make_cache(driver) as cache:
        cache.admit("a", 40)
        gpu_mapped.write(cache, "a", range(40))
        gpu_mapped.holds(cache, "a", range(40))
        view = cache.view(1, ["a"])
        view.v[39, 0, 0] += 1
        del view
        with pytest.raises(CheckFailed, match="V of layer 1, sequence 'a', differs"):
            gpu_mapped.holds(cache, "a", range(40))
    driver.close()


def test_a_report_is_on_disk_after_every_entry(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    report = StageReport("s", Target("cpu"), path)
    with report.check("right"):
        require(True, "")
    with report.check("elsewhere"):
        raise NotHere("no such thing")
    assert report.is_right
    with report.check("broken"):
        raise RuntimeError("CUDA error: an illegal memory access")
    report.add(value=1)
    document = load(path)
    assert [entry["ok"] for entry in document["checks"]] == [True, None, False]
    assert document["checks"][2]["detail"] == "RuntimeError: CUDA error: an illegal memory access"
    assert document["rows"] == [{"value": 1}]
    assert not document["complete"] and not report.is_right
    assert not StageReport("t", Target("cpu"), path).is_right, "nothing was looked at"


# ---------------------------------------------------------------------- all of them


@dataclass
class Canned:
    """Stages replaced by Python that writes, or does not write, a result."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    def run(self, *sources: str) -> tuple[bool, list[str], dict[str, Any]]:
        stages = tuple(gpu_check.Stage(f"s{i}", 0.1) for i in range(len(sources)))
        self.monkeypatch.setattr(gpu_check, "STAGES", stages)
        real: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run

        def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
            if "--stage" not in command:  # git, for the environment
                return real(command, **options)
            name = command[command.index("--stage") + 1]
            source = sources[int(name[1:])].replace("PATH", repr(f"{self.folder}/{name}.json"))
            options["timeout"] = 3 if "sleep" in source else 60
            return real([sys.executable, "-c", source], **options)

        self.monkeypatch.setattr(subprocess, "run", run)
        said: list[str] = []
        right = gpu_check.gpu_check(self.folder, 1, kind="cpu", say=said.append)
        return right, said, load(self.folder / "gpu_check.json")


RIGHT = """import json; json.dump({"complete": True, "headline": "fine",
    "checks": [{"check": "one", "ok": True, "detail": ""}]}, open(PATH, "w"))"""
WRONG = RIGHT.replace('"ok": True, "detail": ""', '"ok": False, "detail": "two is three"')
HALF = RIGHT.replace('"complete": True', '"complete": False')


def test_a_stage_that_dies_or_hangs_is_wrong_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeping = HALF + "; print('so far', flush=True); import time; time.sleep(60)"
    right, said, document = Canned(tmp_path, monkeypatch).run(
        WRONG, "import os; os.abort()", sleeping, "raise SystemExit('no module')", RIGHT
    )
    assert not right
    wrong = [stage["wrong"] for stage in document["stages"]]
    assert wrong[0] == ["one: two is three"]
    assert "ended with status -6" in wrong[1][0]
    assert "was ended after" in wrong[2][0] and wrong[2][0].endswith("last words: so far")
    assert wrong[3] == ["the stage did not complete; last words: no module"]
    assert wrong[4] == []
    assert said[1].split()[:2] == ["s0", "WRONG"] and said[5].split()[:2] == ["s4", "right"]
    assert said[-1].startswith("Something is wrong.")


def test_when_nothing_is_wrong_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, said, document = Canned(tmp_path, monkeypatch).run(RIGHT)
    assert right and said[-1].startswith("Nothing is wrong.")
    assert document["stages"][0]["right"] == 1


def test_dry_run_on_the_conformance_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages driver, vmm, guard and sharing, labelled as what they are."""
    conformance.build()
    assert gpu_check.main(["--dry", "--out", str(tmp_path), "--minutes", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("gpu-check on the conformance library (no GPU")
    for stage in ("driver", "vmm", "guard", "sharing"):
        document = load(tmp_path / f"{stage}.json")
        assert "conformance library" in document["target"]
        assert all(entry["ok"] for entry in document["checks"])
    assert not (tmp_path / "flash.json").exists()
    exhausted = [e for e in load(tmp_path / "vmm.json")["checks"] if "out of memory" in e["check"]]
    assert exhausted[0]["ok"]


# ---------------------------------------------------------------------- what is missing


@NEEDS_NO_GPU
def test_without_a_gpu_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err == (
        "gpu-check: gpu-check needs a GPU that torch can use, and finds none here: --dry checks "
        "the calls without one\n"
    )
    assert not said.out and not list(tmp_path.iterdir())


def test_dry_without_a_compiler_or_a_source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "compiler", lambda: None)
    monkeypatch.setattr(conformance, "compiled", conformance.compiled.__wrapped__)
    with pytest.raises(BadInput, match="no C compiler"):
        gpu_check.gpu_check(dry=True)
    monkeypatch.setattr(gpu_check, "CONFORMANCE", "kvalloc.tests.nothing")
    with pytest.raises(BadInput, match="in the source tree"):
        gpu_check.gpu_check(dry=True)
    with pytest.raises(BadInput, match="no time"):
        gpu_check.gpu_check(minutes=0, dry=True)


def test_stages_need_no_library_of_the_command_line(tmp_path: Path) -> None:
    """A machine with a GPU has torch, triton and cuda-python; the rest may be missing."""
    code = f"""
        import sys
        for name in ("typer", "rich", "matplotlib", "numba", "pytest"):
            sys.modules[name] = None
        from pathlib import Path
        from kvalloc.experiments.gpu import check as gpu_check
        for stage in gpu_check.STAGES:
            __import__(f"kvalloc.experiments.gpu.{{stage.name}}")
        for name in ("attention_points", "attention_rounds"):
            __import__(f"kvalloc.experiments.bench.{{name}}")
        for name in ("compare", "readers", "specs"):
            __import__(f"kvalloc.experiments.{{name}}")
        print(gpu_check.run_stage("vmm", "cpu", Path({str(tmp_path)!r}), 1.0))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@NEEDS_NO_GPU
def test_device_of_compare() -> None:
    assert choose_device("cpu", True) == "cpu"
    assert choose_device("auto", True) == "cpu"
    assert choose_device("auto", False) == "cpu"
    with pytest.raises(BadInput, match="torch finds no GPU here"):
        choose_device("cuda", True)
    with pytest.raises(BadInput, match="--account runs nothing"):
        choose_device("cuda", False)


def test_auto_takes_the_gpu_and_makes_launches_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    assert choose_device("cpu", True) == "cpu"
    assert choose_device("auto", True) == choose_device("cuda", True) == "cuda"
    assert os.environ.pop("CUDA_LAUNCH_BLOCKING") == "1"
