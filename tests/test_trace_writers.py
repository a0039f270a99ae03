"""What is written is read back as it was; a failure leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.generators import generate
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.trace import MAX_STEP, MAX_TOKENS, Trace
from kvalloc.experiments.writers import write_trace

TEXT = st.text(st.characters(codec="utf-8", exclude_characters=";"), min_size=1).filter(
    lambda text: text.isprintable() and text == text.strip() and not text.lstrip("-").isdecimal()
)
KEYS = st.integers(-(2**70), 2**70) | TEXT


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    unit = draw(st.sampled_from(["s", "step"]))
    size = draw(st.integers(1, 6))
    scale = 1e7 if unit == "s" else 1
    stamps = st.integers(0, 10**9 if unit == "s" else MAX_STEP)
    stamp = draw(st.lists(stamps, min_size=size, max_size=size).map(sorted))
    arrival = [ticks / scale if unit == "s" else ticks for ticks in stamp]
    runs = draw(
        st.none()
        | st.lists(
            st.lists(st.tuples(KEYS, st.integers(1, 9)), max_size=3), min_size=size, max_size=size
        )
    )
    lengths = st.lists(st.integers(27, MAX_TOKENS), min_size=size, max_size=size)
    caps = st.just([None] * size) | st.lists(
        st.none() | st.integers(0, MAX_TOKENS), min_size=size, max_size=size
    )
    rows = list(zip(arrival, draw(lengths), draw(lengths), draw(caps), strict=True))
    prefix = None if runs is None else [tuple(run) for run in runs]
    return Trace.from_rows("t", unit, rows, prefix=prefix)  # type: ignore[arg-type]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(traces(), st.sampled_from(["t.csv", "t.jsonl", "T.CSV"]))
def test_round_trip(tmp_path: Path, trace: Trace, name: str) -> None:
    again = read_trace(write_trace(trace, tmp_path / name))
    for column in ("arrival", "prompt", "output", "max_new"):
        np.testing.assert_array_equal(getattr(again, column), getattr(trace, column))
    assert (again.unit, again.prefix, again.notices) == (trace.unit, trace.prefix, ())


def test_columns_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    path = write_trace(generate("uniform", requests=2), tmp_path / "t.csv")
    assert path.read_text().splitlines()[0] == "arrival_s,prompt_tokens,output_tokens"


@pytest.mark.parametrize("name", ["t.txt", "t", "t.csv.gz", "", "no/such/folder/t.csv", "d.csv"])
def test_names_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(BadInput, match=r"\.csv or \.jsonl|does not exist|is a folder"):
        write_trace(generate("uniform", requests=2), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["d.csv"]


@pytest.mark.parametrize("key", ["a;b", "two\nlines", " space", ""])
def test_keys_that_csv_cannot_hold(tmp_path: Path, key: str) -> None:
    trace = Trace.from_rows("t", "s", [(0, 9, 1, None)], prefix=[((key, 4),)])
    with pytest.raises(BadInput, match=r"line 2: CSV cannot hold the prefix key .*\.jsonl"):
        write_trace(trace, tmp_path / "t.csv")
    assert not list(tmp_path.iterdir())
    assert read_trace(write_trace(trace, tmp_path / "t.jsonl")).prefix == (((key, 4),),)


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no request"):
        write_trace(Trace.from_rows("t", "s", []), tmp_path / "t.csv")


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Interrupted just before it is put in place: the old file stays, nothing else does."""
    (tmp_path / "t.csv").write_text("old")

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(failure)):
        write_trace(generate("uniform", requests=2), tmp_path / "t.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]
    assert (tmp_path / "t.csv").read_text() == "old"
