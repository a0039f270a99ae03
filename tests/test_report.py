"""``kvalloc report``: its numbers are the JSON's, nothing in it runs, mistakes leave no page."""

from __future__ import annotations

import base64
import json
import os
import shutil
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from kvalloc.experiments.app import bench
from kvalloc.experiments.report.tables import MODULES
from kvalloc.experiments.style import backend_style
from kvalloc.tests.command import kvalloc
from kvalloc.tests.compare_example import compare_example
from kvalloc.tests.report_html import Shown

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "cpu"
HOSTILE = "</script><b onclick=alert(1)>&amp;\"'{{ 7 * 7 }}<script>alert(1)</script>"


def report(folder: Path, *arguments: str) -> Shown:
    """The page of a folder."""
    done = kvalloc("report", folder, *arguments, folder=folder)
    assert (done.code, done.out[:10]) == (0, "Written to"), done.err
    return Shown((folder / "report.html").read_text(encoding="utf-8"))


def put(folder: Path, document: Any, name: str = "compare.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def hole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison as the command leaves it."""
    folder = tmp_path_factory.mktemp("hole")
    specs = [word for spec in ("contiguous:max", "paged:4", "vmm:4") for word in ("-b", spec)]
    done = kvalloc(
        "compare", "hole", "--account", "--slots", "80", *specs, "--out", "out", folder=folder
    )
    assert done.code == 0 and "kvalloc report out" in done.out
    return folder / "out"


FIELDS = {
    "backend": "spec",
    "room, tokens": "capacity_tokens",
    "admitted": "admitted",
    "refused, yet free": "fragmentation_failures",
    "tokens generated": "tokens",
    "steps": "steps",
    "peak live, tokens": "peak_live",
    "peak reserved, tokens": "peak_reserved",
    "peak waste, tokens": "peak_waste",
    "peak fragmentation": "peak_fragmentation",
    "tables": "table_bytes",
}


def test_a_comparisons_numbers_are_those_of_its_json(hole: Path) -> None:
    shown = report(hole)
    compare = json.loads((hole / "compare.json").read_text())
    requests, memory = shown.tables["compare.json"]
    for header, field in FIELDS.items():
        table = requests if header in requests.headers else memory
        assert table.column(header) == [backend[field] for backend in compare["backends"]], header
    reserved = memory.headers.index("peak reserved, tokens")
    assert [row[reserved] for row in memory.texts] == ["64", "52", "52"]
    told = shown.maps["compare.json"]["backends"]
    assert [one["owners"] for one in told] == [one["owners"] for one in compare["backends"]]
    assert [one["color"] for one in told] == [
        backend_style(one["spec"]).color for one in compare["backends"]
    ]
    environment = compare["environment"]
    for fact in (environment["command"], environment["date"], environment["cpu"], "on 3 backends"):
        assert fact in " ".join(shown.text.values())


def test_the_pictures_are_those_in_the_folder(hole: Path, tmp_path: Path) -> None:
    shown = report(hole)
    prefix = "data:image/svg+xml;base64,"
    pictures = [base64.b64decode((i["src"] or "").removeprefix(prefix)) for i in shown.named("img")]
    names = ("memory-over-time", "address-space")
    assert pictures == [(hole / f"{name}.svg").read_bytes() for name in names]
    shutil.copy(hole / "compare.json", tmp_path)
    again = report(tmp_path)
    assert [i["src"] for i in again.named("img")] == [i["src"] for i in shown.named("img")]
    assert sorted(os.listdir(tmp_path)) == ["compare.json", "report.html"], "drawn, and not left"


def test_all_committed_results_on_one_page(tmp_path: Path) -> None:
    done = kvalloc("report", RESULTS, "--out", tmp_path / "all.html", folder=tmp_path)
    assert done.code == 0 and "triton-resources.json" in done.err, done
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    shown = Shown(page)
    documents = {path.name: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    told = {name: one for name, one in documents.items() if one.get("schema") == 1}
    assert set(shown.tables) - {"", "others"} == set(told)
    for name, document in told.items():
        (table,) = shown.tables[name]
        assert len(table.values) == len(document["rows"]), name
        for cells, row in zip(table.values, document["rows"], strict=True):
            numbers = [cell for cell in cells if isinstance(cell, float)]
            assert all(number in row.values() for number in numbers), name
        assert ("(simulated)" in shown.text[name]) == bool(document.get("simulated")), name
    policies = shown.tables["policies.json"][0]
    rows = documents["policies.json"]["rows"]
    assert policies.column("holds tokens") == [row["tokens"] for row in rows]
    assert policies.texts[0][:2] == ["contiguous:limit:buddy", "19.3 %"]
    assert all(len(shown.text[name]) > 0 for name in told)
    bare = {
        f"{name}.json"
        for name in ("bench_allocators", "bench_driver", "bench_mapped", "coverage", "soak")
    }
    assert len(shown.named("img")) >= len(told.keys() - bare), "all others have figures"
    references = [tag.get(key) or "" for _, tag in shown.tags for key in ("src", "href")]
    assert all(link.startswith(("data:", "#")) for link in references if link), "no network"


def test_rows_of_an_unknown_experiment_show_all_plain_values(tmp_path: Path) -> None:
    rows = [{"page_bytes": 4096, "op": "map", "us_p50": 1.2345, "series": [1, 2]}]
    put(tmp_path, {"schema": 1, "experiment": "mine", "rows": rows}, "mine.json")
    (table,) = report(tmp_path).tables["mine.json"]
    assert table.headers == ["page", "op", "µs p50"]
    assert table.texts == [["4 KiB", "map", "1.23"]] and table.values == [[4096, "map", 1.2345]]


def test_what_files_hold_is_text_and_never_markup(tmp_path: Path) -> None:
    compare = compare_example(("contiguous:max", "paged:4"))
    compare["trace"] |= {"name": HOSTILE, "notices": [HOSTILE]}
    compare["environment"] = {"command": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    compare["backends"][0]["spec"] = HOSTILE
    put(tmp_path, compare)
    put(tmp_path, {"schema": 1, "experiment": HOSTILE, "rows": [{HOSTILE: HOSTILE}]}, "mine.json")
    (tmp_path / "<i>.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><b/></svg>")
    shown = report(tmp_path)
    assert not {"b", "i"} & {tag for tag, _ in shown.tags}
    assert len(shown.named("script")) == 2, "the data and ours"
    assert shown.maps["compare.json"]["backends"][0]["spec"] == HOSTILE
    assert shown.tables["compare.json"][0].column("backend") == [HOSTILE, "paged:4"]
    assert shown.tables["mine.json"][0].values == [[HOSTILE]]
    assert shown.text["compare.json"].count(HOSTILE) >= 4


def test_large_and_old_comparisons_have_what_they_have(tmp_path: Path) -> None:
    compare = compare_example(("contiguous:max", "paged:4"))
    compare["backends"][0]["owners"] = None
    del compare["backends"][1]["owners"]["numbers"]  # as the first version wrote it
    put(tmp_path, compare)
    told = report(tmp_path).maps["compare.json"]["backends"]
    assert told[0]["owners"] is None and "numbers" not in told[1]["owners"]
    compare["backends"][1]["owners"] = None
    put(tmp_path, compare)
    assert report(tmp_path).maps == {}


def test_the_same_results_give_the_same_page(hole: Path) -> None:
    report(hole)
    page = (hole / "report.html").read_bytes()
    report(hole)
    assert (hole / "report.html").read_bytes() == page


def test_open_shows_the_file(hole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    report(hole)
    assert opened == []
    report(hole, "--open")
    assert opened == [(hole / "report.html").as_uri()]


POLICY = {"schema": 1, "experiment": "policies", "rows": [{"x": 1}]}


@pytest.mark.parametrize(
    ("files", "arguments", "told"),
    [
        ({}, ["none"], "none does not exist"),
        ({"file": "x"}, ["file"], "file is a file"),
        ({}, ["."], "holds no result"),
        ({"a.json": "{}"}, ["."], "holds no result"),
        ({"a.json": "{"}, ["."], "a.json is not JSON"),
        ({"a.json": "[" * 100_000}, ["."], "a.json is not JSON"),
        ({"a.json": b"\xff\xfe"}, ["."], "a.json is not JSON"),
        ({"a.json": '{"schema": 1, "rows": [{"x": NaN}]}'}, ["."], "a.json is not JSON"),
        ({"a.json": '{"schema": 1, "rows": [{"x": 1e999}]}'}, ["."], "a.json is not JSON"),
        ({"a.json": '{"schema": 2, "rows": []}'}, ["."], "schema 2, this version reads 1"),
        ({"a.json": '{"schema": 1, "rows": []}'}, ["."], "has no rows"),
        ({"a.json": '{"schema": 1, "rows": [3]}'}, ["."], "has no rows"),
        ({"a.json": '{"schema": 1, "backends": []}'}, ["."], "compares no backend"),
        ({"a.json": json.dumps(POLICY)}, ["."], "does not hold what policies writes"),
        ({"compare.json": ""}, [".", "--out", "compare.json"], "not JSON"),
    ],
)
def test_mistakes_are_one_sentence_and_no_page(
    files: dict[str, str | bytes], arguments: list[str], told: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    done = kvalloc("report", *arguments, folder=tmp_path)
    assert (done.code, done.out) == (2, "") and told in done.err
    assert done.err.startswith("kvalloc: ") and done.err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == sorted(files), "nothing new"


STRANGE = [None, 0, "x", [1], {"a": 1}, 10**400, "\ud800"]
PARTS = [
    *(("environment", key) for key in ("cores", "memory_bytes", "commit", "date", "versions")),
    *(("trace", key) for key in ("name", "requests", "notices")),
    *(("settings",), ("environment",), ("trace",), ("rows",), ("load_average",), ("question",)),
    *(("backends", 0, key) for key in ("spec", "capacity_tokens", "table_bytes", "tpot_ms")),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: ".".join(map(str, part)))
def test_strange_values_are_shown_or_told_in_one_sentence(
    part: tuple[str | int, ...], tmp_path: Path
) -> None:
    """Whole JSON whose values are not what the command writes: never a traceback."""
    for name in ("memory-over-time", "address-space"):  # nothing has to be drawn
        (tmp_path / f"{name}.svg").write_text("<svg/>")
    mine = {"schema": 1, "experiment": "mine", "rows": [{"x_ms": 1}], "environment": {"cores": 2}}
    for value in STRANGE:
        for document in (compare_example(("paged:4",)), json.loads(json.dumps(mine))):
            *keys, last = part
            inner: Any = document
            if keys and keys[0] not in document:
                continue
            for key in keys:
                inner = inner[key]
            inner[last] = value
            put(tmp_path, document)
            done = kvalloc("report", ".", folder=tmp_path)
            assert done.code in (0, 2)
            assert done.code == 0 or done.err.count("\n") == 1, done.err


@pytest.mark.parametrize(
    ("key", "value"), [("forwards", 0), ("seconds", "x"), ("events", 3), ("tpot_ms_p50", 10**400)]
)
def test_rows_that_no_figure_can_show(key: str, value: object, tmp_path: Path) -> None:
    serve = json.loads((RESULTS / "serve.json").read_text())
    serve["rows"][0][key] = value
    put(tmp_path, serve, "serve.json")
    done = kvalloc("report", ".", folder=tmp_path)
    assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
    assert "serve.json does not hold what serve writes" in done.err


def test_numbers_that_no_figure_can_show(tmp_path: Path) -> None:
    compare = compare_example(("paged:4",))
    compare["backends"][0]["capacity_tokens"] = 10**400
    put(tmp_path, compare)
    for command in ("report .", "plot compare.json"):
        done = kvalloc(*command.split(), folder=tmp_path)
        assert (done.code, done.out) == (2, "") and done.err.count("\n") == 1
        assert "compare.json" in done.err


def test_deep_values_are_told_in_one_sentence(tmp_path: Path) -> None:
    deep = "[" * 900 + "]" * 900
    (tmp_path / "a.json").write_text(
        f'{{"schema": 1, "experiment": "mine", "settings": {{"x": {deep}}}, "rows": [{{"x": 1}}]}}'
    )
    done = kvalloc("report", ".", folder=tmp_path)
    assert done.code in (0, 2) and done.err.count("\n") <= 1
    (tmp_path / "b.json").write_text("[" * 100_000)
    done = kvalloc("plot", "b.json", folder=tmp_path)
    assert (done.code, done.out) == (2, "") and "b.json is not JSON" in done.err
    compare = compare_example(("paged:4",))
    compare["backends"][0]["owners"]["slots"] = float("inf")
    put(tmp_path, compare, "c.json")
    done = kvalloc("plot", "c.json", folder=tmp_path)
    assert (done.code, done.out) == (2, "") and "c.json is not JSON" in done.err


def test_halves_of_characters_are_replaced(tmp_path: Path) -> None:
    """JSON can hold them, names of files can, UTF-8 cannot."""
    rows = [{"x": "\ud800 here"}]
    put(tmp_path, {"schema": 1, "experiment": "mine", "rows": rows}, "mine\udcff.json")
    assert report(tmp_path).tables["mine?.json"][0].texts == [["? here"]]


@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("compare.json", "would overwrite a result"),
        ("address-space.svg", "would overwrite a result"),
        (".", "is a folder"),
        ("compare.json/report.html", "compare.json"),
    ],
)
def test_a_page_goes_nowhere_else(out: str, told: str, hole: Path) -> None:
    before = {path: path.read_bytes() for path in hole.iterdir()}
    done = kvalloc("report", ".", "--out", out, folder=hole)
    assert (done.code, done.out) == (2, "") and told in done.err and done.err.count("\n") == 1
    assert {path: path.read_bytes() for path in hole.iterdir()} == before


def test_a_page_that_cannot_be_finished_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, compare_example(("paged:4",)))
    (tmp_path / "report.html").write_text("old")

    real = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "report.html":  # figures are drawn elsewhere
            raise OSError(28, "No space left on device", "report.html")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    done = kvalloc("report", ".", folder=tmp_path)
    assert (done.code, done.err) == (2, "kvalloc: report.html: No space left on device\n")
    assert (tmp_path / "report.html").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["compare.json", "report.html"]


def test_the_report_knows_the_columns_of_every_bench() -> None:
    named = {f"bench_{command.name}" for command in bench.registered_commands}
    assert {*MODULES} == {"sweep", *named}
