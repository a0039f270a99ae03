"""What ``kvalloc compare`` refuses: one sentence, exit code 2, and nothing is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvalloc.tests.command import Finished, kvalloc
from kvalloc.vmm import system

HEADER = "arrival_step,prompt_tokens,output_tokens\n"
ACCOUNT = "--account --slots 80"
CASES = {
    # arguments, what mine.csv holds, words of the sentence
    "missing file": ("nosuch.csv", None, "nosuch.csv: there is no such file"),
    "a folder": (".", None, "."),
    "empty file": ("mine.csv", "", "mine.csv: the file is empty"),
    "no requests": ("mine.csv", HEADER, "mine.csv"),
    "unknown format": ("mine.csv", "when,what\n1,2\n", "mine.csv"),
    "no text": ("mine.csv", b"\xff\xfe\x00\x80" * 9, "mine.csv"),
    "prompt below 1": ("mine.csv", HEADER + "0,4,1\n1,0,5\n", "line 3: prompt_tokens"),
    "negative prompt": ("mine.csv", HEADER + "0,-4,1\n", "line 2: prompt_tokens"),
    "output below 0": ("mine.csv", HEADER + "0,4,-1\n", "line 2: output_tokens"),
    "NaN": ("mine.csv", "arrival_s,prompt_tokens,output_tokens\nnan,4,1\n", "line 2: arrival_s"),
    "NaN tokens": ("mine.csv", HEADER + "0,NaN,1\n", "line 2: prompt_tokens"),
    "infinite time": ("mine.csv", "arrival_s,prompt_tokens,output_tokens\ninf,4,1\n", "line 2"),
    "half a token": ("mine.csv", HEADER + "0,4.5,1\n", "line 2: prompt_tokens"),
    "missing column": ("mine.csv", "arrival_step,prompt_tokens\n0,4\n", "output_tokens"),
    "short row": ("mine.csv", HEADER + "0,4,1\n1,4\n", "line 3"),
    "unsorted": ("mine.csv", HEADER + "5,4,1\n3,4,1\n", "line 3"),
    "unknown backend": (
        f"hole {ACCOUNT} -b pagd:4",
        None,
        "unknown backend 'pagd:4'; did you mean",
    ),
    "unknown policy": (f"hole {ACCOUNT} -b contiguous:best", None, "contiguous:max|limit|pow2"),
    "unknown placement": (f"hole {ACCOUNT} -b contiguous:max:worst", None, "first-fit, best-fit"),
    "no block size": (f"hole {ACCOUNT} -b paged", None, "paged:16"),
    "a page of nothing": (f"hole {ACCOUNT} -b paged:0", None, "at least 1"),
    "a mapped page of nothing": (f"hole {ACCOUNT} -b vmm:0", None, "at least 1"),
    "half a page": (f"hole {ACCOUNT} -b vmm:1.5", None, "whole number"),
    "bytes as tokens": (f"hole {ACCOUNT} -b vmm:2MiB", None, "whole number of tokens"),
    "tokens as bytes": ("hole --account -b vmm:16", None, "a page is a size here"),
    "no size": ("hole --account -b vmm:big", None, "'big' is not a size"),
    "page between OS pages": ("hole -b vmm:5000", None, "multiple of 4096"),
    "a layout of paged": (f"hole {ACCOUNT} -b paged:4:interleaved", None, "paged:BLOCK"),
    "limit without a model": (f"hole {ACCOUNT} -b contiguous:limit", None, "--model NAME"),
    "unknown model": ("hole --account --model lama-3-8b --memory 1GiB", None, "Llama-3-8B"),
    "model without memory": ("hole --account --model llama-3-8b", None, "--memory SIZE"),
    "memory of no size": ("hole --memory plenty", None, "'plenty' is not a size"),
    "unknown dtype": ("hole --account --dtype int3", None, "unknown cache dtype 'int3'"),
    "memory below a token": (
        "hole --account --model llama-3-8b --memory 100KiB -b contiguous:max",
        None,
        "smaller than one token",
    ),
    "memory below a page": (
        "hole --memory 1MiB -b vmm",
        None,
        "vmm: the memory is smaller than one page",
    ),
    "a page for one of four buffers": (
        "hole --account --model tiny --memory 2MiB -b vmm:2MiB",
        None,
        "one token takes whole pages, 4 × 2,097,152 bytes, and there is memory for 1; give more",
    ),
    "slots below a page": ("hole --account --slots 3 -b paged:4", None, "smaller than one page"),
    "no slots": ("hole --account --slots 0", None, "--slots must be at least 1"),
    "nothing ever fits": (
        "hole --account --slots 4 -b paged:4 -b contiguous:max",
        None,
        "no request of hole can ever fit",
    ),
    "slots of a model": ("hole --account --slots 80 --memory 1MiB", None, "leave out --model"),
    "slots on real memory": ("hole --run --slots 80", None, "use --account"),
    "nothing to verify": (f"hole {ACCOUNT} --verify", None, "use --run"),
    "no such rule": (f"hole {ACCOUNT} --max-new most", None, "'limit' or 'output'"),
    "limit of no model": (f"hole {ACCOUNT} --max-new limit", None, "context limit"),
    "time stands still": ("chat --account --step-ms 0", None, "a step of 0.0 ms is out of range"),
    "rate of timed requests": ("chat --account --rate 4", None, "arrival times of its own"),
    "out is a file": (f"hole {ACCOUNT} --out mine.csv", HEADER, "--out mine.csv is a file"),
    "out below a file": (f"hole {ACCOUNT} --out mine.csv/a", HEADER, "mine.csv"),
    "JSON to a folder": (f"hole {ACCOUNT} --json .", None, "--json . is a folder"),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_refused(finished: Finished, words: str) -> None:
    code, out, err = finished
    assert (code, out) == (2, "")
    assert err.startswith("kvalloc: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert words in err


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    arguments, content, words = CASES[case]
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "mine.csv").write_bytes(data)
    before = contents(tmp_path)
    check_refused(kvalloc("compare", *arguments.split(), folder=tmp_path), words)
    assert contents(tmp_path) == before
    assert sorted(os.listdir(tmp_path)) == sorted(before), "no folder is made either"


def test_a_jsonl_trace_of_ours_must_be_sorted_too(tmp_path: Path) -> None:
    rows = ('{"arrival_s": 2, "prompt_tokens": 4, "output_tokens": 1}\n' * 2).replace("2", "1", 1)
    (tmp_path / "mine.jsonl").write_text("".join(reversed(rows.splitlines(keepends=True))))
    check_refused(kvalloc("compare", "mine.jsonl", folder=tmp_path), "line 2")


@pytest.mark.parametrize(
    "option",
    ["--on-full=wait", "--on-failure=cry", "--layout=any", "--device=tpu", "--limit=0", "--nosuch"],
)
def test_unknown_options_and_values_exit_with_2(option: str, tmp_path: Path) -> None:
    code, out, err = kvalloc("compare", "hole", option, folder=tmp_path)
    assert (code, out) == (2, "")
    assert option.partition("=")[0] in err
    assert not os.listdir(tmp_path)


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    (tmp_path / "a[b].csv").write_text(HEADER + "0,4,1\n")
    options = ("a[b].csv", *ACCOUNT.split(), "-b", "paged:4", "--out", "out[/dim]")
    code, out, err = kvalloc("compare", *options, folder=tmp_path)
    assert (code, err) == (0, "")
    assert "a[b].csv" in out and "Written to out[/dim]/" in out
    assert (tmp_path / "out[/dim]" / "compare.json").is_file()


def test_no_gpu_is_told(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    check_refused(kvalloc("compare", "--device", "cuda", folder=tmp_path), "torch finds no GPU")


def test_a_platform_without_memfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other backends run there; the mapped one says what it needs before anything ran."""
    monkeypatch.delattr(os, "memfd_create")
    system.libc.cache_clear()  # as if this process had never asked
    check_refused(kvalloc("compare", "hole", folder=tmp_path), "needs memfd_create")
    assert not os.listdir(tmp_path)
    (tmp_path / "mine.csv").write_text(HEADER + "0,4,1\n")
    options = ("mine.csv", "-b", "contiguous:max", "-b", "paged:4", "--json", "-")
    assert kvalloc("compare", *options, folder=tmp_path).code == 0
    assert kvalloc("compare", "hole", "--account", "--json", "-", folder=tmp_path).code == 0


def test_the_installed_command_does_the_same(tmp_path: Path) -> None:
    """In a process of its own: exit codes, streams, and a table that fits a pipe."""
    command = [sys.executable, "-m", "kvalloc.experiments", "compare"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
        )

    bad = run("nosuch.csv")
    check_refused(Finished(bad.returncode, bad.stdout, bad.stderr), "no such file")
    assert not os.listdir(tmp_path)
    good = run("hole", "--account", "--slots", "80", "-b", "paged:4", "--out", "pictures")
    assert (good.returncode, good.stderr) == (0, "")
    assert "Written to pictures/: compare.json" in good.stdout
    assert max(map(len, good.stdout.splitlines())) <= 80
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "compare.json",
        "address-space.png",
        "address-space.svg",
        "memory-over-time.png",
        "memory-over-time.svg",
    }


def test_no_replay_pays_for_the_compiling_of_a_kernel(tmp_path: Path) -> None:
    """Else the first backend with pages seems to be slow, on the first day above all."""
    script = (
        "import sys\n"
        "from kvalloc.experiments import compare\n"
        "from kvalloc.experiments.__main__ import main\n"
        "def one(*_): sys.exit(not 'kvalloc.kernels.paged_numba' in sys.modules)\n"
        "compare._one = one\n"
        "main()\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            "compare",
            "article",
            "-b",
            "contiguous:max",
            "-b",
            "paged:4",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0


def test_an_option_that_changes_nothing_is_told(tmp_path: Path) -> None:
    options = f"hole {ACCOUNT} -b paged:4 --max-new 3 --json -".split()
    code, out, err = kvalloc("compare", *options, folder=tmp_path)
    assert code == 0 and json.loads(out)["backends"][0]["completed"] == 5
    assert "max_new is given in every request of hole: --max-new changes none" in err
