"""What leaves a command: files written whole or not at all, strict JSON, sizes that people read."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import BadInput

_UNITS: dict[str, int] = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

MOST_BYTES = 1 << 60
"""Beyond this no size is meant, and sums of them would not fit into int64."""


def parse_bytes(text: str) -> int:
    """Read a size: ``512``, ``64KiB``, ``2MiB``, ``1.5 GiB``, ``16g``.

    ``KiB MiB GiB TiB`` and the bare letters are powers of 1024, ``kB MB GB TB`` of 1000;
    case does not matter.

    >>> parse_bytes("2MiB"), parse_bytes("16g"), parse_bytes("1 kB")
    (2097152, 17179869184, 1000)

    Raises
    ------
    BadInput
        Not a size, not a whole number of bytes, not positive, or above ``MOST_BYTES``.
    """
    number = r"[0-9]{1,20}(?:\.[0-9]{1,20})?"
    match = re.fullmatch(rf"\s*({number})\s*([a-z]*)\s*", text, re.ASCII | re.IGNORECASE)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise BadInput(f"{text!r} is not a size; write bytes or a unit, as in 2MiB or 16GiB")
    whole, _, fraction = match[1].partition(".")
    scale: int = 10 ** len(fraction)
    num_bytes, rest = divmod(int(whole + fraction) * unit, scale)
    if rest:
        raise BadInput(f"{text!r} is not a whole number of bytes; choose a smaller unit")
    if num_bytes > MOST_BYTES:
        raise BadInput(f"{text!r} is more than any memory holds; write at most 2^60 bytes")
    if num_bytes == 0:
        raise BadInput(f"{text!r} is no memory at all; write a size of at least one byte")
    return num_bytes


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "request"), counted(1200, "request")
    ('1 request', '1,200 requests')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_bytes(num_bytes: float) -> str:
    """Write a size in the largest binary unit that leaves at least 1, to four digits.

    >>> format_bytes(131072), format_bytes(1 << 40), format_bytes(0), format_bytes(507_904)
    ('128 KiB', '1 TiB', '0 B', '496 KiB')
    """
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    digits = max(0, 3 - len(str(int(abs(value)))))
    shown = f"{value:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {unit}"


def path_text(path: str | os.PathLike[str]) -> str:
    """A path as text that any terminal takes: bytes that are no UTF-8 become ``?``."""
    return os.fspath(path).encode(errors="replace").decode()


def check_folder(out: Path) -> None:
    """Look before the work whether ``--out`` can be written; nothing is left there.

    Raises
    ------
    BadInput
        The folder is a file, or the system lets nobody write there.
    """
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out} is a file: name a folder")
    _check_room(f"--out {out}", out)


def check_file(option: str, path: str | os.PathLike[str]) -> None:
    """As ``check_folder``, for a file. A device or a pipe will take what it gets."""
    if Path(path).is_dir():
        raise BadInput(f"{option} {path} is a folder: name a file")
    if Path(path).is_file() or not Path(path).exists():
        _check_room(f"{option} {path}", path)


def _check_room(what: str, path: str | os.PathLike[str]) -> None:
    """Whether a file can be made at ``path``, or where its first missing folder would be."""
    place = Path(os.path.realpath(path))
    try:
        while not _is_there(place):
            place = place.parent
        with tempfile.TemporaryFile(dir=place if place.is_dir() else place.parent):
            pass
    except OSError as error:
        raise BadInput(f"{what} cannot be written ({error.strerror}): name another") from error


def _is_there(place: Path) -> bool:
    """Unlike ``Path.exists`` of some versions it raises for names that can never be."""
    try:
        place.stat()
    except FileNotFoundError:
        return False
    return True


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write a file whole or leave everything as it was; returns its path.

    The text goes to a temporary file beside the target, which is then renamed over it, so
    that neither a failure nor a reader at the wrong moment sees half a file. Links stay, and
    what they point to is written; devices and pipes are written to and never replaced. Missing
    folders are created; ``BadInput`` if the path is a folder.
    """
    if Path(path).is_dir():
        raise BadInput(f"{path} is a folder: name a file")
    # Names of files and words of a JSON may hold halves of characters that UTF-8 cannot write.
    data = content.encode(errors="replace") if isinstance(content, str) else content
    if Path(path).exists() and not Path(path).is_file():
        with open(path, "wb") as file:
            file.write(data)
        return Path(path)
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, _usual_mode(target))
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return Path(path)


def _usual_mode(target: Path) -> int:
    """The mode that plain ``open(target, "w")`` would leave; mkstemp makes private files."""
    try:
        return target.stat().st_mode & 0o777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def to_json(obj: Any) -> str:
    """Strict JSON, indented; NaN and infinities become null, numpy values become plain ones."""
    return json.dumps(_strict(obj), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def emit_json(obj: Any, target: str | os.PathLike[str]) -> None:
    """Write ``obj`` as strict JSON to a file, or to standard output if the target is ``-``."""
    text = to_json(obj)
    if os.fspath(target) == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_atomic(target, text)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {_strict(str(key)): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy here
        return _strict(value.tolist())
    if isinstance(value, os.PathLike):
        return _strict(os.fspath(value))
    if isinstance(value, str):  # bytes of an argument that are no UTF-8
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
