"""Results as one HTML page that needs nothing else: tables, figures and maps in one file."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .. import style
from ..compare_figures import draw
from ..compare_tables import what_to_look_at
from ..environment import in_short
from ..errors import blaming
from ..output import counted, format_bytes
from ..registry import NAMES, find
from ..results_docs import busy
from ..row_tables import Row
from .read import Document, Results
from .tables import Table, tables

TEMPLATES = Path(__file__).resolve().parent / "templates"
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
COMPARISON_FIGURES = ("memory-over-time", "address-space")


@dataclass
class Section:
    """What the template shows of one result; all text is escaped there."""

    key: str
    title: str
    file: str
    simulated: bool
    sentences: list[str]
    notices: list[str]
    command: str
    where: str
    busy: str
    facts: list[tuple[str, str]]
    settings: list[tuple[str, str]]
    tables: list[Table]
    figures: list[tuple[str, str]] = field(default_factory=list)
    map: dict[str, Any] | None = None


def page(results: Results) -> str:
    """The whole page; the same results give the same text.

    Raises
    ------
    BadInput
        A document that is not what its command writes, though it is JSON.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    left = {path.stem: path for path in results.pictures}
    sections = [_section(number, one, left) for number, one in enumerate(results.documents, 1)]
    script = "".join(
        (TEMPLATES / name).read_text("utf-8") for name in ("tables.js", "map.js", "slider.js")
    )
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        title=sections[0].title if len(sections) == 1 else f"{len(sections)} results",
        folder=results.folder.resolve().name,
        sections=sections,
        skipped=results.skipped,
        others=[(stem, _data_url(path)) for stem, path in left.items()],
        css=Markup((TEMPLATES / "report.css").read_text("utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _section(number: int, document: Document, left: dict[str, Path]) -> Section:
    """A result as the page shows it; takes its figures from those ``left`` in the folder."""
    with blaming(
        f"{document.path} does not hold what {document.name} writes: run its command again, or "
        "move it away"
    ):
        return _told(number, document, left)


def _told(number: int, document: Document, left: dict[str, Path]) -> Section:
    content, environment = document.content, document.part("environment")
    return Section(
        key=f"r{number}",
        title=_title(document),
        file=document.path.name,
        simulated=bool(content.get("simulated")),
        sentences=_sentences(document),
        notices=_notices(document),
        command=str(environment.get("command") or "unknown"),
        where=in_short(environment),
        busy="" if document.is_comparison else busy({"environment": environment, **content}),
        facts=_facts(environment | {"load_average": content.get("load_average")}),
        settings=_facts(document.part("settings") | document.part("trace")),
        tables=tables(document),
        figures=_figures(document, left),
        map=_map(document),
    )


def _title(document: Document) -> str:
    if not document.is_comparison:
        stem = document.path.stem
        usual = stem in (document.name, f"{document.name}-simulated")
        return (document.name if usual else f"{document.name}: {stem}").replace("_", " ")
    requests = document.part("trace").get("requests")
    count = f", {counted(requests, 'request')}" if isinstance(requests, int) else ""
    return f"{document.name}{count}, on {len(document.content['backends'])} backends"


def _sentences(document: Document) -> list[str]:
    if not document.is_comparison:
        told = [document.content.get(key) for key in ("question", "refuted_if")]
        return [str(sentence) for sentence in told if sentence]
    try:
        return [what_to_look_at(document.content)]
    except (KeyError, TypeError):  # of a file that was written by hand
        return []


def _notices(document: Document) -> list[str]:
    content = document.content
    told = document.part("trace").get("notices") or content.get("notices") or []
    if document.part("settings").get("quick"):
        told = ["the --quick form, small, to see that it works", *told]
    errors = [
        f"{row.get('backend')}, {row.get('memory')}: {row['error']}"
        for row in content.get("rows", [])
        if row.get("error")
    ]
    return [*map(str, told), *errors]


def _facts(found: Row) -> list[tuple[str, str]]:
    """Keys and values for reading: versions one by one, bytes with a unit, None left out."""
    facts = []
    for key, value in found.items():
        if isinstance(value, dict):
            facts += _facts(value)
        elif key.endswith("_bytes") and isinstance(value, int | float):
            facts.append((key.removesuffix("_bytes"), f"{format_bytes(value)} ({value:,} bytes)"))
        elif value not in (None, []) and key != "notices":
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            facts.append((key.replace("_", " "), text))
    return facts


def _figures(document: Document, left: dict[str, Path]) -> list[tuple[str, str]]:
    """Name and data URL of each figure: from the folder, or drawn anew."""
    stem = document.path.stem.replace("_", "-")
    names: tuple[str, ...] = (stem,)
    if document.is_comparison:
        owned = any(backend.get("owners") for backend in document.content["backends"])
        names = COMPARISON_FIGURES[: 1 + owned]
    mine = stem == "compare" or not document.is_comparison  # others would be of another run
    found = {name: _data_url(left.pop(name)) for name in names if mine and name in left}
    if len(found) < len(names):
        with TemporaryDirectory() as folder:
            drawn = [path for path in _drawn(document, Path(folder)) if path.suffix == ".svg"]
            found = {path.stem: _data_url(path) for path in drawn} | found
    return list(found.items())


def _drawn(document: Document, folder: Path) -> list[Path]:
    if document.is_comparison:
        return draw(document.content, folder)
    rows = document.content["rows"]
    if document.name in NAMES:
        return find(document.name).module.plot(rows, folder)
    if document.name == "bench_attention":
        from ..bench.attention_figure import plot

        return plot(rows, folder)
    if document.name == "bench_cache":
        from ..bench.cache import plot

        return plot(rows, folder)
    return []


def _data_url(path: Path) -> str:
    """As an image, and not as markup: whatever a picture holds cannot run."""
    data = base64.b64encode(path.read_bytes()).decode()
    return f"data:{KINDS[path.suffix]};base64,{data}"


def _map(document: Document) -> dict[str, Any] | None:
    """What the address-space map reads, or None where nobody recorded who owned what."""
    backends = document.content.get("backends", [])
    if not any(backend.get("owners") for backend in backends):
        return None
    return {
        "requests": [style.request_color(number) for number in range(style.NUM_REQUEST_COLORS)],
        "backends": [
            {
                "spec": backend["spec"],
                "color": style.backend_style(backend["spec"]).color,
                "owners": backend.get("owners"),
            }
            for backend in backends
        ],
    }
