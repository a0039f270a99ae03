"""A folder of results as the report needs it: checked documents, and the pictures beside them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..compare_read import check_compare, read_json
from ..errors import BadInput

PICTURES = (".svg", ".png")
NOT_RESULTS = (".trace.json",)  # for Perfetto, and large


@dataclass(frozen=True)
class Document:
    """One JSON file that a command wrote; with ``backends`` a comparison, else with ``rows``."""

    path: Path
    content: dict[str, Any]

    @property
    def is_comparison(self) -> bool:
        """Whether ``kvalloc compare`` wrote it."""
        return "backends" in self.content

    @property
    def name(self) -> str:
        """What it is about: the trace of a comparison, or the experiment."""
        if self.is_comparison:
            return str(self.part("trace").get("name", self.path.stem))
        return str(self.content.get("experiment", self.path.stem))

    def part(self, key: str) -> dict[str, Any]:
        """An object of the document, empty where there is none."""
        found = self.content.get(key)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Results:
    """What lies in a folder.

    Attributes
    ----------
    skipped : list
        Names of JSON files without a table: other tools' files, or those without a schema.
    pictures : list
        One file for each name: the SVG, or the PNG where there is no SVG.
    """

    folder: Path
    documents: list[Document]
    skipped: list[str]
    pictures: list[Path]


def read_results(folder: Path) -> Results:
    """Read every result in a folder, comparisons first, then by name.

    Raises
    ------
    BadInput
        No such folder, nothing in it that can be told, or a file that is broken.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise BadInput(f"{folder} {what}: name the folder that --out of another command made")
    files = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(NOT_RESULTS)]
    read = {path: _read(path) for path in files if path.is_file()}
    documents = [Document(path, content) for path, content in read.items() if content is not None]
    if not documents:
        raise BadInput(
            f"{folder} holds no result: run kvalloc compare --out {folder}, or kvalloc run, first"
        )
    documents.sort(key=lambda document: not document.is_comparison)
    skipped = [path.name for path, content in read.items() if content is None]
    return Results(folder, documents, skipped, _pictures(folder))


def _read(path: Path) -> dict[str, Any] | None:
    """The document, or None if it is whole but has no table."""
    try:
        content = read_json(path)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON: run its command again, or move it away") from error
    if not isinstance(content, dict) or "schema" not in content:
        return None
    if content["schema"] != 1:
        raise BadInput(
            f"{path} has schema {content['schema']!r}, this version reads 1: run its command "
            "again, or move it away"
        )
    if "backends" in content:
        return check_compare(content, path)
    if "rows" not in content:
        return None
    rows = content["rows"]
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise BadInput(f"{path} has no rows: run its command again, or move it away")
    return content


def _pictures(folder: Path) -> list[Path]:
    found: dict[str, Path] = {}
    for kind in PICTURES:
        for path in sorted(folder.glob(f"*{kind}")):
            if path.is_file():
                found.setdefault(path.stem, path)
    return sorted(found.values())
