"""The door to traces, and our own two formats: what they accept and what they refuse."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.trace import MAX_STEP, MAX_TOKENS, Trace

OWN = "arrival_s,prompt_tokens,output_tokens,max_new_tokens\n0.5,10,5,8\n0.75,20,0,\n"


def written(folder: Path, text: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def columns(trace: Trace) -> tuple[list[float], list[int], list[int], list[int]]:
    return (
        trace.arrival.tolist(),
        trace.prompt.tolist(),
        trace.output.tolist(),
        trace.max_new.tolist(),
    )


EXPECTED = ([0.0, 0.25], [10, 20], [5, 0], [8, -1])


@pytest.mark.parametrize(
    "content",
    [
        OWN,
        OWN.rstrip("\n"),
        OWN.replace("\n", "\r\n"),
        "\ufeff" + OWN,
        OWN + "\n\n",
        OWN.replace("10,5", "10.0, 5.0 "),
        OWN.replace("\n0.75", "\n\n0.75"),
        '"arrival_s","prompt_tokens","output_tokens","max_new_tokens"\n"0.5","10","5","8"\n'
        '".75",20,0,""',
        "output_tokens,max_new_tokens,arrival_s,prompt_tokens\n5,8,0.5,10\n0,,0.75,20",
        gzip.compress(OWN.encode(), mtime=0),
        gzip.compress(OWN[:30].encode(), mtime=0) + gzip.compress(OWN[30:].encode(), mtime=0),
    ],
)
def test_own_csv_in_all_its_guises(tmp_path: Path, content: str | bytes) -> None:
    """BOM, CRLF, no final newline, blank lines, quotes, any column order, gzip by its magic."""
    trace = read_trace(written(tmp_path, content))
    assert columns(trace) == EXPECTED
    assert (trace.name, trace.unit, trace.notices, trace.prefix) == ("t.csv", "s", (), None)


def test_own_json_lines(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.5, "prompt_tokens": 10.0, "output_tokens": 5, "max_new_tokens": 8},
        {"arrival_s": 0.75, "prompt_tokens": 20, "output_tokens": 0, "max_new_tokens": None},
    ]
    path = written(tmp_path, "\n".join(map(json.dumps, rows)), "t.jsonl")
    assert columns(read_trace(path)) == EXPECTED


@pytest.mark.parametrize("number", ["", "7"])
def test_steps_stand_as_they_are(tmp_path: Path, number: str) -> None:
    text = f"arrival_step,prompt_tokens,output_tokens,prefix,prefix_tokens\n3{number},9,1,,\n"
    trace = read_trace(written(tmp_path, text + f"{MAX_STEP},9,1,,"))
    assert trace.unit == "step" and trace.steps(25).tolist() == [int(f"3{number}"), MAX_STEP]
    assert trace.prefix == ((), ())


def test_prefixes(tmp_path: Path) -> None:
    runs = ((("sys a", 512), (7, 3)), ((7, 1),), ())
    text = (
        "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens\n"
        "0,600,1,sys a;7,512;3\n0,1,1,7,1\n0,5,5,,"
    )
    assert read_trace(written(tmp_path, text)).prefix == runs
    head = {"arrival_s": 0, "prompt_tokens": 600, "output_tokens": 1}
    lines = [
        head | {"prefix": ["sys a", 7], "prefix_tokens": [512, 3]},
        head | {"prefix": ["7"], "prefix_tokens": [1]},
        head,
    ]
    assert read_trace(written(tmp_path, "\n".join(map(json.dumps, lines)))).prefix == runs


def test_other_columns_are_ignored_aloud(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, OWN.replace("max_new_tokens", "max_new")))
    assert trace.notices == ("column max_new ignored",)
    assert trace.max_new.tolist() == [-1, -1]


H = "arrival_s,prompt_tokens,output_tokens\n"
P = "arrival_s,prompt_tokens,output_tokens,prefix,prefix_tokens\n"
WRONG = [
    ("", None, "empty"),
    ("\n \n", None, "empty"),
    ("\nx\n", 1, "unknown format"),
    ("a,b,c\n1,2,3\n", None, "unknown format; known are our own CSV"),
    ("[1, 2]", None, "unknown format"),
    ("just words", None, "unknown format"),
    (H, None, "no request"),
    ("arrival_s,prompt_tokens\n0,1", 1, "lacks the column output_tokens"),
    ("prompt_tokens,output_tokens\n1,1", 1, r"lacks the column arrival_s \(or arrival_step\)"),
    ("Arrival_s;prompt_tokens;output_tokens\n0;1;1\n", 1, "semicolons stand between the columns"),
    ("arrival_s\tprompt_tokens\toutput_tokens\n0\t1\t1\n", 1, "tabs stand between"),
    ('"arrival_s";"prompt_tokens";"output_tokens"\n', 1, "save it with commas"),
    ("arrival_s,arrival_step,prompt_tokens,output_tokens\n", 1, "not both"),
    ("arrival_s,prompt_tokens,output_tokens,prompt_tokens\n", 1, "appears twice"),
    ("arrival_s,prompt_tokens,output_tokens,prefix\n", 1, "come together"),
    (H + "0,5,1\n0,0,1\n", 3, "prompt_tokens must be at least 1, not '0'"),
    (H + "0,5,-1\n", 2, "output_tokens must be at least 0"),
    (H + "0,nan,1\n", 2, "not a finite number: 'nan'"),
    (H + "0,1e999,1\n", 2, "not a finite number"),
    (H + "0,5.5,1\n", 2, "whole number, not '5.5'"),
    (H + "0,five,1\n", 2, "not a number: 'five'"),
    (H + "0,1_000,1\n", 2, "not a number: '1_000'"),
    (H + "0,٣,1\n", 2, "not a number"),
    (H + "0,,1\n", 2, "not a number: ''"),
    (H + f"0,{MAX_TOKENS + 1},1\n", 2, "larger than"),
    (H + "0,5," + "9" * 400 + "\n", 2, "not a finite number"),
    (H + "-1,5,1\n", 2, "between 0 and"),
    (H + "NaN,5,1\n", 2, "not a finite number"),
    (H + "1700000000000,5,1\n", 2, "between 0 and"),
    (H + "1,5,1\n0.5,5,1\n", 3, "sort the rows by arrival"),
    (H + "0,5,1\n\n0,5\n", 4, "2 fields where the header names 3; the line may be cut off"),
    (H + "0,5,1,9\n", 2, "4 fields"),
    (H + '0,"5,1\n', 2, "bad quoting"),
    (P + "0,5,1,a;b,3\n", 2, "2 keys, prefix_tokens 1 sizes"),
    (P + "0,5,1,a,6\n", 2, "add up to 6, the prompt has 5"),
    (P + "0,5,1,a;,2;3\n", 2, "empty key"),
    (P + "0,5,1,a,0\n", 2, "at least 1"),
    (P + "0,5,1,,2\n", 2, "empty key"),
    (OWN.replace(",8", ",-8"), 2, "max_new_tokens must be at least 0"),
    (OWN.replace("arrival_s", "arrival_step"), 2, "arrival_step must be a whole number"),
    (OWN.replace("arrival_s", "arrival_step").replace("0.5", str(2**53)), 2, "larger than"),
]


@pytest.mark.parametrize(("content", "line", "reason"), WRONG)
def test_wrong_csv_names_file_line_and_reason(
    tmp_path: Path, content: str, line: int | None, reason: str
) -> None:
    path = written(tmp_path, content)
    where = str(path) if line is None else f"{path}, line {line}"
    with pytest.raises(BadInput, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(where + ": ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


G = '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1}\n'
WRONG_JSON = [
    ('{"a": 1}\n', 1, "unknown format"),
    (G + '{"arrival_s": 0, "prompt_to', 2, "not valid JSON.*cut off"),
    (G + "[1]\n", 2, "must be a JSON object"),
    (G + '{"arrival_s": 0, "prompt_tokens": 5}\n', 2, "output_tokens is missing"),
    (G.replace("5", "0"), 1, "prompt_tokens must be at least 1, not 0"),
    (G.replace("5", "NaN"), 1, "whole number, not nan"),
    (G.replace("5", "Infinity"), 1, "whole number, not inf"),
    (G.replace("5", "5.5"), 1, "whole number, not 5.5"),
    (G.replace("5", '"5"'), 1, "whole number, not '5'"),
    (G.replace("5", "true"), 1, "whole number, not True"),
    (G.replace("5", "null"), 1, "whole number, not None"),
    (G.replace("5", "9" * 30), 1, "larger than"),
    (G.replace("5", "9" * 5000), 1, "too many digits"),
    (G.replace("5", "[" * 100_000), 1, "nested too deeply|not valid JSON"),
    (G.replace(": 0", ": -1"), 1, "arrival_s must lie between"),
    (G.replace(": 0", ": NaN"), 1, "arrival_s must lie between"),
    (G.replace(": 0", ": []"), 1, "arrival_s must be a number"),
    (G.replace(": 0", ": 3") + G, 2, "sort the rows by arrival"),
    (G.replace("}", ', "arrival_step": 1}'), 1, "not both"),
    (G.replace("}", ', "prefix": ["a"]}'), 1, "lists of equal length"),
    (G.replace("}", ', "prefix": "a", "prefix_tokens": 1}'), 1, "lists of equal length"),
    (G.replace("}", ', "prefix": [1.5], "prefix_tokens": [1]}'), 1, "prefix key"),
    (G.replace("}", ', "prefix": [1], "prefix_tokens": [6]}'), 1, "more than the prompt"),
    (G + G.replace("}", ', "prefix": [1], "prefix_tokens": [2]}'), 2, "in every line"),
    (G.replace("}", ', "max_new_tokens": -1}'), 1, "at least 0"),
]


@pytest.mark.parametrize(("content", "line", "reason"), WRONG_JSON)
def test_wrong_json_names_file_line_and_reason(
    tmp_path: Path, content: str, line: int, reason: str
) -> None:
    path = written(tmp_path, content, "t.jsonl")
    with pytest.raises(BadInput, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_no_such_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.csv: there is no such file.*trace list"):
        read_trace(tmp_path / "nowhere.csv")
    with pytest.raises(BadInput, match="this is a folder"):
        read_trace(tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_trace(f"{tmp_path}/nul\0byte")


def test_built_in_names_win_and_a_folder_avoids_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, OWN, "chat")
    assert len(read_trace("chat")) == 56
    assert len(read_trace("./chat")) == len(read_trace(Path("chat"))) == 2


def test_rate_is_for_length_sets(tmp_path: Path) -> None:
    for trace in ("chat", str(written(tmp_path, OWN)), str(written(tmp_path, G, "t.jsonl"))):
        with pytest.raises(BadInput, match="arrival times of its own"):
            read_trace(trace, rate=4)
