"""docs/tutorial.md runs from top to bottom, in a folder of its own, and prints what it says."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from kvalloc.experiments.app import app
from kvalloc.tests.test_docs import ROOT, parsed

PAGE = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.M | re.S)
ELSEWHERE = {"make", "source", "pip", "kvalloc --help", "kvalloc gpu-check"}
"""Lines that test_docs.py parses and other tests run: they install, or want a GPU."""


class Block(NamedTuple):
    """A fenced block and the output that stands below it."""

    language: str
    text: str
    said: str | None


BLOCKS = [Block(*found.groups()) for found in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


def output_of(block: Block, names: dict[str, Any]) -> str:
    """What a block of Python prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(block.text, f"tutorial.md: {block.text[:40]!r}", "exec"), names)
    return printed.getvalue()


def command(line: str) -> None:
    """Run a line of a shell block."""
    if any(line.startswith(start) for start in ELSEWHERE):
        return
    arguments, _ = parsed(line)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, f"{line}\n{done.output}"


def test_every_block_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the page, which is that of a reader: later blocks use earlier ones."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        if block.language == "csv":
            Path("requests.csv").write_text(block.text)
        elif block.language == "sh":
            for line in block.text.splitlines():
                command(line)
        else:
            assert block.language == "python", block.language
            assert output_of(block, names) == (block.said or "")


def test_all_blocks_are_seen() -> None:
    fences = re.findall(r"^```(\w+)$", PAGE.read_text(encoding="utf-8"), re.M)
    seen = [block.language for block in BLOCKS] + ["text" for b in BLOCKS if b.said is not None]
    assert sorted(fences) == sorted(seen) and len(BLOCKS) > 15


def test_a_block_that_prints_something_else_is_found() -> None:
    (block,) = [
        Block(*f.groups()) for f in BLOCK.finditer("```python\nprint(1)\n```\n\n```text\n2\n```")
    ]
    assert output_of(block, {}) == "1\n" != block.said
