"""One door to every trace: a built-in name, or a file whose format is recognised by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from os import PathLike
from pathlib import Path

from ..built_in_traces import built_in
from ..errors import BadInput
from ..generators import check_rate, poisson_arrivals
from ..trace import Trace
from .csv import read_csv, recognise
from .jsonl import read_jsonl, unknown_format
from .source import Source


def read_trace(path: str | Path, *, rate: float | None = None, seed: int = 0) -> Trace:
    """Read a trace.

    Parameters
    ----------
    path
        A built-in name (``kvalloc trace list``), or a file: our own CSV or JSON lines, Azure
        CSV, Vidur CSV, BurstGPT CSV, a length set, Mooncake, Qwen-Bailian or Weka JSON
        lines; plain or gzip. A file that is called like a built-in needs a folder: ``./chat``.
    rate
        Requests per second of Poisson arrivals, for length sets, which have no times of
        their own (without it all arrive at 0).
    seed
        Of whatever is random: built-in traces and Poisson arrivals.

    Returns
    -------
    Trace
        Times from the first arrival. Foreign formats are sorted stably (a notice says so),
        ours must be sorted.

    Raises
    ------
    BadInput
        One sentence that names the file, the line and the reason.
    """
    if not isinstance(path, str | PathLike):
        raise TypeError(f"a trace is named by a string or a path, not by {path!r}")
    if rate is not None:
        check_rate(rate)
    made = built_in(path, seed) if isinstance(path, str) else None
    if made is not None:
        if rate is not None:
            raise BadInput(f"{path} has arrival times of its own: --rate is for length sets")
        return made
    source = Source(path)
    lines = source.lines()
    header = next(lines, "")
    if not header.strip():
        blank = not any(line.strip() for line in lines)
        raise source.error("the file is empty") if blank else unknown_format(source, 1)
    found = None if header.lstrip()[:1] in ("{", "[") else recognise(source, header)
    if rate is not None and (found is None or found[0].clock != "none"):
        raise source.error("it has arrival times of its own, --rate is for length sets")
    if found is not None:
        trace = read_csv(source, lines, found)
    elif header.lstrip().startswith("{"):
        trace = read_jsonl(source, chain([header], lines))
    else:
        raise unknown_format(source)
    if rate is None:
        return trace
    notice = f"Poisson arrivals, {rate:g} a second, seed {seed}"
    arrival = poisson_arrivals(len(trace), rate, seed)
    return replace(trace, arrival=arrival, notices=(*trace.notices, notice))
