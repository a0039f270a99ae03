"""The command line in this process: exit code and what it printed."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from kvalloc.experiments.__main__ import main


class Finished(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def kvalloc(*arguments: str | Path, folder: Path) -> Finished:
    """Run ``kvalloc ARGUMENTS`` in a folder; a traceback is raised as it is."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    before = Path.cwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "argv", ["kvalloc", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        os.chdir(before)
    assert isinstance(code, int), code
    return Finished(code, out.getvalue(), err.getvalue())
