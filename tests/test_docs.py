"""What README and docs say is so: commands parse, files exist, examples run, tables are printed."""

from __future__ import annotations

import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.experiments.app import app
from kvalloc.experiments.built_in_traces import article
from kvalloc.experiments.compare_figures import draw
from kvalloc.experiments.scheduler import Scheduler
from kvalloc.experiments.specs import parse_spec
from kvalloc.geometry import SLOTS

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
NAMES += sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
MADE = {
    "compare.json",
    "address-space.svg",
    "memory-over-time.svg",
    "requests.csv",
    "out/",
    "build/site/",
}
"""Files that commands write or a reader brings: they are no part of the repository."""
FILE = re.compile(r"(?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|txt|c|h|svg|png|json|csv)|(?:[\w-]+/)+")


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    """Fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(name), re.M | re.S)


def spans(name: str) -> list[str]:
    """Text in backticks, outside of blocks."""
    prose = re.sub(r"^```.*?^```$", "", text_of(name), flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def commands(name: str) -> list[str]:
    """Every ``kvalloc …`` line of a document, in blocks and in backticks."""
    lines = [line for block in blocks(name, "sh") for line in re.split(r"(?<!\\)\n", block)]
    found = [re.sub(r"\s*\\\n\s*", " ", line) for line in lines] + spans(name)
    return [line for line in found if line.startswith("kvalloc ")]


COMMANDS = [pytest.param(line, id=f"{name}: {line}") for name in NAMES for line in commands(name)]


def parsed(line: str) -> tuple[list[str], dict[str, Any]]:
    """Arguments of a command line, and what the command itself makes of them."""
    arguments = shlex.split(line, comments=True)[1:]
    command: Any = get_command(app)
    rest, name = list(arguments), "kvalloc"
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    if not rest or {"--help", "--version"} & {*rest}:
        return arguments, {}  # the bare name, in prose
    values: dict[str, Any] = command.make_context(name, rest).params
    return arguments, values


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line: str, tmp_path: Path, monkeypatch: Any) -> None:
    """All of them parse; those that only count are run."""
    arguments, values = parsed(line)
    for spec in values.get("backend") or []:
        parse_spec(spec, slots=values["slots"] is not None)
    if "--slots" in arguments and "--account" in arguments:
        monkeypatch.chdir(tmp_path)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert list(tmp_path.rglob("compare.json"))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("kvalloc compile", "no command 'compile'"),
        ("kvalloc compare --slot 3", "No such option"),
        ("kvalloc compare hole more", "unexpected extra argument"),
    ],
)
def test_a_wrong_command_is_noticed(line: str, told: str) -> None:
    with pytest.raises(Exception, match=told):
        parsed(line)


@pytest.mark.parametrize("name", NAMES)
def test_targets_of_make_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.M))
    lines = [*spans(name), *(line for block in blocks(name, "sh") for line in block.splitlines())]
    named = {line.split()[1] for line in lines if line.startswith("make ")}
    assert named <= targets


@pytest.mark.parametrize("name", NAMES)
def test_files_and_links_exist(name: str) -> None:
    folder = (ROOT / name).parent
    missing = [
        span
        for span in spans(name)
        if FILE.fullmatch(span) and span not in MADE and not (ROOT / span).exists()
    ]
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(name)):
        if target.startswith(("http:", "https:")):
            continue
        file, _, heading = target.partition("#")
        whole = folder / file if file else ROOT / name
        if not whole.exists() or (heading and heading not in anchors(whole)):
            missing.append(target)
    assert missing == []


def anchors(file: Path) -> set[str]:
    """Headings of a document as links name them."""
    heads = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", NAMES)
def test_named_tests_exist(name: str) -> None:
    sources = "\n".join(file.read_text() for file in ROOT.glob("tests/test_*.py"))
    named = [span for span in spans(name) if re.fullmatch(r"test_\w+", span)]
    assert [test for test in named if f"def {test}(" not in sources] == []


def test_every_dependency_has_a_reason() -> None:
    """A row in docs/decisions.md, and no row for what is no longer needed."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = {re.split(r"[^\w-]", package)[0] for group in groups for package in group}
    told = [row[0] for row in rows("docs/decisions.md", "| package | reason |")]
    assert sorted(re.sub(r" \(.*?\)", "", ", ".join(told)).split(", ")) == sorted(needed)


def test_the_version_stands_in_one_place() -> None:
    """And the changelog has it; everything else asks for it."""
    from kvalloc import __version__

    assert f"## {__version__}" in text_of("CHANGELOG.md")
    files = [*ROOT.glob("*.*"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*.py")]
    holders = {file for file in files if file.is_file() and __version__ in file.read_text()}
    holders.discard(ROOT / "constraints.txt")  # of other packages
    assert holders == {ROOT / "__init__.py", ROOT / "CHANGELOG.md"}


def test_the_import_example_prints_what_it_says() -> None:
    (example,), (said,) = blocks("README.md", "python"), blocks("README.md", "text")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert printed.getvalue() == said


PRINTED = {"README.md", "docs/tutorial.md", "docs/transformers.md"}
"""Their examples print something, which tests of their own compare."""


@pytest.mark.parametrize("name", sorted({n for n in NAMES if blocks(n, "python")} - PRINTED))
def test_examples_are_true(name: str) -> None:
    """One after the other, as they are read."""
    names: dict[str, Any] = {}
    for example in blocks(name, "python"):
        exec(compile(example, f"{name}: {example[:40]!r}", "exec"), names)


def rows(name: str, header: str) -> Iterator[list[str]]:
    """Cells of the table under a header."""
    lines = text_of(name).splitlines()
    for line in lines[lines.index(header) + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip().strip("`") for cell in line.strip("|").split("|")]


def compared(line: str, folder: Path) -> dict[str, Any]:
    """The JSON of a compare command."""
    done = CliRunner().invoke(app, [*parsed(line)[0], "--out", str(folder)])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return result


def test_the_articles_table_is_what_the_command_counts(tmp_path: Path) -> None:
    header = (
        "| backend | rejected | growth failures | refused, yet free | peak reserved | peak waste |"
    )
    (line,) = [line for line in commands("docs/replay.md") if "compare article" in line]
    keys = ("rejected", "growth_failures", "fragmentation_failures", "peak_reserved", "peak_waste")
    counted = [
        [backend["spec"], *(str(backend[key]) for key in keys)]
        for backend in compared(line, tmp_path)["backends"]
    ]
    assert list(rows("docs/replay.md", header)) == counted


def test_exact_growth_fails_where_the_page_says() -> None:
    """Step, request, its tokens, free, largest run: each could be placed whole elsewhere."""
    trace = article()
    books = ContiguousAllocator(SLOTS, 80, policy="exact")
    scheduler = Scheduler(
        books, trace.prompt, trace.output, trace.max_new, on_full="reject", on_failure="drop"
    )
    failed = []
    for step in range(60):
        lengths = {seq: books.length(seq) for seq in scheduler.active}
        arrivals = [i for i, arrival in enumerate(trace.arrival.tolist()) if arrival == step]
        lengths |= {i: int(trace.prompt[i]) for i in arrivals}
        scheduler.step(range(arrivals[0], arrivals[-1] + 1) if arrivals else range(0))
        for seq, refusal in scheduler.refusals:
            assert refusal.blocked and refusal.largest_free > lengths[seq]
            numbers = (step, seq + 1, lengths[seq], refusal.free, refusal.largest_free)
            failed.append([str(number) for number in numbers])
    header = "| step | request | its tokens | free | largest free run |"
    assert list(rows("docs/replay.md", header)) == failed


def test_fields_of_the_json_are_defined(tmp_path: Path) -> None:
    (line,) = [line for line in commands("README.md") if "compare hole" in line]
    defined = {
        field
        for field, _ in rows("docs/fields.md", "| field | meaning |")
        for field in field.replace("`", "").split(", ")
    }
    assert set(compared(line, tmp_path)["backends"][0]) - defined == {"spec", "series"}


def test_the_figure_is_the_one_that_the_command_draws(tmp_path: Path) -> None:
    (line,) = [line for line in commands("README.md") if "compare hole" in line]
    draw(compared(line, tmp_path), tmp_path)
    words = [
        re.findall(r"<text[^>]*>(.*?)</text>", file.read_text(encoding="utf-8"), re.S)
        for file in (ROOT / "docs/hole.svg", tmp_path / "address-space.svg")
    ]
    assert words[0] == words[1], "draw docs/hole.svg again: make figures"
