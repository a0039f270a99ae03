"""The door of the command line: a user's mistake ends in one sentence, never in a traceback."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def _interrupted() -> NoReturn:
    print("kvalloc: interrupted", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)


def _is_interrupt(error: BaseException | None) -> bool:
    """Ctrl-C, also within the loading of a library in C, which makes an ImportError of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


try:  # Ctrl-C may come while we are loaded, too
    from ..contract import NeverFits, OutOfMemory
    from ..vmm.driver import DriverError
    from .app import app
    from .errors import BadInput
except (KeyboardInterrupt, ImportError) as error:
    if _is_interrupt(error):
        _interrupted()
    raise


def main() -> None:
    """Run ``kvalloc``; exits with 0, with 2 on bad input, or with 130 when interrupted.

    Anything else that is raised is our own fault, and keeps its traceback.
    """
    # Idle OpenMP threads sleep instead of spinning, so that a busy machine is not busier for us.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        _require_words(sys.argv[1:])
        app(prog_name="kvalloc")
    except (BadInput, NeverFits, OutOfMemory, DriverError, OSError) as error:
        print(f"kvalloc: {_one_sentence(error)}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except (KeyboardInterrupt, ImportError) as error:
        if _is_interrupt(error):
            _interrupted()
        raise
    except SystemExit as stop:
        if stop.code == EXIT_INTERRUPTED:  # typer turns Ctrl-C into this, without a word
            _interrupted()
        raise


def _require_words(arguments: list[str]) -> None:
    """An empty value would pass for the current folder here, and for no value there."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if not argument.strip() or (argument.startswith("-") and argument.endswith("=")):
            option = argument.strip("= ") or before
            what = option if option.startswith("-") else "an argument"
            raise BadInput(f"{what} is empty: give it a value or leave it out")


def _one_sentence(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
        if error.filename is not None:
            text = f"{error.filename}: {text}"
    elif isinstance(error, OutOfMemory):
        text = f"out of memory: {text}"
    return " ".join(text.split()) or type(error).__name__


if __name__ == "__main__":
    main()
