"""Recorded traces of real services through ``kvalloc compare``; skipped where there are none.

They are not part of the project: KVALLOC_TRACES names their folder (default: shared/traces
beside the checkout; CI sets it).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvalloc.experiments.readers import read_trace
from kvalloc.tests.command import kvalloc

FOLDER = Path(os.environ.get("KVALLOC_TRACES", Path(__file__).parents[2] / "shared" / "traces"))
SPECS = ("contiguous:limit", "contiguous:max", "paged:16", "vmm", "vmm:64KiB")


def recorded(name: str) -> Path:
    path = (FOLDER / name).resolve()
    if not path.is_file():
        pytest.skip(f"no {name} in {FOLDER} (set KVALLOC_TRACES)")
    return path


def compared(folder: Path, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = kvalloc("compare", *arguments, "--json", "-", folder=folder)
    assert (code, err) == (0, "")
    result: dict[str, Any] = json.loads(out)
    return result


def test_a_whole_recorded_trace_on_the_books_of_a_model(tmp_path: Path) -> None:
    """All 8,819 requests of an hour of code completion, in 16 GiB of Llama-3-8B."""
    specs = [word for spec in SPECS for word in ("--backend", spec)]
    options = ("--account", "--model", "llama-3-8b", "--memory", "16GiB", *specs)
    result = compared(tmp_path, recorded("azure2023_code.csv"), *options)
    assert [backend["spec"] for backend in result["backends"]] == list(SPECS)
    backends = {backend["spec"]: backend for backend in result["backends"]}
    for backend in result["backends"]:
        assert backend["admitted"] == backend["completed"] == 8819
        assert backend["rejected"] == backend["never_fit"] == 0
        assert backend["tokens"] == 245_896 == result["trace"]["output_tokens"]
        assert backend["owners"] is None, "those are for small runs"
        series = backend["series"]
        assert 1000 <= len(series["step"]) <= 2000
        held = [sum(pair) for pair in zip(series["reserved"], series["free"], strict=True)]
        assert set(held) == {131_072}
        assert all(
            live <= reserved and largest <= free
            for live, reserved, free, largest in zip(
                *(series[name] for name in ("live", "reserved", "free", "largest_free")),
                strict=True,
            )
        )
        assert backend["peak_live"] <= backend["peak_reserved"] <= 131_072
    # Sixteen reservations of 8,192 fill the memory, whatever the requests need.
    limit, most = backends["contiguous:limit"], backends["contiguous:max"]
    assert limit["peak_reserved"] == 131_072 and limit["fragmentation_failures"] == 0
    assert most["peak_fragmentation"] > 0 and most["fragmentation_failures"] > 0
    paged, small, large = (backends[spec] for spec in ("paged:16", "vmm:64KiB", "vmm"))
    assert paged["peak_fragmentation"] == small["peak_fragmentation"] == 0
    assert paged["peak_waste"] < small["peak_waste"] < large["peak_waste"] < most["peak_waste"]
    assert paged["peak_live"] > most["peak_live"] > limit["peak_live"]


def test_recorded_requests_on_real_memory(tmp_path: Path) -> None:
    """Prompts of up to 7,433 tokens, every output against float64, on every default backend.

    Twelve requests take a minute of processor time: all where the traces are named, as in CI.
    """
    requests = 12 if "KVALLOC_TRACES" in os.environ else 3
    path = recorded("azure2023_code.csv")
    result = compared(tmp_path, path, "--run", "--limit", str(requests), "--verify")
    assert len(result["backends"]) == 4
    for backend in result["backends"]:
        assert backend["completed"] == requests
        assert 0 < backend["max_abs_error"] <= 1e-5
        assert backend["series"]["live"][-1] == backend["series"]["reserved"][-1] == 0


def test_the_twin_gives_the_same_comparison(tmp_path: Path) -> None:
    """Vidur's file restates Azure's conversations: the same requests at the same steps."""
    twins = recorded("azure2023_conv.csv"), recorded("vidur_splitwise_conv.csv")
    traces = [read_trace(path) for path in twins]
    assert len(traces[0]) == len(traces[1]) == 19_366
    for column in ("arrival", "prompt", "output"):
        assert (getattr(traces[0], column) == getattr(traces[1], column)).all()
    options = ("--account", "--model", "llama-3-8b", "--memory", "8GiB", "--limit", "1500")
    azure, vidur = (compared(tmp_path, path, *options, "-b", "paged:16") for path in twins)
    assert azure["backends"] == vidur["backends"]
    assert azure["backends"][0]["completed"] == 1500
