"""A compare.json as the figures and the report read it: whole, or told in one sentence why not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

from .errors import BadInput

_SERIES = ("step", "live", "reserved", "free", "largest_free")
_NUMBERS = ("live", "reserved", "free", "largest_free", "waiting")
_COUNTS = (
    "capacity_tokens",
    "completed",
    "rejected",
    "growth_failures",
    "preemptions",
    "peak_reserved",
    "peak_waste",
)


def read_compare(path: Path) -> dict[str, Any]:
    """Read a compare.json as far as the figures need it.

    Raises
    ------
    BadInput
        Not a file, not JSON, or not what ``kvalloc compare`` writes.
    """
    try:
        loaded = read_json(path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror or error}; name a compare.json") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON; name a file that kvalloc compare wrote") from error
    return check_compare(loaded, path)


def read_json(path: Path) -> Any:
    """What a file of strict JSON holds; ``ValueError`` or ``RecursionError`` if it is none."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def _finite(text: str) -> float:
    """JSON has no NaN and no infinity; a browser would stumble over them, and so do figures."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number of JSON")
    return value


def check_compare(loaded: Any, path: Path) -> dict[str, Any]:
    """What was read from ``path``, if it is what the figures need; raises ``BadInput`` if not."""
    if not isinstance(loaded, dict) or "backends" not in loaded:
        raise BadInput(f"{path} is not a comparison; name a file that kvalloc compare wrote")
    if loaded.get("schema") != 1:
        raise BadInput(
            f"{path} has schema {loaded.get('schema')!r}, this version reads 1; "
            "run kvalloc compare again"
        )
    backends = loaded["backends"]
    if not isinstance(backends, list) or not backends:
        raise BadInput(f"{path} compares no backend; run kvalloc compare again")
    for number, backend in enumerate(backends, start=1):
        if wrong := _fault(backend):
            raise BadInput(f"{path}, backend {number}: {wrong}; run kvalloc compare again")
    return loaded


def _fault(backend: Any) -> str | None:
    """What keeps a backend from being drawn, or None."""
    if not isinstance(backend, dict) or not isinstance(backend.get("spec"), str):
        return "it has no spec"
    for name in _COUNTS:
        if not _is_count(backend.get(name)):
            return f"{name} is not a count"
    series = backend.get("series")
    if not isinstance(series, dict) or any(
        not isinstance(series.get(name), list) or not all(map(_is_count, series[name]))
        for name in _SERIES
    ):
        return f"its series are not lists of counts named {', '.join(_SERIES)}"
    if len({len(series[name]) for name in _SERIES}) != 1:
        return "its series differ in length"
    return _owners_fault(backend.get("owners"))


def _owners_fault(owners: Any) -> str | None:
    if owners is None:
        return None
    slots = owners.get("slots") if isinstance(owners, dict) else None
    if slots is None or not _is_size(slots) or not slots:
        return "its owners have no slots"
    steps, rows, refusals = (owners.get(name, []) for name in ("steps", "rows", "refusals"))
    if not all(isinstance(part, list) for part in (steps, rows, refusals)):
        return "its owners are not lists"
    if len(steps) != len(rows) or not all(map(_is_count, steps)):
        return "its owners need one row for each step"
    runs = [run for row in rows for run in (row if isinstance(row, list) else [None])]
    for run in runs:
        if not (_is_tuple(run, 3, 4) and run[0] < run[1] <= slots):
            return "its owners are not rows of [start, stop, request] within the slots"
    if not all(_is_tuple(refusal, 2, 5) for refusal in refusals):
        return "its refusals are not [step, request, needed, free, largest]"
    return _numbers_fault(owners.get("numbers"), len(steps))


def _numbers_fault(numbers: Any, num_steps: int) -> str | None:
    """Optional: files of the first versions have none."""
    if numbers is None:
        return None
    lists = [numbers.get(name) if isinstance(numbers, dict) else None for name in _NUMBERS]
    if any(
        not isinstance(part, list) or len(part) != num_steps or not all(map(_is_size, part))
        for part in lists
    ):
        return f"its owners need numbers named {', '.join(_NUMBERS)} for each step"
    return None


def _is_tuple(values: Any, *lengths: int) -> TypeGuard[list[float]]:
    return isinstance(values, list) and len(values) in lengths and all(map(_is_size, values))


def _is_size(value: Any) -> bool:
    """Slots may be fractions of a token, where tokens straddle pages."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
