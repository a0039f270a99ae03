"""Text lines of a file that nobody vouches for: bounded in length, expansion and memory."""

from __future__ import annotations

import codecs
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import BadInput
from ..output import path_text

MAX_LINE = 1 << 26
"""Longest line in characters; one agent session of a day is tens of MiB."""
MAX_EXPANSION = 200
"""Most bytes that one compressed byte may become. Traces reach about 10, gzip itself 1,032."""
SUSPICIOUS = 1 << 26
"""Expansion is judged only beyond this many bytes: less hurts nobody."""
_BLOCK = 1 << 18


class Source:
    """One text file, plain or gzip, read line by line.

    Parameters
    ----------
    path
        As the user gave it; errors repeat it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.shown = path_text(path)

    @property
    def name(self) -> str:
        """The bare file name, for titles."""
        return path_text(self.path.name)

    def error(self, reason: str, line: int | None = None) -> BadInput:
        """A one-sentence error that names the file and, where known, the line."""
        where = self.shown if line is None else f"{self.shown}, line {line}"
        return BadInput(f"{where}: {reason}")

    def lines(self) -> Iterator[str]:
        """Yield the lines without their ends (LF or CRLF; the last needs none).

        Raises
        ------
        BadInput
            Not there, not a file, not readable, not UTF-8 text, a line longer than
            ``MAX_LINE``, damaged gzip data, or gzip data that explodes.
        """
        number = 1
        parts: list[str] = []  # of the line that has no end yet
        length = 0
        decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        for block, last in self._blocks():
            try:
                *lines, rest = decode(block, last).split("\n")
            except UnicodeDecodeError as problem:
                number += problem.object[: problem.start].count(b"\n")
                raise self.error("this is not UTF-8 text", number) from None
            if lines:
                lines[0] = "".join((*parts, lines[0]))
                parts, length = [], 0
            for line in lines:
                yield line.removesuffix("\r")
            number += len(lines)
            parts.append(rest)
            length += len(rest)
            if length > MAX_LINE:
                raise self.error(f"the line is longer than {MAX_LINE:,} characters", number)
        if length:
            yield "".join(parts).removesuffix("\r")

    def _blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Yield decompressed blocks, then an empty one marked as the last."""
        try:
            with self.path.open("rb") as raw:
                packed = raw.peek(2)[:2] == b"\x1f\x8b"
                stream: BinaryIO = gzip.GzipFile(fileobj=raw) if packed else raw  # type: ignore[assignment]
                total = 0
                while block := stream.read(_BLOCK):
                    total += len(block)
                    if b"\0" in block:
                        raise self.error("this is a binary file, a trace is UTF-8 text")
                    if packed and total > max(SUSPICIOUS, MAX_EXPANSION * raw.tell()):
                        raise self.error(
                            f"the gzip data grows more than {MAX_EXPANSION}-fold, which no trace "
                            "does: unpack it yourself if you trust it"
                        )
                    yield block, False
        except FileNotFoundError:
            raise self.error(
                "there is no such file, and no built-in trace of this name "
                "(`kvalloc trace list` shows those)"
            ) from None
        except IsADirectoryError:
            raise self.error("this is a folder: name one trace file in it") from None
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise self.error("the gzip data is damaged or cut off") from None
        except (OSError, ValueError) as problem:
            if isinstance(problem, BadInput):
                raise
            reason = getattr(problem, "strerror", None) or str(problem)
            raise self.error(f"cannot be read ({reason})") from None
        yield b"", True
