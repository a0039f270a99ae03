"""JSON-lines traces: our own, Mooncake, Qwen-Bailian and Weka, told apart by their keys."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..errors import BadInput
from ..trace import MAX_STEP, MISSING, Runs, Trace
from .cells import BadCell, block_runs, count, field, key, shown, ticks
from .columns import Columns
from .source import MAX_LINE, Source
from .weka import WekaReader

MOONCAKE_BLOCK, BAILIAN_BLOCK = 512, 16


def read_jsonl(source: Source, lines: Iterator[str]) -> Trace:
    """Read all lines; the first object decides the format. See `readers.read_trace`."""
    add: Callable[[int, dict[str, Any]], None] | None = None
    reader: _Lines | WekaReader | None = None
    for number, line in enumerate(_objects(lines), 1):
        if not line or line.isspace():
            continue
        row = _object(source, number, line)
        if reader is None or add is None:
            reader = _reader_of(source, number, row)
            add = reader.add
        try:
            add(number, row)
        except BadCell as problem:
            raise source.error(str(problem), number) from None
    if reader is None:
        raise source.error("there is no request in it")
    return reader.trace()


def _objects(lines: Iterator[str]) -> Iterable[str]:
    """Lines; a file that is one JSON object spread over lines becomes one line."""
    first = next(lines, "")
    if first.strip() != "{":
        yield first
        yield from lines
        return
    whole, size = [first], 0
    for line in lines:
        size += len(line)
        if size > MAX_LINE:
            break  # the cut object fails to parse, which names the file
        whole.append(line)
    yield "\n".join(whole)


def _object(source: Source, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        reason = f"not valid JSON ({problem.msg}); the line may be cut off"
        raise source.error(reason, number) from None
    except RecursionError:
        raise source.error("JSON nested too deeply for a trace", number) from None
    except ValueError:
        raise source.error("a number has too many digits", number) from None
    if not isinstance(row, dict):
        raise source.error(f"each line must be a JSON object, not {shown(row)}", number)
    return row


def _reader_of(source: Source, number: int, row: dict[str, Any]) -> _Lines | WekaReader:
    if WekaReader.fits(row):
        return WekaReader(source)
    for family in (_OwnLines, _BailianLines, _MooncakeLines):
        if row.keys() & family.telling:
            return family(source, row)
    raise unknown_format(source, number)


def unknown_format(source: Source, line: int | None = None) -> BadInput:
    """The error for a file of no known family."""
    return source.error(
        "unknown format; known are our own CSV and JSON lines (arrival_s or arrival_step, "
        "prompt_tokens, output_tokens), Azure CSV, Vidur CSV, BurstGPT CSV, length sets, "
        "Mooncake, Qwen-Bailian and Weka JSON lines",
        line,
    )


class _Lines(ABC):
    """One request per line, a fixed set of keys."""

    telling: frozenset[str]
    """Keys by which the family is recognised; one is enough."""

    def __init__(self, source: Source, row: dict[str, Any]) -> None:
        self.columns = Columns(source, "s")

    @abstractmethod
    def add(self, line: int, row: dict[str, Any]) -> None:
        """Read one line."""

    def trace(self) -> Trace:
        """All requests, sorted or refused."""
        return self.columns.trace()


class _OwnLines(_Lines):
    telling = frozenset(
        ("arrival_s", "arrival_step", "prompt_tokens", "output_tokens", "max_new_tokens")
    )
    known = telling | {"prefix", "prefix_tokens"}

    def __init__(self, source: Source, row: dict[str, Any]) -> None:
        self.time = "arrival_step" if "arrival_step" in row else "arrival_s"
        unit = "step" if self.time == "arrival_step" else "s"
        self.columns = Columns(source, unit, ordered=True)  # type: ignore[arg-type]
        if "prefix" in row or "prefix_tokens" in row:
            self.columns.prefix = []
        if unknown := sorted(row.keys() - self.known):
            self.columns.notices.append(f"key {', '.join(unknown)[:80]} ignored")

    def add(self, line: int, row: dict[str, Any]) -> None:
        """Take one request in our own keys."""
        if "arrival_s" in row and "arrival_step" in row:
            raise BadCell("give either arrival_s or arrival_step, not both")
        stamp = field(row, self.time)
        arrival = (
            count(stamp, self.time, 0, MAX_STEP)
            if self.columns.unit == "step"
            else ticks(stamp, self.time)
        )
        prompt = count(field(row, "prompt_tokens"), "prompt_tokens", 1)
        output = count(field(row, "output_tokens"), "output_tokens", 0)
        cap = row.get("max_new_tokens")
        max_new = MISSING if cap is None else count(cap, "max_new_tokens", 0)
        runs = self._runs(row, prompt)
        if self.columns.prefix is not None:
            self.columns.prefix.append(runs)
        elif runs:
            raise BadCell("prefix appears here but not in the first line: give it in every line")
        self.columns.add(line, arrival, prompt, output, max_new)

    def _runs(self, row: dict[str, Any], prompt: int) -> Runs:
        keys, sizes = row.get("prefix") or [], row.get("prefix_tokens") or []
        if not isinstance(keys, list) or not isinstance(sizes, list) or len(keys) != len(sizes):
            raise BadCell("prefix and prefix_tokens must be lists of equal length")
        runs = tuple(
            (key(k), count(size, "prefix_tokens", 1)) for k, size in zip(keys, sizes, strict=True)
        )
        if sum(size for _, size in runs) > prompt:
            raise BadCell(f"prefix_tokens add up to more than the prompt of {prompt:,}")
        return runs


class _MooncakeLines(_Lines):
    """``timestamp`` in ms, one id per 512 prompt tokens, the partial tail has its own."""

    telling = frozenset(("timestamp", "input_length", "output_length", "hash_ids"))
    block, per_second = MOONCAKE_BLOCK, 1000

    def __init__(self, source: Source, row: dict[str, Any]) -> None:
        super().__init__(source, row)
        self.columns.prefix = []

    def add(self, line: int, row: dict[str, Any]) -> None:
        """Take one request with the hashes of its prompt."""
        arrival = ticks(field(row, "timestamp"), "timestamp", per_second=self.per_second)
        prompt = count(field(row, "input_length"), "input_length", 1)
        output = count(field(row, "output_length"), "output_length", 0)
        assert self.columns.prefix is not None
        self.columns.prefix.append(block_runs(row.get("hash_ids") or [], prompt, self.block))
        self.columns.add(line, arrival, prompt, output)


class _BailianLines(_MooncakeLines):
    """``timestamp`` in seconds, one id per 16 prompt tokens."""

    telling = frozenset(("chat_id", "parent_chat_id"))
    block, per_second = BAILIAN_BLOCK, 1
