"""Recorded traces for experiments: those that were collected elsewhere, or a generated stand-in."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from .generators import generate
from .readers import read_trace
from .registry import Report
from .trace import Trace

VARIABLE = "KVALLOC_TRACES"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"


def recorded(file: str, stand_in: str, requests: int, report: Report) -> Trace:
    """The first ``requests`` requests of a recorded trace, or of a generated kind without it.

    Parameters
    ----------
    file
        Name within the folder that the variable KVALLOC_TRACES names. An empty value of the
        variable means that there is none.
    stand_in
        Kind of the generated trace; a notice tells that it was taken.
    """
    folder = os.environ.get(VARIABLE)
    path = (DEFAULT_FOLDER if folder is None else Path(folder)) / file
    if folder != "" and path.exists():
        return read_trace(path).head(requests)
    report.notice(
        f"{file} was not found, {requests:,} generated {stand_in} requests stand in: name the "
        f"folder of recorded traces in {VARIABLE}"
    )
    return generate(stand_in, requests=requests)


def at_once(trace: Trace) -> Trace:
    """The same requests, all arriving at the start."""
    return replace(trace, unit="s", arrival=np.zeros(len(trace)))
