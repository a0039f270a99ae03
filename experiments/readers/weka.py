"""Weka's agent sessions: requests nested in sessions, ids of 64-token blocks."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from ..trace import Key, Runs, Trace
from .cells import BadCell, block_runs, count, field, ticks
from .columns import Columns
from .source import Source

BLOCK = 64


class WekaReader:
    """One session per line (``{"block_size": 64, "requests": […]}``) or one request per line.

    A request has ``t`` (seconds from the session's start), ``in``, ``out`` and ``hash_ids``,
    one per *full* block: tokens of the partial tail are nobody else's. All sessions start at
    time 0. Ids with scope ``"local"`` mean something within their session only. An entry of
    type ``"subagent"`` holds requests of its own; older recordings count their times from
    the entry's, newer ones from the session's start. A file that has any inner time before
    its entry's is of the older kind.
    """

    def __init__(self, source: Source) -> None:
        self.columns = Columns(source, "s")
        self.prefix: list[Runs] = []
        self.spawned = array("q")  # time of the subagent entry, 0 outside of one
        self.local: dict[tuple[int, Key], int] = {}

    @staticmethod
    def fits(row: dict[str, Any]) -> bool:
        """Whether a line is a session or a request of this family."""
        return "requests" in row or {"in", "out"} <= row.keys()

    def add(self, line: int, row: dict[str, Any]) -> None:
        """Read one line."""
        if "requests" not in row:
            self._request(line, row, BLOCK, None, 0)
            return
        block = count(row.get("block_size", BLOCK), "block_size", 1)
        session = None if row.get("hash_id_scope", "local") == "global" else line
        for entry in _entries(row):
            if entry.get("type") != "subagent":
                self._request(line, entry, block, session, 0)
                continue
            start = ticks(entry.get("t", 0), "t")
            for inner in _entries(entry):
                self._request(line, inner, block, session, start)

    def _request(
        self, line: int, row: dict[str, Any], block: int, session: int | None, spawned: int
    ) -> None:
        arrival = ticks(field(row, "t"), "t")
        prompt = count(field(row, "in"), "in", 1)
        output = count(field(row, "out"), "out", 0)
        runs = block_runs(row.get("hash_ids") or [], prompt // block * block, block)
        if session is not None:
            local = self.local
            runs = tuple(
                (local.setdefault((session, name), len(local)), size) for name, size in runs
            )
        self.prefix.append(runs)
        self.spawned.append(spawned)
        self.columns.add(line, arrival, prompt, output)

    def trace(self) -> Trace:
        """All requests of all sessions, merged by time."""
        arrival = np.array(self.columns.arrival, dtype=np.int64)
        spawned = np.array(self.spawned, dtype=np.int64)
        if (arrival < spawned).any():
            self.columns.arrival = array("q", (arrival + spawned).tobytes())
            self.columns.notices.append("times of subagents counted from their start")
        self.columns.prefix = self.prefix
        return self.columns.trace()


def _entries(row: dict[str, Any]) -> list[dict[str, Any]]:
    entries = row.get("requests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadCell("requests must be a list of JSON objects")
    return entries
