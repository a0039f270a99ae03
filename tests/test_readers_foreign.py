"""Other people's traces: recognised by themselves, in time order, prefixes as runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.trace import Trace

FOLDER = Path(os.environ.get("KVALLOC_TRACES", Path(__file__).parents[2] / "shared" / "traces"))


def real(name: str) -> Trace:
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"no {name} in {FOLDER} (set KVALLOC_TRACES)")
    return read_trace(path)


def written(folder: Path, text: str, name: str = "t") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    return written(folder, "\n".join(map(json.dumps, rows)))


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def test_azure_2023_stamps(tmp_path: Path) -> None:
    """Naive, seven fraction digits, CRLF, no final newline."""
    text = AZURE + "2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951691,396,109"
    trace = read_trace(written(tmp_path, text))
    assert trace.arrival.tolist() == [0.0, 4.3145791]
    assert trace.prompt.tolist() == [374, 396] and trace.output.tolist() == [44, 109]
    assert trace.max_new.tolist() == [-1, -1] and trace.notices == ()


def test_azure_2024_stamps(tmp_path: Path) -> None:
    """UTC offset, six digits, sometimes no fraction; offsets may change, dates may pass."""
    rows = (
        "2024-05-10 23:59:59.009930+00:00,10,1",
        "2024-05-11 00:00:01+00:00,11,1",
        "2024-05-11T02:00:01.500000+02:00,12,1",
        "2024-05-11 00:00:02Z,13,1",
        "2024-05-10 19:30:03.25-0430,14,1",
    )
    trace = read_trace(written(tmp_path, AZURE + "\n".join(rows)))
    assert trace.arrival.tolist() == [0.0, 1.99007, 2.49007, 2.99007, 4.24007]


@pytest.mark.parametrize(
    "stamp", ["2024-02-30 00:00:00", "2024-05-10", "12", "2024-05-10 25:00:00", "nan", ""]
)
def test_azure_stamps_that_are_none(tmp_path: Path, stamp: str) -> None:
    path = written(tmp_path, AZURE + f"2024-05-10 00:00:00,1,1\n{stamp},1,1")
    with pytest.raises(BadInput, match=r"t, line 3: timestamp is (not a date|no date)"):
        read_trace(path)


def test_rows_are_sorted_stably_with_a_notice(tmp_path: Path) -> None:
    rows = "".join(f"{t},{p},1\n" for t, p in [(2, 1), (1, 2), (2, 3), (1, 4), (3, 5)])
    header = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
    trace = read_trace(written(tmp_path, header + rows))
    assert trace.prompt.tolist() == [2, 4, 1, 3, 5]
    assert trace.arrival.tolist() == [0, 0, 1, 1, 2]
    assert trace.notices == ("2 rows sorted by time",)
    path = written(tmp_path, header + "".join(f"{p % 2},{p},1\n" for p in range(1, 1001)))
    assert read_trace(path).prompt.tolist() == [*range(2, 1001, 2), *range(1, 1001, 2)]


def test_vidur_twin_gives_the_same_requests(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n5.8926549999999995,91,16\n"
    assert read_trace(written(tmp_path, text)).arrival.tolist() == [0.0, 5.892655]
    azure, vidur = real("azure2023_conv.csv"), real("vidur_splitwise_conv.csv")
    assert len(azure) == 19_366
    np.testing.assert_array_equal(azure.prompt, vidur.prompt)
    np.testing.assert_array_equal(azure.output, vidur.output)
    np.testing.assert_array_equal(azure.arrival, vidur.arrival)  # to the last tick
    np.testing.assert_array_equal(azure.steps(25), vidur.steps(25))


LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n"


def test_length_sets(tmp_path: Path) -> None:
    """All at 0, or Poisson at a rate; 7564.0 is an integer."""
    path = written(tmp_path, LENGTHS + "7564.0,1368,8932.0,5.5\n" * 2000)
    still, moving = read_trace(path), read_trace(path, rate=4, seed=3)
    assert not still.arrival.any() and still.prompt[0] == 7564
    assert moving.arrival[0] == 0 and (np.diff(moving.arrival) >= 0).all()
    assert moving.arrival[-1] == pytest.approx(500, rel=0.1)
    assert moving.notices == ("Poisson arrivals, 4 a second, seed 3",)
    np.testing.assert_array_equal(moving.arrival, read_trace(path, rate=4, seed=3).arrival)
    assert (moving.arrival != read_trace(path, rate=4, seed=4).arrival).any()
    with pytest.raises(BadInput, match="--rate must lie"):
        read_trace(path, rate=-1)
    with pytest.raises(BadInput, match="--seed"):
        read_trace(path, rate=1, seed=-1)


@pytest.mark.parametrize("inserted", ["", "Session ID,Elapsed time,"])
def test_burstgpt_both_releases(tmp_path: Path, inserted: str) -> None:
    """Columns by name; failures kept and counted; rows of 0 and 0 left out with a notice."""
    header = f"Timestamp,{inserted}Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    extra = "9,1.5," if inserted else ""
    rows = [(5, 472, 18), (6.5, 0, 0), (45, 1087, 0), (118.0, 417, 276), (120, 0, 0)]
    text = "".join(f"{t},{extra}GPT-4,{p},{o},{p + o},API log\n" for t, p, o in rows)
    trace = read_trace(written(tmp_path, header + text))
    assert trace.arrival.tolist() == [0, 40, 113]
    assert trace.prompt.tolist() == [472, 1087, 417] and trace.output.tolist() == [18, 0, 276]
    assert (trace.failed, trace.skipped) == (1, 2)
    assert trace.notices == (
        "2 rows of 0 + 0 tokens skipped",
        "1 failed requests kept with 0 output tokens",
    )
    bad = written(tmp_path, header + text + f"121,{extra}GPT-4,0,7,7,API log\n")
    with pytest.raises(BadInput, match="line 7: request tokens must be at least 1"):
        read_trace(bad)


def test_mooncake(tmp_path: Path) -> None:
    """Milliseconds; one id per 512 tokens, the partial tail has its own."""
    path = jsonl(
        tmp_path,
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 3000, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]},
        {"timestamp": 4500, "input_length": 80, "output_length": 5, "hash_ids": [9, 10]},
        {"timestamp": 4501, "input_length": 600, "output_length": 5, "hash_ids": [0]},
    )
    trace = read_trace(path)
    assert trace.arrival.tolist() == [0, 0, 1.5, 1.501]
    assert trace.prefix == (
        ((0, 512), (1, 512), (2, 76)),
        ((0, 512), (1, 512)),
        ((9, 80),),  # an id beyond the prompt says nothing about it
        ((0, 512),),  # 88 tokens that nobody shares
    )


def test_bailian(tmp_path: Path) -> None:
    """Seconds as floats; ids of 16 tokens."""
    row = {"chat_id": 1, "parent_chat_id": -1, "type": "text", "turn": 1}
    path = jsonl(
        tmp_path,
        row | {"timestamp": 61.114, "input_length": 40, "output_length": 3, "hash_ids": [5, 6, 7]},
        row | {"timestamp": 61.1, "input_length": 16, "output_length": 3, "hash_ids": [5]},
    )
    trace = read_trace(path)
    assert trace.arrival.tolist() == [0, 0.014] and trace.prompt.tolist() == [16, 40]
    assert trace.prefix == (((5, 16),), ((5, 16), (6, 16), (7, 8)))
    assert trace.notices == ("1 rows sorted by time",)


def weka(t: float, tokens: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 2, "hash_ids": ids} | more


def test_weka_sessions(tmp_path: Path) -> None:
    """Ids of full blocks only, meaning something within their session; merged by time."""
    first = [weka(0.0, 130, [1, 2, 9]), weka(5.0, 200, [1, 2, 3])]
    path = jsonl(
        tmp_path,
        {"id": "a", "block_size": 64, "hash_id_scope": "local", "requests": first},
        {"id": "b", "hash_id_scope": "local", "requests": [weka(1.0, 64, [1])]},
    )
    trace = read_trace(path)
    assert trace.arrival.tolist() == [0, 1, 5] and trace.prompt.tolist() == [130, 64, 200]
    assert trace.prefix is not None
    a, b, again = trace.prefix
    assert [size for _, size in again] == [64, 64, 64] and again[:2] == a
    assert a[0] != b[0]


def test_weka_global_ids_flat_lines_and_one_pretty_object(tmp_path: Path) -> None:
    session = {"hash_id_scope": "global", "block_size": 16, "requests": [weka(0, 40, [8, 9])]}
    assert read_trace(jsonl(tmp_path, session, session)).prefix == (((8, 16), (9, 16)),) * 2
    pretty = read_trace(written(tmp_path, json.dumps(session, indent=2)))
    assert pretty.prefix == (((8, 16), (9, 16)),)
    flat = read_trace(jsonl(tmp_path, weka(3, 130, [1, 2]), weka(4, 5, [])))
    assert flat.prefix == (((1, 64), (2, 64)), ()) and flat.arrival.tolist() == [0, 1]


@pytest.mark.parametrize(("inner", "relative"), [([0.5, 1.0], True), ([10.5, 11.0], False)])
def test_weka_subagents(tmp_path: Path, inner: list[float], relative: bool) -> None:
    """Inner times count from the entry (older) or from the session (newer)."""
    agent = {"type": "subagent", "t": 10.0, "requests": [weka(t, 64, [7]) for t in inner]}
    session = {"requests": [weka(0, 64, [1]), agent, weka(20, 64, [1])]}
    trace = read_trace(jsonl(tmp_path, session))
    assert trace.arrival.tolist() == [0, 10.5, 11.0, 20]
    assert any("subagents" in notice for notice in trace.notices) == relative


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"requests": 3}, "requests must be a list"),
        ({"requests": [3]}, "requests must be a list"),
        ({"requests": [{"t": 0, "in": 1}]}, "out is missing"),
        ({"requests": [weka(0, 0, [])]}, "in must be at least 1"),
        ({"requests": [weka(0, 64, [])], "block_size": 0}, "block_size must be at least 1"),
        (weka(0, 64, []) | {"hash_ids": "abc"}, "hash_ids must be a list"),
        (weka(0, 64, []) | {"hash_ids": [[1]]}, "prefix key"),
        ({"timestamp": 0, "input_length": 5}, "output_length is missing"),
        ({"timestamp": -1, "input_length": 5, "output_length": 1}, "timestamp must lie"),
        ({"chat_id": 1, "timestamp": "now"}, "timestamp must be a number"),
    ],
)
def test_wrong_json_lines(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=f"t, line 1: .*{reason}"):
        read_trace(jsonl(tmp_path, row))


def test_a_session_without_requests_is_an_empty_trace(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no request"):
        read_trace(jsonl(tmp_path, {"requests": []}))


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"),
    [
        ("azure2023_conv.csv", 19_366, (1155, 14_050), (211, 1000)),
        ("azure2023_code.csv", 8819, (2048, 7437), (28, 1899)),
        ("mooncake_conversation_first5000.jsonl", 5000, (13_066, 123_192), (346, 2000)),
        ("etalon_bwb_lengths.csv", 33_768, (1067, 3504), (1613, 2858)),
        ("burstgpt_3rows.csv", 3, (659, 1087), (175, 276)),
    ],
)
def test_real_traces(
    name: str, requests: int, prompt: tuple[int, int], output: tuple[int, int]
) -> None:
    trace = real(name)
    assert len(trace) == requests and trace.notices == ()
    assert (round(trace.prompt.mean()), trace.prompt.max()) == prompt
    assert (round(trace.output.mean()), trace.output.max()) == output
