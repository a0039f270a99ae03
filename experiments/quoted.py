"""Numbers in sentences, each with the row of the result that it comes from in a comment before it.

::

    reads in <!--= block-size backend=paged:16 tpot_ms -->21.4<!--/--> ms

A comment names the file in docs/results/cpu, what selects one row, and a field; a second row
after ``/`` divides, a format comes last: ``%``, ``size``, or one of Python such as ``.2f``. The
word ``where`` alone stands for machine, commit and date.
``python -m kvalloc.experiments.results_docs`` writes the numbers anew.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .environment import in_short
from .errors import BadInput
from .row_tables import percent, plain, size

QUOTE = re.compile(r"<!--= (.*?) -->(.*?)<!--/-->", re.DOTALL)
_FORMATS: dict[str, Callable[[Any], str]] = {"%": percent, "size": size}


def requote(text: str, results: Path) -> str:
    """The text with every quoted number written anew from the files in ``results``.

    Raises
    ------
    BadInput
        A quotation that names no file, not exactly one row, or no field.
    """
    return QUOTE.sub(
        lambda match: f"<!--= {match[1]} -->{_quoted(match[1], results)}<!--/-->", text
    )


def _quoted(source: str, results: Path) -> str:
    """The number, formatted, that the words of a comment stand for."""
    stem, *words = shlex.split(source)
    write: Callable[[Any], str] = plain
    if words and (words[-1] in _FORMATS or re.fullmatch(r",?\.\d[fe]", words[-1])):
        last = words.pop()
        write = _FORMATS.get(last) or (lambda value: format(value, last))
    try:
        document = json.loads((results / f"{stem}.json").read_text(encoding="utf-8"))
        if words == ["where"]:
            return in_short(document["environment"])
        rows = document["rows"]
        if "/" not in words:
            return write(_select(rows, words))
        at = words.index("/")
        return write(_select(rows, words[:at]) / _select(rows, words[at + 1 :]))
    except (OSError, LookupError, ValueError) as error:
        raise BadInput(f"the quotation {source!r} cannot be written: {error}") from error


def _select(rows: list[dict[str, Any]], words: list[str]) -> Any:
    """The field, named last, of the one row that the words before it select.

    >>> _select([{"backend": "paged:16", "us": 2}, {"backend": "vmm", "us": 3}], ["us=3", "us"])
    3
    """
    *wanted, field = words
    pairs = [word.split("=", 1) for word in wanted]
    found = [row for row in rows if all(str(row[key]) == value for key, value in pairs)]
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows are such, name one")
    return found[0][field]
