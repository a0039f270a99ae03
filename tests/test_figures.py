"""The figures exist, say what they show, and are the same for the same input."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from kvalloc.experiments import plot_command, style
from kvalloc.experiments.address_space import (
    Block,
    Run,
    borders,
    cells,
    draw_address_space,
    lives,
    merge,
    read_rows,
)
from kvalloc.experiments.compare_figures import draw
from kvalloc.experiments.compare_read import read_compare
from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.questions import serve, timeline
from kvalloc.experiments.refusal_marks import clear_band
from kvalloc.tests.compare_example import compare_example

NAMES = [
    f"{name}.{kind}" for name in ("memory-over-time", "address-space") for kind in ("svg", "png")
]


def words(path: Path) -> str:
    """All text of an SVG; fails if it is not well-formed."""
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    return " ".join(text for node in root.iter() if (text := (node.text or "").strip()))


def test_draws_both_figures_with_labels(tmp_path: Path) -> None:
    compare = compare_example()
    compare["backends"][0]["owners"]["refusals"] = [[2, 4, 20, 32, 16]]
    paths = draw(compare, tmp_path / "new")
    assert [path.name for path in paths] == NAMES
    for path in paths:
        assert path.parent == tmp_path / "new"
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            continue
        text = words(path)
        for label in ("contiguous:max", "paged:4", "vmm:4", "step", "hole", "1 rejected"):
            assert label in text
    assert "capacity" in words(paths[0]) and "peaks: 64 reserved, 44 wasted" in words(paths[0])
    assert "reserved, no token in it" in words(paths[2])
    assert "request 5 needs 20" in words(paths[2]) and "32 free, at most 16 in a row" in words(
        paths[2]
    )
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(NAMES)


def test_same_input_same_bytes(tmp_path: Path) -> None:
    one = ("contiguous:max",)
    first = draw(compare_example(one), tmp_path / "a")
    again = draw(compare_example(one), tmp_path / "b")
    assert [a.read_bytes() for a in first] == [b.read_bytes() for b in again]
    other = draw(compare_example(one, slots=88), tmp_path / "c")
    assert all(a.read_bytes() != c.read_bytes() for a, c in zip(first, other, strict=True))


def test_without_owners_says_so(tmp_path: Path) -> None:
    compare = compare_example(("paged:4",))
    assert len(draw(compare, tmp_path)) == 4
    for backend in compare["backends"]:
        backend["owners"] = None
    said: list[str] = []
    paths = draw(compare, tmp_path, notify=said.append)
    assert [path.stem for path in paths] == ["memory-over-time"] * 2
    assert len(said) == 1 and "address-space" in said[0]
    assert sorted(tmp_path.iterdir()) == sorted(paths), (
        "the earlier run's would pass for this one's"
    )
    assert len(draw(compare, tmp_path)) == 2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [1, 5])
def test_any_number_of_backends(tmp_path: Path, number: int) -> None:
    specs = ("contiguous:max", "contiguous:exact", "paged:1", "paged:4", "vmm")
    draw(compare_example(specs[:number]), tmp_path)


@pytest.mark.filterwarnings("error")
def test_a_run_in_which_nothing_happened(tmp_path: Path) -> None:
    compare = compare_example(("paged:4",))
    (backend,) = compare["backends"]
    backend["series"] = {name: [] for name in backend["series"]}
    backend["owners"] |= {"steps": [], "rows": []}
    assert len(draw(compare, tmp_path)) == 4


@pytest.mark.filterwarnings("error")
def test_crowded_runs_fractions_of_slots_and_many_refusals(tmp_path: Path) -> None:
    compare = compare_example(("paged:4",))
    owners = compare["backends"][0]["owners"]
    owners["slots"] = 100.5
    owners["steps"] = list(range(120))
    owners["rows"] = [
        [[2 * i, 2 * i + 0.5 + (i + step) % 3 / 2, (i + step) % 7] for i in range(50)]
        for step in owners["steps"]
    ]
    owners["refusals"] = [[step, 3] for step in range(40)]
    paths = draw(compare, tmp_path)
    assert "40 refusals" in words(paths[2])
    assert "stores a token" not in words(paths[2]), "it was not recorded"
    assert paths[2].stat().st_size < 1_000_000


def test_what_is_said_about_a_refusal_covers_no_request() -> None:
    compare = compare_example(("contiguous:max", "paged:4", "vmm:4"), on_full="queue")
    owners = compare["backends"][0]["owners"]
    owners["refusals"] = [[2, 4, 20, 32, 16]]
    with style.applied():
        figure = draw_address_space(compare, compare["backends"])
        figure.draw_without_rendering()
    axes = figure.axes[0]
    (said,) = (text for text in axes.texts if "request 5 needs" in text.get_text())
    box = said.get_window_extent().transformed(axes.transData.inverted())
    covered = {
        run.request + 1
        for step, runs in read_rows(owners)
        for run in runs
        if step < box.x1 and box.x0 < step + 1 and run.low < box.y1 and box.y0 < run.high
    }
    assert covered == set() and box.x0 >= 2 and box.x1 <= axes.get_xlim()[1]


def test_the_highest_clear_band() -> None:
    rows = [(0, [Run(0, 80, 1, 1)]), (1, [Run(0, 10, 1, 1), Run(30, 64, 2, 1)])]
    rows.append((2, [Run(5, 12, 1, 1), Run(30, 64, 2, 1)]))
    assert clear_band(rows, 1.5, 3, 15, 80) == (64, 80)
    assert clear_band(rows, 1.5, 3, 17, 80) == (12, 30)
    assert clear_band(rows, 1.5, 3, 19, 80) is None
    assert clear_band(rows, 0.5, 3, 1, 80) is None, "step 0 lasts until 1"
    assert clear_band(rows, 3, 9, 80, 80) == (0, 80)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["a$b$.csv", r"$\foo$", "表.csv", "_x", "🙂"])
def test_any_name_of_a_trace_is_drawn_as_text(tmp_path: Path, name: str) -> None:
    compare = compare_example(("paged:4",))
    compare["trace"]["name"] = name
    paths = draw(compare, tmp_path)
    assert f"trace {name}" in words(paths[0])


def test_rectangles_cover_each_slot_once() -> None:
    rows = [
        (0, [Run(0, 4, 7, 2), Run(4, 8, 9, 4)]),
        (1, [Run(0, 4, 7, 3), Run(4, 8, 9, 4)]),
        (5, [Run(4, 8, 9, 4)]),
    ]
    assert set(merge(cells(rows))) == {
        Block(0, 1, 0, 2, 7),
        Block(0, 1, 2, 4, 7, stored=False),
        Block(1, 2, 0, 3, 7),
        Block(1, 2, 3, 4, 7, stored=False),
        Block(0, 2, 4, 8, 9),
        Block(5, 6, 4, 8, 9),
    }
    assert set(lives(rows)) == {Block(0, 2, 0, 4, 7), Block(0, 2, 4, 8, 9), Block(5, 6, 4, 8, 9)}


def test_pages_side_by_side_become_one_rectangle() -> None:
    rows = [(step, [Run(0, 4, 1, 4), Run(4, 8, 1, 4), Run(12, 16, 1, 4)]) for step in (0, 1)]
    assert merge(cells(rows)) == [Block(0, 2, 0, 8, 1), Block(0, 2, 12, 16, 1)]


def test_borders_run_between_requests_only() -> None:
    rows = [
        (0, [Run(0, 4, 1, 4), Run(4, 8, 2, 4), Run(8, 9, 2, 1)]),
        (1, [Run(0, 4, 1, 4), Run(4, 8, 2, 4)]),
        (2, [Run(0, 6, 3, 4)]),
        (9, [Run(0, 6, 4, 4)]),
    ]
    assert sorted(borders(rows)) == [[(0, 4), (2, 4)], [(2, 0), (2, 4)], [(2, 4), (2, 6)]]


def luminance(color: str) -> float:
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_backends_keep_their_look_and_differ_in_grey() -> None:
    defaults = [
        style.backend_style(s) for s in ("contiguous:max", "contiguous:exact", "paged:16", "vmm")
    ]
    assert len({look.color for look in defaults}) == 4
    families = [style.backend_style(s) for s in ("contiguous:max", "paged:16", "vmm", "other")]
    assert len({look.line for look in families}) == len({look.marker for look in families}) == 4
    pages = [luminance(style.backend_style(f"paged:{2**i}").color) for i in range(9)]
    assert pages == sorted(pages, reverse=True) and len(set(pages)) == 9
    assert style.backend_style("vmm:64KiB") != style.backend_style("vmm:2MiB")
    assert style.backend_style("contiguous:max:buddy") != style.backend_style("contiguous:max")
    for look in ("paged", "paged:x", "contiguous", "contiguous:what:ever", ""):
        style.backend_style(look)
    steps = [
        luminance(style.request_color(i)) - luminance(style.request_color(i + 1)) for i in range(9)
    ]
    assert min(map(abs, steps)) > 0.08, "neighbours look alike in grey"


def test_calls_side_by_side_differ_in_grey() -> None:
    """The parts of a step in serve.svg, the calls of each lane in timeline.svg."""
    lanes = [list(serve.COLORS.values())]
    for lane in set(timeline.LANES.values()):
        calls = [call for call, where in timeline.LANES.items() if where == lane]
        lanes.append([timeline.COLORS[call] for call in calls])
    for colors in lanes:
        greys = sorted(map(luminance, colors))
        assert min(b - a for a, b in pairwise(greys)) > 0.13, (colors, greys)


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    plot_command.register(made)
    made.callback()(lambda: None)
    return made


def test_plot_command_redraws(tmp_path: Path, app: typer.Typer) -> None:
    source = tmp_path / "compare.json"
    source.write_text(json.dumps(compare_example(("paged:8",))))
    result = CliRunner().invoke(app, ["plot", str(source)])
    assert result.exit_code == 0, result.output
    assert all((tmp_path / name).exists() and name in result.output for name in NAMES)
    result = CliRunner().invoke(app, ["plot", str(source), "--out", str(tmp_path / "other")])
    assert result.exit_code == 0
    assert sorted(p.name for p in (tmp_path / "other").iterdir()) == sorted(NAMES)


def broken(change: Any) -> str:
    compare = compare_example(("paged:4",))
    change(compare, compare["backends"][0])
    return json.dumps(compare)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not a comparison"),
        ("{}", "not a comparison"),
        (broken(lambda c, b: c.update(schema=2)), "schema 2"),
        (broken(lambda c, b: c.update(backends=[])), "no backend"),
        (broken(lambda c, b: c.update(backends=[3])), "no spec"),
        (broken(lambda c, b: b.pop("peak_waste")), "peak_waste"),
        (broken(lambda c, b: b.update(completed=-1)), "completed"),
        (broken(lambda c, b: b.update(series=None)), "series"),
        (broken(lambda c, b: b["series"].update(live=["x"])), "series"),
        (broken(lambda c, b: b["series"]["live"].pop()), "length"),
        (broken(lambda c, b: b["owners"].update(slots=0)), "slots"),
        (broken(lambda c, b: b["owners"]["rows"].pop()), "each step"),
        (broken(lambda c, b: b["owners"]["rows"].__setitem__(0, [[0, 99, 1]])), "within"),
        (broken(lambda c, b: b["owners"]["rows"].__setitem__(0, 5)), "rows"),
        (broken(lambda c, b: b["owners"].update(refusals=[[1]])), "refusals"),
        (broken(lambda c, b: b["owners"].update(numbers=[])), "numbers"),
        (broken(lambda c, b: b["owners"]["numbers"].pop("waiting")), "waiting"),
        (broken(lambda c, b: b["owners"]["numbers"]["free"].pop()), "each step"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "compare.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=reason) as raised:
        read_compare(path)
    assert "\n" not in str(raised.value) and str(path) in str(raised.value)


def test_missing_or_binary_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_compare(tmp_path / "none.json")
    with pytest.raises(BadInput, match="directory"):
        read_compare(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(BadInput, match="not JSON"):
        read_compare(tmp_path / "binary")


@pytest.mark.parametrize("name", ["$\\foo$", "$x_{$", "🦙", "a\x1b[31m", "a\udcff", "a\nb", "a$b$"])
def test_a_trace_may_be_called_anything(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Names of files are text: no formulas, and no signs that XML cannot hold."""
    compare = compare_example(("paged:4",))
    compare["trace"]["name"] = compare["backends"][0]["spec"] = name
    draw(compare, tmp_path)
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)
    assert not recwarn.list
