"""Files made to hurt: whatever the bytes, a trace or one sentence, in bounded memory."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.readers import source as readers_source
from kvalloc.tests.hostile_traces import ROWS, mutated, trace_or_sentence


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.randoms(use_true_random=False))
def test_mutated_files(tmp_path: Path, chance: random.Random) -> None:
    path = tmp_path / "t"
    path.write_bytes(mutated(chance))
    trace_or_sentence(path)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from([b"", b"\x1f\x8b", b"{", b"arrival_s,"]))
def test_any_bytes(tmp_path: Path, content: bytes, start: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(start + content)
    trace_or_sentence(path)


@pytest.mark.parametrize("family", sorted(ROWS))
def test_every_truncation(tmp_path: Path, family: str) -> None:
    path = tmp_path / "t"
    for stop in range(len(ROWS[family])):
        path.write_bytes(ROWS[family][:stop])
        trace_or_sentence(path)


@pytest.mark.parametrize("damage", ["cut", "crc", "header", "empty"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(ROWS["azure"] * 50))
    if damage == "cut":
        del packed[-30:]
    elif damage == "crc":
        packed[-6] ^= 1
    elif damage == "header":
        packed[2] = 99
    else:
        packed = bytearray(gzip.compress(b""))
    path = tmp_path / "t.gz"
    path.write_bytes(packed)
    with pytest.raises(BadInput, match="empty" if damage == "empty" else "damaged or cut off"):
        read_trace(path)


@pytest.mark.parametrize("content", [b"\n", b"0,1,1\n", b"9"])
def test_gzip_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """A thousandfold of blank lines, good rows or one endless line: refused on the way."""
    monkeypatch.setattr(readers_source, "SUSPICIOUS", 1 << 20)
    monkeypatch.setattr(readers_source, "MAX_LINE", 1 << 20)
    packer = zlib.compressobj(wbits=31)
    path = tmp_path / "t.gz"
    with path.open("wb") as file:
        file.write(packer.compress(b"arrival_s,prompt_tokens,output_tokens\n"))
        for _ in range(4):
            file.write(packer.compress(content * (1_000_000 // len(content))))
        file.write(packer.flush())
    with pytest.raises(BadInput, match=r"200-fold|longer than"):
        read_trace(path)


def test_binary_and_other_encodings(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for content in (b"\x7fELF\0\0", ROWS["own"].decode().encode("utf-16")):
        path.write_bytes(content)
        with pytest.raises(BadInput, match=r"binary file|not UTF-8"):
            read_trace(path)
    path.write_bytes(ROWS["own"] + b"3,9,1,4,caf\xe9,9\n")
    with pytest.raises(BadInput, match="line 5: this is not UTF-8 text"):
        read_trace(path)


def test_too_many_columns(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(",".join(f"c{i}" for i in range(1_000_000)))
    with pytest.raises(BadInput, match="line 1: more than 1,000 columns"):
        read_trace(path)
    path.write_bytes(ROWS["vidur"] + b"," * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match="line 4: 4 fields where the header names 3"):
            read_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()
    path.write_bytes(ROWS["vidur"] + b'"",' * 1_000_000)
    with pytest.raises(BadInput, match="line 4: bad quoting"):
        read_trace(path)


def test_lines_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers_source, "MAX_LINE", 1000)
    path = tmp_path / "t"
    path.write_bytes(ROWS["vidur"] + b"7" * 2_000_000)
    with pytest.raises(BadInput, match="line 4: the line is longer than 1,000 characters"):
        read_trace(path)


def test_an_object_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvalloc.experiments.readers.jsonl.MAX_LINE", 1000)
    path = tmp_path / "t"
    path.write_text(json.dumps({"requests": [{"t": 0, "in": 1, "out": 1}] * 100}, indent=1))
    with pytest.raises(BadInput, match="not valid JSON"):
        read_trace(path)


def test_memory_follows_the_rows_not_the_text(tmp_path: Path) -> None:
    """100,000 rows of CSV: five int64 per row to keep, one block of text at a time."""
    path = tmp_path / "t.csv"
    path.write_text("arrival_step,prompt_tokens,output_tokens\n" + "5,100,7\n" * 100_000)
    tracemalloc.start()
    try:
        assert len(read_trace(path)) == 100_000
        assert tracemalloc.get_traced_memory()[1] < 60e6
    finally:
        tracemalloc.stop()
