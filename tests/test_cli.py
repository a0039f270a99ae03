"""The command line: exit codes, one sentence for a mistake, `size`, no torch."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from kvalloc.contract import NeverFits, OutOfMemory
from kvalloc.experiments import __main__ as door
from kvalloc.experiments.errors import BadInput
from kvalloc.vmm.driver import DriverError


def kvalloc(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Run the command in this process; returns exit code, standard output and error."""
    monkeypatch.setattr(sys, "argv", ["kvalloc", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        door.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def an_app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (BadInput("no such trace;\n name another"), "no such trace; name another"),
        (NeverFits("100 tokens in 80 slots"), "100 tokens in 80 slots"),
        (DriverError("memfd_create is missing"), "memfd_create is missing"),
        (OutOfMemory(20, 32, 16), "out of memory: 20 tokens needed, 32 free, the largest"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x.csv"), "x.csv: No such file"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "out: Permission denied"),
        (OSError("disk is gone"), "disk is gone"),
        (BadInput(), "BadInput"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(
    error: Exception,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(door, "app", an_app_that_raises(error))
    code, out, err = kvalloc("", monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"kvalloc: {sentence}")
    assert err.count("\n") == 1


def test_our_own_faults_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "app", an_app_that_raises(ZeroDivisionError("ours")))
    monkeypatch.setattr(sys, "argv", ["kvalloc"])
    with pytest.raises(ZeroDivisionError):
        door.main()


def test_an_interrupt_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(door, "app", an_app_that_raises(KeyboardInterrupt()))
    code, out, err = kvalloc("", monkeypatch, capsys)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


def test_an_interrupt_in_the_loading_of_a_library_is_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries in C make an ImportError of it, as matplotlib's; another one is our own fault."""
    failure = ImportError("initialization failed")
    monkeypatch.setattr(door, "app", an_app_that_raises(failure))
    with pytest.raises(ImportError):
        kvalloc("", monkeypatch, capsys)
    failure.__cause__ = KeyboardInterrupt()
    code, out, err = kvalloc("", monkeypatch, capsys)
    assert (code, out, err) == (130, "", "kvalloc: interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("nonsense", "nonsense"),
        ("size --model llama-3-8b --context 0", "--context"),
        ("size --model llama-3-8b --context many", "--context"),
        ("size --bogus", "--bogus"),
        ("size", "name a model and a context"),
        ("size --model lama-3-8b --context 10", "did you mean Llama-3-8B"),
        ("size --model tiny --context 10 --dtype int3", "unknown cache dtype 'int3'"),
        ("size --model falcon-7b --context 10 --tp 2", "71 query heads"),
        ("size --model tiny --context 10 --json setup.cfg/x.json", "setup.cfg"),
    ],
)
def test_wrong_arguments_exit_with_2(
    arguments: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("setup.cfg").write_text("a file, no folder")
    code, out, err = kvalloc(arguments, monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert told in re.sub(r"\x1b\[[0-9;]*m", "", err)
    assert "Traceback" not in err
    assert os.listdir() == ["setup.cfg"], "nothing is written"


def test_size_in_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "size --model llama-3-8b --context 131072 --batch 64 --json -"
    code, out, err = kvalloc(arguments, monkeypatch, capsys)
    answer = json.loads(out)
    assert code == 0
    assert answer["bytes_per_token"] == 128 * 2**10
    assert answer["bytes_per_sequence"] == 16 * 2**30
    assert answer["bytes_total"] == answer["bytes_windowed"] == 2**40
    assert "beyond the limit of Llama-3-8B, 8,192" in err

    arguments = "size --model gemma-3-27b --context 131072 --batch 2 --json -"
    code, out, err = kvalloc(arguments, monkeypatch, capsys)
    answer = json.loads(out)
    assert answer["bytes_total"] == 124 * 2**30
    assert answer["bytes_windowed"] == 2 * (131072 * 81920 + 416 * 2**20)
    assert err == "", "within the limit there is nothing to warn of"

    arguments = "size --model llama-3-70b --context 8192 --dtype fp8 --tp 8 --json -"
    answer = json.loads(kvalloc(arguments, monkeypatch, capsys)[1])
    assert (answer["dtype"], answer["bytes_per_token"]) == ("float8_e4m3fn", 20480)


def test_size_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "size.json"
    arguments = f"size --model gemma-2-9b --context 8192 --json {file}"
    code, out, _ = kvalloc(arguments, monkeypatch, capsys)
    assert code == 0
    assert "336 KiB" in out
    assert "2.62 GiB" in out
    assert "1.97 GiB" in out
    assert json.loads(file.read_text())["bytes_total"] == 8192 * 344_064


def test_size_lists_the_models(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Gemma-3-27B" in kvalloc("size --list", monkeypatch, capsys)[1]
    rows = json.loads(kvalloc("size --list --json -", monkeypatch, capsys)[1])
    gemma = next(row for row in rows if row["model"] == "Gemma-3-27B")
    assert (gemma["window"], gemma["windowed_layers"]) == (1024, 52)


@pytest.mark.parametrize("arguments", ["--help", "-h", "size --help"])
def test_help_teaches(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = kvalloc(arguments, monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert out.count("kvalloc ") >= 3, "examples to type"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("compare", ["default: tiny", "default: 4MiB", "largest output", "paged:16", "best-fit"]),
        ("sweep", ["default: recompute", "a whole SPEC", "goes on"]),
        ("run", ["block-size", "kvalloc list"]),
        ("bench driver", ["default: 4KiB, 64KiB"]),
    ],
)
def test_help_tells_defaults_and_words(
    arguments: str, told: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Brackets in a help text may pass for markup, and long words are cut."""
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = kvalloc(f"{arguments} --help", monkeypatch, capsys)
    words = " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", "", out).split())
    assert [part for part in told if part not in words] == []


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvalloc("--version", monkeypatch, capsys)
    assert code == 0
    assert re.fullmatch(r"kvalloc \d+\.\d+\.\d+\n", out)


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "compare --help",
        "plot --help",
        "bench --help",
        "size --model tiny --context 10",
        "trace describe article",
        "compare article --account --slots 80 --json -",
    ],
)
def test_bookkeeping_never_imports_torch(arguments: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from kvalloc.experiments.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code, stop.code\n"
        "print('loaded:', sorted({'torch', 'numba', 'triton', 'cuda'} & set(sys.modules)),"
        " file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.endswith("loaded: []\n"), run.stderr
