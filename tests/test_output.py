"""What leaves a command: sizes, strict JSON, whole files, the record of the environment."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy
import pytest

from kvalloc.experiments.environment import command_line, environment
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.output import (
    emit_json,
    format_bytes,
    parse_bytes,
    to_json,
    write_atomic,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512", 512),
        ("64KiB", 65536),
        ("2MiB", 2**21),
        ("2mib", 2**21),
        (" 16 GiB ", 2**34),
        ("16g", 2**34),
        ("1T", 2**40),
        ("1.5GiB", 3 * 2**29),
        ("1kB", 1000),
        ("0.5kb", 500),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "0", "0MiB", "1.5", "0.3KiB", "1e9", "nan", "2 MiB 3", "5XiB", "²"]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (100 * 2**20, "100 MiB"),
        (2**40, "1 TiB"),
        (-2048, "-2 KiB"),
        (2**70, "1048576 PiB"),
    ],
)
def test_sizes_are_written(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


def test_json_is_strict(tmp_path: Path) -> None:
    rows: dict[Any, Any] = {
        "nan": float("nan"),
        "inf": [float("inf"), (1.5, -float("inf"))],
        "numpy": numpy.array([1.0, numpy.nan]),
        "count": numpy.int64(3),
        4: tmp_path,
    }
    assert json.loads(to_json(rows), parse_constant=pytest.fail) == {
        "nan": None,
        "inf": [None, [1.5, None]],
        "numpy": [1.0, None],
        "count": 3,
        "4": str(tmp_path),
    }
    emit_json(rows, tmp_path / "rows.json")
    assert (tmp_path / "rows.json").read_text() == to_json(rows)


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_atomic(tmp_path / "a" / "b.txt", "old")
    assert target.read_text() == "old"
    plain = tmp_path / "plain"
    plain.write_text("")
    assert target.stat().st_mode == plain.stat().st_mode, "readable for whom other files are"

    with pytest.raises(TypeError):
        emit_json({"no": object()}, target)

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, b"new")
    assert target.read_text() == "old"
    assert [entry.name for entry in target.parent.iterdir()] == ["b.txt"], "nothing left behind"


def test_environment_says_where_a_result_comes_from() -> None:
    facts = environment()
    assert json.loads(to_json(facts)) == facts
    assert set(facts) >= {"command", "kvalloc", "commit", "dirty", "date", "cpu", "device"}
    assert facts["date"].endswith("+00:00")
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 2**20
    assert re.match(r"\d", facts["versions"]["numpy"])
    if facts["commit"] is not None:
        assert re.fullmatch("[0-9a-f]{40}", facts["commit"])


@pytest.mark.parametrize(
    ("argv", "typed"),
    [
        (["/opt/venv/bin/kvalloc", "size", "--model", "a b"], "kvalloc size --model 'a b'"),
        (["/src/experiments/__main__.py", "compare"], "kvalloc compare"),
        (["-c"], "-c"),
        ([""], "python"),
    ],
)
def test_the_command_is_told_as_it_is_typed(
    argv: list[str], typed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv)
    assert command_line() == typed


def test_a_pipe_or_device_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    """A rename over /dev/null, which root may do, would leave a machine without it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert write_atomic(pipe, "text") == pipe
        assert os.read(reader, 99) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_what_a_link_points_to_is_written(tmp_path: Path) -> None:
    """As with /dev/stdout, the link itself stays."""
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to("there/file")
    for text in ("first", "second"):
        assert write_atomic(link, text) == link
        assert (tmp_path / "there" / "file").read_text() == text
    assert link.is_symlink() and os.listdir(tmp_path / "there") == ["file"]
