"""Every option of the quick commands with hostile values: 0, or 2 and words; never a traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvalloc.experiments import compare_figures as figures
from kvalloc.experiments.app import app
from kvalloc.tests.command import kvalloc

VALUES = (
    *("0", "-1", "1e400", "nan", "inf", "10**20", str(10**20), str(10**40), "9" * 5000, "a" * 5000),
    *("🦙", "١٢", "\x1b[31m", "\udcff", "../..", "paged:4:5", "contiguous:foo", "vmm:3KiB", "vmm:"),
    *(":", "paged:" + "9" * 18, "0.1KiB", "None", " ", ""),
)
SMALL = {
    "compare": "article --account --slots 80 -b paged:4 --json -",
    "trace describe": "article --json -",
    "trace generate": "uniform --requests 5 --out x.csv",
    "trace convert": "article x.csv",
    "size": "--model tiny --context 10 --json -",
    "plot": "nothing.json",
    "run": "nothing",
    "bench allocators": "-b paged:16 --requests 3 --repeats 1 --json -",
    "bench attention": "--tokens 1000000000000 --json -",
    "bench cache": "--batch 1000000000000 --json -",
    "bench driver": "--page 4KiB --rounds 1 --json -",
    "gpu-check": "",
    "report": "nothing",
    "sweep": "-t nothing -b paged:4 --model tiny --memory 1MiB --jobs 1",
}


LONG = ("bench", "gpu-check", "report")
"""Told to go wrong, so that no value begins work. Their targets: test_hostile_targets."""


def attacks() -> Iterator[tuple[str, list[str]]]:
    """A command, and its arguments with one option replaced by an empty place for the value."""
    for name, small in SMALL.items():
        command: Any = get_command(app)
        for part in name.split():
            command = command.commands[part]
        for parameter in command.params:
            option = parameter.opts[0]
            if getattr(parameter, "is_flag", False) or option == "--help":
                continue
            if name.startswith(LONG) and option in ("--out", "--json"):
                continue
            positional = parameter.param_type_name == "argument"
            yield (
                name,
                ["{}", *small.split()[1:]] if positional else [*small.split(), f"{option}={{}}"],
            )


ATTACKS = [
    pytest.param(*attack, id=" ".join([attack[0], attack[1][0], attack[1][-1]]))
    for attack in attacks()
]


@pytest.mark.parametrize(("name", "arguments"), ATTACKS)
def test_hostile_values_end_in_words(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name != "report":  # which is loaded here and would keep it
        # No value reaches it, and it is slow.
        monkeypatch.setattr(figures, "draw", lambda *_, **__: [])
    for value in VALUES:
        filled = [argument.replace("{}", value) for argument in arguments]
        if arguments[-1] == "--out={}" and value in ("../..",):
            continue  # a folder of somebody else's
        code, _, err = kvalloc(*name.split(), *filled, folder=tmp_path)
        assert code in (0, 2), (filled, err)
        assert "Traceback" not in err
        assert code == 0 or err.strip(), "a refusal says why"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("compare hole --account --slots 80 --out=", "--out is empty: give it a value"),
        ("compare hole --account --memory=", "--memory is empty"),
        ("compare hole --account --slots 80 -b paged:4:5", "has too many parts: write paged:BLOCK"),
        (
            "compare hole --account --slots 80 -b contiguous:foo",
            "has no policy 'foo': write contiguous:max",
        ),
        ("compare hole --account --slots 80 -b vmm:3KiB", "whole number of tokens here"),
        (f"compare hole --account --slots {10**20}", "more than any memory holds"),
        (
            f"compare hole --account --memory {10**20}GiB",
            "'100000000000000000000GiB' is not a size",
        ),
        ("compare hole --account --memory 9999999TiB", "at most 2^60 bytes"),
        ("compare hole --account --slots 80 --step-ms nan", "a step of nan ms is out of range"),
        ("compare hole --account --slots 80 --rate 0", "--rate must lie between 1e-6 and 1e6"),
        ("compare hole --run --memory 30000TiB -b contiguous:max", "give the cache less memory"),
        ("bench cache --batch 9999999999 --json -", "give fewer rows, heads, rounds or"),
        ("bench cache --q-heads 8000000 --json -", "of memory and"),
        ("bench cache --max-length 9999999999 --json -", "of memory and"),
        ("bench cache --batch 99 --rounds 1000000", "of memory and"),
        ("bench cache --context 40000", "give a larger one"),
        (f"bench attention --tokens {10**12} --json -", "give fewer --tokens or smaller blocks"),
        (f"bench attention --block {10**12} --json -", "give fewer --tokens or smaller blocks"),
        ("bench attention --device meta", "choose cpu, or cuda with a GPU"),
        (f"bench allocators --requests {10**9}", "kvalloc: --requests must lie between 1 and"),
        ("gpu-check --minutes nan", "give more than 0, at most 1440"),
        ("gpu-check --minutes inf --dry", "give more than 0, at most 1440"),
        ("run polices --quick", "did you mean policies"),
        ("size --model tiny --context 1 --json .", ". is a folder: name a file"),
    ],
)
def test_the_remedy_is_named(arguments: str, told: str, tmp_path: Path) -> None:
    code, out, err = kvalloc(*arguments.split(), folder=tmp_path)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    assert told in err
    assert not list(tmp_path.iterdir())


def test_one_backend_under_two_names_runs_once(tmp_path: Path) -> None:
    specs = ["-b", "contiguous:max", "-b", "contiguous:max:first-fit", "-b", "vmm", "-b", "vmm:16"]
    command = ["compare", "hole", "--account", "--slots", "80", *specs, "--json", "-"]
    code, out, err = kvalloc(*command, folder=tmp_path)
    assert code == 0
    assert [backend["spec"] for backend in json.loads(out)["backends"]] == ["contiguous:max", "vmm"]
    assert "contiguous:max:first-fit is named twice (as contiguous:max) and runs once" in err


@pytest.mark.parametrize(
    "command",
    [
        "compare article --account --slots 80 -b paged:4",
        "run adoption --quick",
        "sweep -t [/dim].csv -b paged:4 -b vmm:12KiB --model tiny --memory 2MiB --jobs 1",
        "bench allocators -b paged:16 --requests 20 --repeats 1",
    ],
)
def test_names_are_text_and_not_markup(command: str, tmp_path: Path) -> None:
    trace = tmp_path / "[/dim].csv"
    trace.parent.mkdir()
    trace.write_text("arrival_step,prompt_tokens,output_tokens\n0,4,1\n")
    code, out, err = kvalloc(*command.split(), "--out", "out[/dim]", folder=tmp_path)
    assert code == 0, err
    assert "Written to out[/dim]/: " in out
