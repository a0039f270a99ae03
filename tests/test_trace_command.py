"""``kvalloc trace``: figures, files, one sentence for every mistake, and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.trace_command import register

app = typer.Typer()
register(app)
app.command()(lambda: None)  # with one command more, "trace" stays a word of its own


def trace(*words: str) -> str:
    result = CliRunner().invoke(app, ["trace", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_describe_prints_only_json_when_told() -> None:
    summary = json.loads(trace("describe", "article", "--json", "-", "--step-ms", "50"))
    assert summary["requests"] == 9 and summary["prompt_tokens"] == 144
    assert summary["output_tokens"] == 87 and summary["max_context"] == 49
    assert summary["span_s"] == pytest.approx(0.7)
    assert (summary["page_size"], summary["prefix_hit_fraction"]) == (16, 0.0)


def test_describe_for_people_and_a_file_beside(tmp_path: Path) -> None:
    told = trace("describe", "shared-prefix", "--page-size", "64", "--json", str(tmp_path / "d"))
    assert "in pages of 64" in told and "prompt tokens" in told and "p99" in told
    assert "generated, seed 0" in told
    assert json.loads((tmp_path / "d").read_text())["prefix_hit_fraction"] > 0.3


def test_generate_describe_and_convert(tmp_path: Path) -> None:
    csv, lines = str(tmp_path / "t.csv"), str(tmp_path / "t.jsonl")
    words = ("--requests", "30", "--seed", "7", "--prompt", "3:9", "--output", "2")
    assert "30 requests" in trace("generate", "uniform", *words, "--out", csv)
    assert "20 requests" in trace("convert", csv, lines, "--limit", "20")
    made, converted = read_trace(csv), read_trace(lines)
    assert made.prompt[:20].tolist() == converted.prompt.tolist()
    assert 3 <= made.prompt.min() and made.prompt.max() <= 9 and set(made.output) == {2}
    first = Path(csv).read_bytes()
    trace("generate", "uniform", *words, "--out", csv)
    assert Path(csv).read_bytes() == first


def test_names_that_look_like_markup_or_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"[b]\xff.csv")
    path.write_text("arrival_s,prompt_tokens,output_tokens,[/i]\n0,5,1,\n")
    told = trace("describe", str(path))
    assert "[b]?.csv" in told and "column [/i] ignored" in told
    assert json.loads(trace("describe", str(path), "--json", "-"))["name"] == "[b]?.csv"
    assert "?.csv: 1 request" in trace("convert", str(path), str(path))


def test_convert_gives_a_length_set_times(tmp_path: Path) -> None:
    lengths, out = tmp_path / "l.csv", tmp_path / "o.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "5,6\n" * 9)
    trace("convert", str(lengths), str(out), "--rate", "2")
    assert read_trace(out).arrival[-1] > 0
    assert json.loads(trace("describe", str(lengths), "--json", "-"))["span_s"] == 0


def test_list_names_what_needs_no_file() -> None:
    told = trace("list")
    for name in ("article", "hole", "chat", "burst", "canonical", "shared-prefix"):
        assert name in told


@pytest.mark.parametrize("command", ["describe", "generate", "convert"])
def test_help_teaches_with_examples(command: str) -> None:
    assert f"kvalloc trace {command} " in trace(command, "--help")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["describe", "nowhere.csv"], "no such file"),
        (["describe", "chat", "--rate", "3"], "arrival times of its own"),
        (["generate", "nope", "--out", "t.csv"], "choose from"),
        (["generate", "uniform", "--out", "t.txt"], "name it so"),
        (["generate", "uniform", "--out", "t.csv", "--prompt", "x"], "LOW:HIGH"),
        (["generate", "uniform", "--out", "t.csv", "--prompt", "9:"], "LOW:HIGH"),
        (["generate", "uniform", "--out", "t.csv", "--prompt", "9:x"], "LOW:HIGH"),
        (["convert", "chat", "t.parquet"], "name it so"),
        (["convert", "nowhere", "t.csv"], "no such file"),
    ],
)
def test_mistakes_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=reason):
        trace(*words)
    assert not list(tmp_path.iterdir())


def kvalloc(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from kvalloc.experiments.__main__ import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules, 'torch was imported'"
    )
    command = [sys.executable, "-c", code, "trace", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_as_a_process(tmp_path: Path) -> None:
    """JSON alone on standard output; one sentence and exit code 2; never torch."""
    good = kvalloc(tmp_path, "describe", "hole", "--json", "-")
    assert (good.returncode, good.stderr) == (0, "") and json.loads(good.stdout)["requests"] == 5
    bad = kvalloc(tmp_path, "describe", "nowhere")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.count("\n") == 1 and bad.stderr.startswith("kvalloc: nowhere: ")
