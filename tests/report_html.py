"""What a report shows, read back from its HTML as a browser would read it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any


@dataclass
class ShownTable:
    """Headers, and per row the texts and the exact values of the cells."""

    headers: list[str] = field(default_factory=list)
    texts: list[list[str]] = field(default_factory=list)
    values: list[list[Any]] = field(default_factory=list)

    def column(self, header: str) -> list[Any]:
        """The exact values under a header."""
        return [row[self.headers.index(header)] for row in self.values]


class Shown(HTMLParser):
    """Tags with their attributes, tables, embedded data and text by the file that it is from."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[ShownTable]] = {}
        self.maps: dict[str, Any] = {}
        self.text: dict[str, str] = {"": ""}
        self._file, self._into, self._script = "", "", ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "section":
            self._file = found.get("data-file") or ""
            self.tables[self._file], self.text[self._file] = [], ""
        elif tag == "table":
            self.tables[self._file].append(ShownTable())
        elif tag in ("th", "td"):
            self._into = tag
            table = self.tables[self._file][-1]
            if tag == "th":
                table.headers.append("")
            else:
                table.values[-1].append(json.loads(found["data-value"] or ""))
                table.texts[-1].append("")
        elif tag == "tr" and self.tables[self._file][-1].headers:
            self.tables[self._file][-1].values.append([])
            self.tables[self._file][-1].texts.append([])
        elif tag == "script":
            self._into, self._script = f"script {found.get('type')}", ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "script" and self._into == "script application/json":
            self.maps[self._file] = json.loads(self._script)
        if tag in ("th", "td", "script"):
            self._into = ""
        if tag == "section":
            self._file = ""

    def handle_data(self, data: str) -> None:
        if self._into.startswith("script"):
            self._script += data
        elif self._into == "th":
            self.tables[self._file][-1].headers[-1] += data
        elif self._into == "td":
            self.tables[self._file][-1].texts[-1][-1] += data
        else:
            self.text[self._file] += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        """Attributes of all tags of a name."""
        return [attributes for name, attributes in self.tags if name == tag]
