"""``kvalloc compare``: its numbers, its JSON, and what a real run adds to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvalloc.experiments.compare import Settings, compare
from kvalloc.experiments.specs import parse_spec
from kvalloc.experiments.trace import Trace
from kvalloc.models import geometry
from kvalloc.tests.command import kvalloc
from kvalloc.tests.compare_example import compare_example

DROP = ("--on-full", "reject", "--on-failure", "drop")
TOP = {"schema", "environment", "trace", "settings", "backends"}
TIMES = {
    "seconds": {"allocate", "write", "view", "attend", "total"},
    "allocate_us": {"p50", "p99", "max"},
    "attend_ms": {"p50", "p99"},
    "tpot_ms": {"p50", "p99"},
}
BACKEND = {
    "spec",
    "capacity_tokens",
    "admitted",
    "rejected",
    "never_fit",
    "completed",
    "growth_failures",
    "fragmentation_failures",
    "preemptions",
    "peak_live",
    "peak_reserved",
    "peak_waste",
    "peak_fragmentation",
    "steps",
    "tokens",
    "allocations",
    "table_bytes",
    "max_abs_error",
    "series",
    "owners",
    *TIMES,
}
LATER = {"hit_tokens", "recomputed_tokens", "swapped_tokens"}
"""Keys that joined the stable ones; none of those ever leaves."""
SERIES = {"step", "live", "reserved", "free", "largest_free"}
REQUESTS = "arrival_step,prompt_tokens,output_tokens\n0,40,6\n0,17,9\n2,5,3\n3,1,0\n"


def compared(*arguments: str | Path, folder: Path) -> dict[str, Any]:
    """The JSON of a comparison, and nothing else on either stream."""
    code, out, err = kvalloc("compare", *arguments, "--json", "-", folder=folder)
    assert (code, err) == (0, "")
    assert not list(folder.glob("out*")), "JSON on standard output is all there is"
    result: dict[str, Any] = json.loads(out)
    return result


def backends(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--backend", spec)]


def check_books(result: dict[str, Any]) -> None:
    """Nothing is lost: every slot is held or free, every request has one fate."""
    for backend in result["backends"]:
        series, owners = backend["series"], backend["owners"]
        sums = {a + b for a, b in zip(series["reserved"], series["free"], strict=True)}
        assert len(sums) == 1 and sums.pop() == owners["slots"]
        assert series["live"][-1] == series["reserved"][-1] == 0
        assert backend["admitted"] + backend["rejected"] == result["trace"]["requests"]
        assert backend["completed"] <= backend["admitted"]
        assert backend["peak_live"] <= backend["peak_reserved"] <= owners["slots"]


def test_the_articles_table(tmp_path: Path) -> None:
    """80 slots, a refused request or growth is lost: the numbers of the article."""
    specs = ("contiguous:max", "contiguous:exact", "paged:4", "paged:8", "paged:16", "vmm:4")
    options = ("article", "--account", "--slots", "80", *DROP, *backends(*specs))
    result = compared(*options, folder=tmp_path)
    keys = ("spec", "rejected", "growth_failures", "peak_reserved", "peak_waste")
    assert [tuple(backend[key] for key in keys) for backend in result["backends"]] == [
        ("contiguous:max", 2, 0, 70, 33),
        ("contiguous:exact", 0, 4, 31, 0),
        ("paged:4", 0, 0, 64, 8),
        ("paged:8", 0, 1, 72, 13),
        ("paged:16", 1, 1, 80, 25),
        ("vmm:4", 0, 0, 64, 8),
    ]
    assert result["backends"][1]["fragmentation_failures"] == 4
    check_books(result)

    code, out, _ = kvalloc("compare", *options, folder=tmp_path)
    assert code == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    # admitted/rejected, done, growth failed, refused though free, peak reserved, peak waste
    assert lines["contiguous:max"][1:7] == ["7/2", "7", "0", "0", "70", "33"]
    assert lines["contiguous:exact"][1:7] == ["9/0", "5", "4", "4", "31", "0"]
    assert lines["paged:4"][1:7] == ["9/0", "9", "0", "0", "64", "8"]
    assert lines["paged:8"][1:7] == ["9/0", "8", "1", "0", "72", "13"]
    assert lines["paged:16"][1:7] == ["8/1", "7", "1", "0", "80", "25"]


@pytest.mark.parametrize("waits", [True, False])
def test_the_numbers_beside_the_owners_are_the_simulators(waits: bool, tmp_path: Path) -> None:
    specs = ("contiguous:max", "paged:4", "vmm:4")
    policy = () if waits else DROP
    options = ("hole", "--account", "--slots", "60", *policy, *backends(*specs))
    told = compared(*options, folder=tmp_path)["backends"]
    full, failure = ("queue", "recompute") if waits else ("reject", "drop")
    slow = compare_example(specs, slots=60, on_full=full, on_failure=failure)["backends"]
    assert [b["owners"]["numbers"] for b in told] == [b["owners"]["numbers"] for b in slow]
    assert any(max(b["owners"]["numbers"]["waiting"]) for b in told) == waits


def test_the_hole(tmp_path: Path) -> None:
    """The fifth request finds 32 free slots in two intervals of 16; pages do not mind."""
    specs = ("contiguous:max", "paged:4", "vmm:4")
    options = ("hole", "--account", "--slots", "80", *DROP, *backends(*specs))
    first, *others = compared(*options, folder=tmp_path)["backends"]
    assert (first["admitted"], first["rejected"], first["fragmentation_failures"]) == (4, 1, 1)
    assert first["owners"]["refusals"] == [[2, 4, 20, 32, 16]]
    assert first["peak_fragmentation"] == 0.5
    for other in others:
        assert (other["admitted"], other["completed"], other["peak_fragmentation"]) == (5, 5, 0)


def test_a_comparison_of_the_books_alone(tmp_path: Path) -> None:
    result = compared("burst", "--account", folder=tmp_path)
    assert set(result) == TOP and result["schema"] == 1
    specs = [backend["spec"] for backend in result["backends"]]
    assert specs == ["contiguous:max", "contiguous:exact", "paged:16", "vmm:64KiB"]
    for backend in result["backends"]:
        assert set(backend) == BACKEND | LATER
        assert set(backend["series"]) == SERIES
        for key, parts in TIMES.items():
            assert backend[key] == dict.fromkeys(parts), "no time without a run"
        assert backend["max_abs_error"] is None
        assert backend["completed"] == 56
    assert result["settings"]["dtype"] == "float32", "the model's own"
    check_books(result)


def test_the_seed_is_all_that_is_random(tmp_path: Path) -> None:
    def told(seed: int) -> dict[str, Any]:
        result = compared("chat", "--account", "--seed", str(seed), folder=tmp_path)
        del result["environment"]
        return result

    assert told(3) == told(3)
    assert told(3)["backends"] != told(4)["backends"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, dict[str, Any]]:
    """One short comparison on real memory, with its files."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.csv").write_text(REQUESTS)
    code, out, err = kvalloc("compare", "mine.csv", "--verify", "--out", "here/out", folder=folder)
    assert (code, err) == (0, "")
    return folder, out, json.loads((folder / "here/out/compare.json").read_text())


def test_a_run_is_right_and_takes_time(run: tuple[Path, str, dict[str, Any]]) -> None:
    result = run[2]
    check_books(result)
    for backend in result["backends"]:
        assert set(backend) == BACKEND | LATER
        for key, parts in TIMES.items():
            assert set(backend[key]) == parts
            assert all(value > 0 for value in backend[key].values()), key
        assert backend["seconds"]["total"] > sum(
            backend["seconds"][part] for part in ("allocate", "write", "view", "attend")
        )
        assert backend["allocate_us"]["p50"] <= backend["allocate_us"]["max"]
        assert 0 < backend["max_abs_error"] <= 1e-5
        assert (backend["completed"], backend["tokens"]) == (4, 18)


def test_a_run_says_where_its_files_are(run: tuple[Path, str, dict[str, Any]]) -> None:
    folder, out, _ = run
    files = sorted(path.name for path in (folder / "here/out").iterdir())
    pictures = [
        f"{name}.{kind}" for name in ("address-space", "memory-over-time") for kind in KINDS
    ]
    assert files == sorted(["compare.json", *pictures])
    words = out.split()
    for name in ("here/out/:", *files):
        assert name in words or f"{name}," in words, name
    assert sorted(path.name for path in folder.iterdir()) == ["here", "mine.csv"]
    assert "max_new is missing in 4 requests" in " ".join(words)


KINDS = ("png", "svg")


def test_a_run_has_the_same_books_as_the_account(
    run: tuple[Path, str, dict[str, Any]], tmp_path: Path
) -> None:
    """One replay loop for both: every figure of the books is the same with tensors behind it."""
    (tmp_path / "mine.csv").write_text(REQUESTS)
    account = compared("mine.csv", "--account", "--memory", "64MiB", folder=tmp_path)
    for real, books in zip(run[2]["backends"], account["backends"], strict=True):
        for key in (BACKEND | LATER) - set(TIMES) - {"max_abs_error"}:
            assert real[key] == books[key], (real["spec"], key)


def test_the_books_of_mapped_memory_depend_on_its_order(tmp_path: Path) -> None:
    """A head of its own buffer fills a page later: the account says so without a run."""
    of = {}
    for order in ("token-major", "head-major"):
        for how in ("--account", "--run"):
            options = ("hole", how, "--memory", "4MiB", "--layout", order)
            result = compared(*options, *backends("paged:16", "vmm:64KiB"), folder=tmp_path)
            assert result["settings"]["layout"] == order
            of[order, how] = [backend["peak_reserved"] for backend in result["backends"]]
    assert all(
        of[order, "--run"] == of[order, "--account"] for order in ("token-major", "head-major")
    )
    (pages, mapped), (same, more) = (of[order, "--run"] for order in ("token-major", "head-major"))
    assert pages == same and mapped < more


def test_limit_and_max_new_shape_the_trace(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(REQUESTS)
    options = ("mine.csv", "--account", *backends("contiguous:max"), "--limit", "2")
    peaks = {
        rule: compared(*options, *rule.split(), folder=tmp_path)["backends"][0]["peak_reserved"]
        for rule in ("", "--max-new 30", "--max-new output", "--max-new limit --memory 256MiB")
    }
    assert list(peaks.values()) == [57 + 2 * 9, 57 + 2 * 30, 57 + 6 + 9, 2 * 32_768]


def test_longer_steps_gather_arrivals(tmp_path: Path) -> None:
    """56 requests within ten seconds: a step of an hour takes them all at once."""
    options = ("chat", "--account", *backends("paged:16"))
    usual, long = (
        compared(*options, *extra, folder=tmp_path)["backends"][0]
        for extra in ((), ("--step-ms", "3600000"))
    )
    assert long["peak_live"] > usual["peak_live"] and long["steps"] < usual["steps"]


def test_prefixes_and_swaps_run_for_real() -> None:
    """Shared prompts and preempted sequences that wait in host memory read back right."""
    runs = (("common", 20), ("tail", 4))
    trace = Trace.from_rows("test", "step", [(i, 24, 12, 12) for i in range(6)], prefix=[runs] * 6)
    specs = tuple(parse_spec(spec, slots=False) for spec in ("paged:4", "vmm:4KiB"))
    settings = Settings(
        specs, geometry("tiny"), 60 * 2048, run=True, on_failure="swap", verify=True
    )
    for backend in compare(trace, settings)["backends"]:
        assert backend["completed"] == 6
        assert backend["hit_tokens"] > 0
        assert backend["max_abs_error"] < 1e-5


def test_half_precision_runs_too() -> None:
    trace = Trace.from_rows("test", "step", [(0, 20, 4, 4)])
    settings = Settings(
        (parse_spec("vmm:64KiB", slots=False), parse_spec("paged:16", slots=False)),
        geometry("tiny").with_dtype("bf16"),
        1 << 21,
        run=True,
        verify=True,
    )
    for backend in compare(trace, settings)["backends"]:
        assert 1e-5 < backend["max_abs_error"] < 5e-2
    assert torch.get_default_dtype() is torch.float32
