"""Files made to hurt: whatever the bytes, a trace or one sentence, in bounded memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvalloc.experiments import readers_source
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace

ROWS = {
    "own": b"arrival_s,prompt_tokens,output_tokens,max_new_tokens,prefix,prefix_tokens\n"
    b"0.25,100,7,9,a;b,64;3\n1.5,20,0,,,\n2.5,9,1,4,7,9\n",
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2024-05-10 00:00:01+00:00,396,109",
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n",
    "burst": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,0,0,0,API log\n",
    "own json": b'{"arrival_step": 3, "prompt_tokens": 9, "output_tokens": 2, "prefix": ["a"], '
    b'"prefix_tokens": [4]}\n{"arrival_step": 3, "prompt_tokens": 9, "output_tokens": 2}\n',
    "mooncake": b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n',
    "bailian": b'{"chat_id": 1, "timestamp": 6.1, "input_length": 20, "output_length": 5, '
    b'"hash_ids": [3, 4]}\n',
    "weka": b'{"block_size": 64, "requests": [{"t": 0.5, "in": 70, "out": 2, "hash_ids": [1]}, '
    b'{"type": "subagent", "t": 1, "requests": [{"t": 2, "in": 7, "out": 2}]}]}\n',
}
PARTS = (
    b"\0 \xff \xef\xbb\xbf \xe2\x80\xa8 \" ' , ; \n \r\n { } [ ] : - + . e E _ 0 1 9 nan inf NaN "
    b"Infinity null true 1e308 -1 0.5 9007199254740993 99999999999999999999 \\u0000 \\ud800"
).split(b" ")


def trace_or_sentence(path: Path) -> None:
    try:
        trace = read_trace(path)
    except BadInput as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        assert len(str(error)) < 600
    else:
        assert len(trace) >= 1


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_mutated_files(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(ROWS[data.draw(st.sampled_from(sorted(ROWS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        cut = data.draw(st.integers(0, 8))
        content[at : at + cut] = data.draw(st.sampled_from(PARTS) | st.binary(max_size=4))
    packed = data.draw(st.booleans())
    path = tmp_path / "t"
    path.write_bytes(gzip.compress(bytes(content)) if packed else bytes(content))
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
    monkeypatch.setattr("kvalloc.experiments.readers_jsonl.MAX_LINE", 1000)
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
