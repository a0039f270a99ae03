"""The result table: every count in its place, nothing cut off, nothing that says nothing."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from kvalloc.experiments.compare_tables import compare_table, what_to_look_at
from kvalloc.tests.compare_example import compare_example, requests


def printed(compare: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, color_system=None, record=True, quiet=False, file=None)
    with console.capture() as capture:
        console.print(compare_table(compare))
    return capture.get()


def row(text: str, spec: str) -> list[str]:
    """The numbers behind a backend's name, from the first line that starts with it."""
    line = next(line for line in text.splitlines() if line.split()[:1] == [spec])
    return line.split()[1:]


def timed(compare: dict[str, Any]) -> dict[str, Any]:
    for i, backend in enumerate(compare["backends"], start=1):
        backend["allocate_us"] = {"p50": 1.25 * i, "p99": 35.21, "max": 1234.0}
        backend["attend_ms"] = {"p50": 0.512, "p99": 2.0}
        backend["tpot_ms"] = {"p50": 4.0 * i, "p99": 1234.5}
        backend["seconds"] = {"allocate": 0.1, "write": 0.1, "attend": 0.5, "total": 9.87}
        backend["max_abs_error"] = 1.2e-7
    return compare


def test_hole_on_three_backends() -> None:
    text = printed(compare_example())
    assert row(text, "contiguous:max") == ["4/1", "4", "0", "1", "64", "44", "(55%)", "50%"]
    assert row(text, "paged:4") == ["5/0", "5", "0", "0", "52", "12", "(15%)", "0%"]
    assert "hole, 5 requests, room for 80 tokens" in text
    assert "Look at refused, yet free (contiguous:max once)" in text
    for absent in ("empted", "never", "TPOT", "None", "nan", "…"):
        assert absent not in text


def test_columns_appear_when_they_say_something() -> None:
    trace = requests((0, 10, 9, 9), (0, 10, 9, 9), (1, 90, 1, 1))
    example = compare_example(("paged:4",), trace, 24, on_full="queue", on_failure="recompute")
    text = printed(example)
    assert "never" in text and "empted" in text
    counts = example["backends"][0]
    assert counts["preemptions"] and counts["never_fit"] == 1
    assert row(text, "paged:4")[:5] == ["2/1", "1", "2", str(counts["growth_failures"]), "0"]


def test_times_get_a_table_of_their_own() -> None:
    text = printed(timed(compare_example()))
    second = text[text.index("TPOT") :]
    assert row(second, "paged:4") == ["2.5", "35.2", "0.512", "2", "8", "1,234", "9.87", "1.2e-07"]
    partly = timed(compare_example())
    partly["backends"][0]["tpot_ms"] = {"p50": None, "p99": None}
    assert "–" in printed(partly)


def test_nothing_is_cut_off_at_eighty_columns() -> None:
    compare = timed(compare_example(("contiguous:max", "contiguous:exact", "paged:16", "vmm")))
    for backend in compare["backends"]:
        backend.update(preemptions=12345, growth_failures=12345, peak_waste=12345, never_fit=0)
        backend.update(capacity_tokens=32768, peak_reserved=32768)
    text = printed(compare)
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert re.sub(r"\s", "", text).count("12,345") == 12


def test_what_to_look_at() -> None:
    assert what_to_look_at(compare_example()) == (
        "Look at refused, yet free (contiguous:max once) and peak waste "
        "(contiguous:max 44, paged:4 12)."
    )
    waste = compare_example(("paged:1", "paged:16"))
    assert what_to_look_at(waste).startswith("Look at peak waste (paged:16 ")
    alike = compare_example(("paged:4", "vmm:4"))
    assert "waste is the same" in what_to_look_at(alike)
    assert "4.00 ms with paged:4, 8.00 with vmm:4" in what_to_look_at(timed(alike))
