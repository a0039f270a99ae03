"""Each experiment in its quick form: the rows that answer its question, not only that it ran."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.generators import generate
from kvalloc.experiments.output import to_json
from kvalloc.experiments.questions import concurrency
from kvalloc.experiments.questions.concurrency import equal_requests
from kvalloc.experiments.readers import read_trace
from kvalloc.experiments.recorded_traces import recorded
from kvalloc.experiments.registry import NAMES, Report, find

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def no_recorded_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same requests everywhere: generated ones."""
    monkeypatch.setenv("KVALLOC_TRACES", "")


@cache
def quick(name: str) -> tuple[list[Row], Report, list[tuple[int, int]]]:
    """Rows of the quick form, run once; what was reported, and the steps of progress."""
    if name == "serve":
        pytest.importorskip("transformers", reason="the extra [transformers] is missing")
    module = find(name).module
    steps: list[tuple[int, int]] = []
    report = Report(progress=lambda done, total: steps.append((done, total)))
    return module.run(module.QUICK, report), report, steps


def rows_of(name: str) -> dict[str, Row]:
    """Rows of the quick form by backend."""
    return {row["backend"]: row for row in quick(name)[0]}


def test_policies_come_in_the_papers_order() -> None:
    rows = rows_of("policies")
    for row in rows.values():
        assert sum(row[key] for key in ("tokens", "later", "never", "free")) == pytest.approx(1)
    orca = [rows[f"contiguous:{policy}:buddy"]["tokens"] for policy in ("limit", "pow2", "oracle")]
    assert orca == sorted(orca) and orca[-1] < 0.5
    assert rows["paged:16"]["tokens"] >= 0.95
    # A page of 2 MiB is 204.8 tokens in each of 80 buffers, or 2.56 tokens of all of them; what
    # is empty of it is for the most part filled later.
    large, interleaved = rows["vmm:2MiB"], rows["vmm:2MiB:interleaved"]
    assert large["later"] > 0.1 > large["never"] > 0.01 > interleaved["later"]
    assert rows["paged:16"]["never"] < 0.001 < rows["paged:16"]["later"] < 0.025
    by_tokens = sorted(rows.values(), key=lambda row: row["tokens"])
    assert by_tokens[0]["steps"] == max(row["steps"] for row in by_tokens)


def test_the_largest_free_interval_matters_to_intervals_alone() -> None:
    rows = rows_of("fragmentation")
    pages = rows.pop("paged:16")
    assert pages["fragmentation_failures"] == 0 == pages["peak_fragmentation"]
    assert set(pages["series"]["fragmentation"]) == {0.0}
    for row in rows.values():
        assert row["fragmentation_failures"] > 0 and 0 < row["mean_fragmentation"] < 1
        assert row["mean_fragmentation"] <= row["peak_fragmentation"]
        assert row["completed"] == pages["completed"] == 150
        assert len(row["series"]["step"]) == len(row["series"]["fragmentation"]) <= 250
    # A reservation by the true output is never outgrown; exact growth meets its neighbours.
    assert all(row["growth_failures"] == 0 for name, row in rows.items() if "oracle" in name)
    assert all(row["growth_failures"] > 0 for name, row in rows.items() if "exact" in name)


def test_block_size_rows_have_waste_tables_and_measured_times() -> None:
    rows = rows_of("block-size")
    one, sixteen, sixty_four = (rows[f"paged:{block}"] for block in (1, 16, 64))
    assert one["waste"] == 0 < sixteen["waste"] < sixty_four["waste"] < 0.2
    assert one["table_bytes"] > 15 * sixteen["table_bytes"] > 45 * sixty_four["table_bytes"]
    for row in rows.values():
        for key in ("books_us", "grow_us", "write_ms", "attend_ms"):
            assert row[key] > 0
        assert row["attend_ms"] < row["tpot_ms"] <= row["tpot_p90_ms"]


def test_pages_and_batches_of_vattention() -> None:
    """Tokens per page by formula; what is printed otherwise is shown, not forced."""
    small, large = quick("page-size")[0]
    assert (small["tokens_per_page"], large["tokens_per_page"]) == (64, 2048)
    assert (small["printed_tokens"], large["printed_tokens"]) == (32, 1024)
    assert (small["printed_batch"], large["printed_batch"]) == (68, 56)
    # Prompts of 1,700 to 5,100 tokens, and at most a page of 2,048 unfilled in every buffer.
    assert 0.65 < large["ratio"] < 0.9 and small["ratio"] == 1
    assert large["interleaved_batch"] == pytest.approx(small["interleaved_batch"], rel=0.02)
    assert small["interleaved_batch"] > small["batch"] > large["batch"]


def test_sixty_four_against_five_hundred_and_twelve() -> None:
    running = {
        name: equal_requests(name, concurrency.CONFIG, 4096 if "limit" in name else None)["running"]
        for name in ("contiguous:limit", "paged:16", "vmm:64KiB", "vmm:2MiB")
    }
    assert list(running.values()) == [64, 512, 512, 256]


def test_lengths_that_differ_keep_half_of_the_factor() -> None:
    rows, report, _ = quick("concurrency")
    equal, mixed = rows[:3], rows[3:]
    assert [row["running"] for row in equal] == [32, 256, 256]
    assert [row["factor"] for row in equal] == [1, 8, 8]
    longest, model, *pages = mixed
    assert (
        longest["limit"] < model["limit"] == 131_072 and longest["factor"] == 1 == model["running"]
    )
    assert all(row["factor"] > 4 and row["limit"] is None for row in pages)
    assert mixed[1]["requests"] == "mixed" and "stand in" in report.notices[0]
    with pytest.raises(BadInput, match="give less memory"):
        concurrency.recorded_requests("paged:16", concurrency.QUICK, None, read_trace("article"))


def test_hits_are_those_of_a_count_by_hand() -> None:
    """Unlimited memory, full pages only, and at least one token left to compute (case 1)."""
    rows = rows_of("prefix")
    trace = recorded("no such file", "shared-prefix", 60, Report())
    assert trace.prefix is not None
    for page in (32, 256):
        seen: set[tuple[Any, ...]] = set()
        hits = 0
        for runs, prompt in zip(trace.prefix, trace.prompt.tolist(), strict=True):
            tokens = [(key, size, i) for key, size in runs for i in range(size)]
            units = [tuple(tokens[: end + page]) for end in range(0, len(tokens) - page + 1, page)]
            for end, unit in enumerate(units, start=1):
                if unit not in seen or end * page > prompt - 1:
                    break
                hits += page
            seen.update(units)
        assert rows[f"paged:{page}"]["hit_tokens"] == hits
    paged, mapped = rows["paged:32"], rows["vmm:64KiB"]
    assert paged["page_tokens"] == mapped["page_tokens"] == 32
    assert paged["hits"] == mapped["hits"] > rows["paged:256"]["hits"]
    assert 0 < paged["saved"] == mapped["saved"] < 1


def lost(row: Row) -> int:
    turned_away, cut_off = row["turned_away"], row["cut_off"]
    assert isinstance(turned_away, int) and isinstance(cut_off, int) and cut_off >= 0
    return turned_away + cut_off


def test_pressure_is_simulated_and_loses_only_what_it_rejects() -> None:
    experiment = find("pressure")
    assert experiment.module.SIMULATED and experiment.stem == "pressure-simulated"
    rows, report, _ = quick("pressure")
    assert report.notices[0].startswith("simulated")
    by = {(row["rate"], row["strategy"]): row for row in rows}
    for rate in (8.0, 60.0):
        recompute, swap, reject = (by[rate, s] for s in ("recompute", "swap", "reject"))
        assert lost(recompute) == lost(swap) == 0 == reject["preemptions"]
        assert recompute["swapped_tokens"] == 0 == swap["recomputed_tokens"]
    high = {strategy: by[60.0, strategy] for strategy in ("recompute", "swap", "reject")}
    assert high["recompute"]["recomputed_tokens"] > 0 < high["swap"]["swapped_tokens"]
    assert lost(high["reject"]) > lost(by[8.0, "reject"])
    assert high["reject"]["cut_off"] > 0, "growth is refused, too"
    assert high["recompute"]["ttft_p99_s"] > high["reject"]["ttft_p99_s"] > 0


def test_warm_rows_make_no_driver_call() -> None:
    if not hasattr(os, "memfd_create"):
        pytest.skip("the host driver needs Linux")
    rows, _, _ = quick("allocation-latency")
    grow = {(row["backend"], row["state"]): row for row in rows if row["op"] == "grow"}
    assert grow["vmm:64KiB", "warm rows"]["driver_calls"] == 0
    pooled, first = (grow["vmm:64KiB", state]["driver_calls"] for state in ("pooled", "first pass"))
    # Created pages are there already: what is left is to map them and to grant access.
    assert 0 < pooled < first <= grow["vmm:64KiB", "mapping ahead"]["driver_calls"]
    assert grow["paged:16", "–"]["driver_calls"] is None
    assert len({row["calls"] for row in grow.values()}) == 1, "not everybody served the same"
    for row in rows:
        assert 0 < row["us_p50"] <= row["us_p99"] <= row["us_max"]
        assert row["quantiles"] == sorted(row["quantiles"])
        assert row["quantiles"][-1] == pytest.approx(row["us_max"], abs=0.01)


def test_scaling_counts_every_token() -> None:
    rows, _, steps = quick("scaling")
    assert [row["requests"] for row in rows] == [100] * 3 + [1000] * 3
    for num in (100, 1000):
        trace = generate("alpaca", requests=num, rate=0)
        tokens = {row["tokens"] for row in rows if row["requests"] == num}
        assert tokens == {int(trace.output.sum())}
    for row in rows:
        assert row["us_per_request"] == pytest.approx(row["seconds"] / row["requests"] * 1e6)
    assert steps[-1][1] == 3 * 1100


def test_the_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    rows, _, _ = quick("timeline")
    for backend in ("paged:16", "vmm:64KiB"):
        calls = {row["call"]: row for row in rows if row["backend"] == backend}
        assert calls["admit"]["calls"] == calls["release"]["calls"] == 3
        assert calls["prefill"]["calls"] == 3 * 2, "one for each of two layers"
        assert calls["write"]["calls"] == calls["prefill"]["calls"] + calls["attend"]["calls"]
        assert sum(row["share"] for row in calls.values()) == pytest.approx(1)
        lane = sorted(
            event for call in ("write", "view", "prefill", "attend")
            for event in calls[call]["events"]
        )  # fmt: skip
        for (start, duration), (later, _) in pairwise(lane):
            assert start + duration <= later + 0.2, "one thread cannot do two things at once"
    find("timeline").module.plot(rows, tmp_path)
    events = json.loads((tmp_path / "timeline.trace.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(row["events"]) for row in rows)
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["paged:16", "vmm:64KiB"]


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_draws_its_quick_rows(name: str, tmp_path: Path) -> None:
    experiment = find(name)
    rows, _, steps = quick(name)
    assert rows and steps and all(0 <= done <= total for done, total in steps)
    for column in experiment.module.COLUMNS:
        assert any(column.key in row for row in rows), f"no row has {column.key}"
        for row in rows:
            column.write(row.get(column.key))
    paths = experiment.module.plot(rows, tmp_path)
    assert {path.name for path in paths} >= {f"{experiment.stem}.svg", f"{experiment.stem}.png"}
    assert all(path.stat().st_size > 1000 for path in paths)
    if experiment.module.SIMULATED:
        assert "simulated" in (tmp_path / f"{experiment.stem}.svg").read_text().lower()


MEASURED: dict[str, set[str]] = {
    "block-size": {"books_us", "grow_us", "write_ms", "attend_ms", "tpot_ms", "tpot_p90_ms"},
    "allocation-latency": {"us_p50", "us_p90", "us_p99", "us_max", "quantiles"},
    "scaling": {"seconds", "us_per_request", "us_per_token"},
    "timeline": {"total_ms", "share", "us_p50", "us_max", "events"},
    "serve": {
        *("seconds", "tokens_per_s", "events"),
        *(f"{what}_ms_{p}" for what in ("tpot", "ttft") for p in ("p50", "p99")),
        *(f"{part}_share" for part in ("allocate", "write", "attend", "model", "rest")),
    },
}
"""What a clock decides; all the rest depends on the seed alone."""


def settled(value: Any, measured: set[str]) -> Any:
    """What does not depend on a clock: of measured lists the length, of other measured values
    that they are there."""
    if isinstance(value, dict):
        if value.get("state") == "mapping ahead":  # its thread maps as far as it comes
            measured = measured | {"driver_calls"}
        return {
            key: _shape(item) if key in measured else settled(item, measured)
            for key, item in value.items()
        }
    return [settled(item, measured) for item in value] if isinstance(value, list) else value


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    return len(value) if isinstance(value, list) else None


def test_quick_rows_depend_on_the_seed_alone() -> None:
    """Another process, with other hashes, finds the same, apart from times."""
    names = [name for name in NAMES if name != "serve" or find_spec("transformers")]
    script = f"""
        import json
        from kvalloc.experiments.output import to_json
        from kvalloc.tests.test_experiments import quick
        print(to_json({{name: quick(name)[0] for name in {names}}}))
    """
    environ = {**os.environ, "PYTHONHASHSEED": "4242"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        here = json.loads(to_json({name: quick(name)[0] for name in names}))
        there = json.loads(child.communicate(timeout=300)[0])
    for name in names:
        measured = MEASURED.get(name, set())
        assert settled(there[name], measured) == settled(here[name], measured), name
        assert not measured or there[name] != here[name], f"{name} was not measured anew"
