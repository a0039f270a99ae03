"""Our own two trace formats, written whole or not at all, read back as they were."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import BadInput
from .output import write_atomic
from .trace import MISSING, Runs, Trace

FORMATS = (".csv", ".jsonl")


def check_target(path: str | Path) -> Path:
    """Tell a wrong name or folder before any work is done for it.

    Raises
    ------
    BadInput
        Not ``.csv`` or ``.jsonl``, a folder, or in a folder that does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise BadInput(f"{path}: a trace is written as .csv or .jsonl, name it so")
    if target.is_dir():
        raise BadInput(f"{path}: this is a folder, name a file")
    if not target.parent.is_dir():
        raise BadInput(f"{path}: the folder {target.parent} does not exist, make it first")
    return target


def write_trace(trace: Trace, path: str | Path) -> Path:
    """Write a trace in our own format, by suffix CSV or JSON lines; returns the path.

    Columns or keys: ``arrival_s`` or ``arrival_step``, ``prompt_tokens``,
    ``output_tokens``, ``max_new_tokens`` where any is known, ``prefix`` and
    ``prefix_tokens`` where the trace has prefixes (in CSV joined by ``;``).

    Raises
    ------
    BadInput
        See `check_target`; or a prefix key that CSV cannot hold, or nothing to write.
    """
    target = check_target(path)
    if not len(trace):
        raise BadInput(f"{path}: there is no request to write")
    if target.suffix.lower() == ".csv":
        return write_atomic(target, _csv(trace, target))
    return write_atomic(target, "".join(json.dumps(row) + "\n" for row in _rows(trace)))


def _rows(trace: Trace) -> Iterator[dict[str, Any]]:
    names = [f"arrival_{trace.unit}", "prompt_tokens", "output_tokens"]
    columns = [trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist()]
    if (trace.max_new != MISSING).any():
        names.append("max_new_tokens")
        columns.append([None if cap == MISSING else cap for cap in trace.max_new.tolist()])
    if trace.prefix is not None:
        names += ["prefix", "prefix_tokens"]
        columns.append([[key for key, _ in runs] for runs in trace.prefix])
        columns.append([[tokens for _, tokens in runs] for runs in trace.prefix])
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _csv(trace: Trace, target: Path) -> str:
    if trace.prefix is not None:
        for number, runs in enumerate(trace.prefix, 2):
            _check_keys(runs, number, target)
    text = io.StringIO(newline="")
    writer: Any = None
    for row in _rows(trace):
        if "prefix" in row:
            row["prefix"] = ";".join(map(str, row["prefix"]))
            row["prefix_tokens"] = ";".join(map(str, row["prefix_tokens"]))
        if writer is None:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(row)
        writer.writerow(row.values())
    return text.getvalue()


def _check_keys(runs: Runs, line: int, target: Path) -> None:
    for key, _ in runs:
        plain = isinstance(key, int) or (key.strip() == key != "" and key.isprintable())
        if not plain or ";" in str(key):
            raise BadInput(
                f"{target}, line {line}: CSV cannot hold the prefix key {key!r}, write .jsonl"
            )
