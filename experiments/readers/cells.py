"""Single values and whole columns of a trace file: numbers, times, dates and prefixes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from ..trace import MAX_SECONDS, MAX_TOKENS, MISSING, TICKS, Ints, Key, Runs

_STAMP = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d+))?\s*(?:Z|([+-])(\d\d):?(\d\d))?\s*",
    re.ASCII,
)


class BadCell(ValueError):
    """One value is wrong; the reader that knows the line turns it into BadInput."""


def count(value: object, what: str, low: int, high: int = MAX_TOKENS) -> int:
    """Check one number of a JSON line: an integer, or a float without a fraction."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCell(f"{what} must be a whole number, not {shown(value)}")
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            raise BadCell(f"{what} must be a whole number, not {value}")
        value = int(value)
    if value < low:
        raise BadCell(f"{what} must be at least {low}, not {shown(value)}")
    if value > high:
        raise BadCell(f"{what} is larger than {high:,}")
    return value


def ticks(value: object, what: str, *, per_second: int = 1) -> int:
    """Turn one time of a JSON line into ticks of 100 ns."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadCell(f"{what} must be a number, not {shown(value)}")
    if not 0 <= value <= MAX_SECONDS * per_second:  # false for NaN
        raise BadCell(f"{what} must lie between 0 and {MAX_SECONDS * per_second}")
    scale = TICKS // per_second
    return value * scale if isinstance(value, int) else round(value * scale)


def key(value: object) -> Key:
    """Check one key of a prefix. Digits are the number they spell, in every format."""
    if isinstance(value, str):
        plain = re.fullmatch(r"0|-?[1-9][0-9]{0,38}", value)
        return int(value) if plain else value
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise BadCell(f"a prefix key is text or a whole number, not {shown(value)}")


def field(row: dict[str, Any], name: str) -> object:
    """A value of a JSON line that has to be there."""
    try:
        return row[name]
    except KeyError:
        raise BadCell(f"{name} is missing") from None


def block_runs(ids: object, prompt: int, block: int) -> Runs:
    """Hash ids, one per ``block`` tokens, as runs; the last may be shorter.

    Ids beyond the prompt say nothing about it and are left out.
    """
    if not isinstance(ids, list):
        raise BadCell(f"hash_ids must be a list, not {shown(ids)}")
    runs = [(key(name), block) for name in ids[: -(-prompt // block)]]
    if runs and len(runs) * block > prompt:
        runs[-1] = (runs[-1][0], prompt % block)
    return tuple(runs)


def shown(value: object) -> str:
    """A value as an error repeats it: short."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"


def floats(cells: tuple[str, ...], what: str) -> npt.NDArray[np.float64]:
    """Read finite numbers, at most as Python writes them: no ``1_000``, no other alphabets."""
    joined = "".join(cells)
    if "_" in joined or not joined.isascii():  # float() would take both
        raise BadCell(f"{what} is not a number: {_first(cells)}")
    try:
        values = np.array(list(map(float, cells)), np.float64)
    except ValueError:
        raise BadCell(f"{what} is not a number: {_first(cells)}") from None
    if not np.isfinite(values).all():
        raise BadCell(f"{what} is not a finite number: {_first(cells)}")
    return values


def whole(cells: tuple[str, ...], what: str, low: int, high: int = MAX_TOKENS) -> Ints:
    """Read whole numbers; ``7564.0`` is one."""
    values = floats(cells, what)
    if (values != np.rint(values)).any():
        raise BadCell(f"{what} must be a whole number, not {_first(cells)}")
    if (values < low).any():
        raise BadCell(f"{what} must be at least {low}, not {_first(cells)}")
    if (values > high).any():
        raise BadCell(f"{what} is larger than {high:,}")
    return values.astype(np.int64)


def whole_or_missing(cells: tuple[str, ...]) -> Ints:
    """Read ``max_new_tokens``, where an empty cell means that nobody said."""
    missing = np.array([not cell or cell.isspace() for cell in cells])
    filled = tuple("0" if m else c for m, c in zip(missing.tolist(), cells, strict=True))
    return np.where(missing, MISSING, whole(filled, "max_new_tokens", 0))


def seconds(cells: tuple[str, ...], what: str) -> Ints:
    """Read seconds into ticks of 100 ns."""
    values = floats(cells, what)
    if ((values < 0) | (values > MAX_SECONDS)).any():
        raise BadCell(f"{what} must lie between 0 and {MAX_SECONDS} seconds, not {_first(cells)}")
    return np.rint(values * TICKS).astype(np.int64)


def stamps(cells: tuple[str, ...], what: str) -> Ints:
    """Dates with an optional fraction and UTC offset (none: UTC) to ticks since 1970."""
    seconds, rest = [], []
    for cell in cells:
        match = _STAMP.fullmatch(cell)
        if match is None:
            raise BadCell(f"{what} is not a date like 2023-11-16 18:15:46.68: {_first(cells)}")
        day, time, fraction, sign, hours, minutes = match.groups()
        seconds.append(f"{day}T{time}")
        tick = int(fraction[:7].ljust(7, "0")) if fraction else 0
        if sign:
            offset = (int(hours) * 60 + int(minutes)) * 60 * TICKS
            tick += offset if sign == "-" else -offset
        rest.append(tick)
    try:
        whole = np.array(seconds, "datetime64[s]").astype(np.int64)
    except ValueError:
        raise BadCell(f"{what} is no date of the calendar: {_first(cells)}") from None
    return whole * TICKS + np.array(rest, np.int64)


def runs(keys: str, sizes: str, prompt: int) -> Runs:
    """``"a;b"`` and ``"512;100"`` to ``(("a", 512), ("b", 100))``."""
    if not keys.strip() and not sizes.strip():
        return ()
    names = [key(name.strip()) for name in keys.split(";")]
    if "" in names:
        raise BadCell("prefix has an empty key")
    tokens = whole(tuple(sizes.split(";")), "prefix_tokens", 1).tolist()
    if len(names) != len(tokens):
        raise BadCell(f"prefix has {len(names)} keys, prefix_tokens {len(tokens)} sizes")
    if sum(tokens) > prompt:
        raise BadCell(f"prefix_tokens add up to {sum(tokens):,}, the prompt has {prompt:,}")
    return tuple(zip(names, tokens, strict=True))


def _first(cells: tuple[str, ...]) -> str:
    return shown(cells[0])
