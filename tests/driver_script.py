"""Right and wrong uses of a driver, and what every driver must answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvalloc.contract import OutOfMemory
from kvalloc.vmm.driver import Driver, DriverError

KINDS = (ValueError, OutOfMemory, DriverError)

Step = tuple[str, Callable[[int, int, list[int]], tuple[int, ...]], str]

# A verb; its arguments from the granularity, the base of eight granules of addresses, and the
# handles made so far; the outcome.
SCRIPT: list[Step] = [
    ("create", lambda g, a, h: (g,), "done"),
    ("create", lambda g, a, h: (2 * g,), "done"),
    ("create", lambda g, a, h: (g + 1,), "ValueError"),
    ("create", lambda g, a, h: (0,), "ValueError"),
    ("create", lambda g, a, h: (-g,), "ValueError"),
    ("create", lambda g, a, h: (1 << 60,), "OutOfMemory"),
    ("reserve", lambda g, a, h: (g // 2,), "ValueError"),
    ("reserve", lambda g, a, h: (1 << 62,), "DriverError"),
    ("map", lambda g, a, h: (a + 4096, g, h[0]), "ValueError"),
    ("map", lambda g, a, h: (a, g, 99999), "DriverError"),
    ("map", lambda g, a, h: (a, g, h[1]), "DriverError"),  # a part of a page
    ("map", lambda g, a, h: (a, 2 * g, h[0]), "DriverError"),  # more than the page
    ("map", lambda g, a, h: (a + 7 * g, 2 * g, h[1]), "DriverError"),  # past the range
    ("map", lambda g, a, h: (1 << 44, g, h[0]), "DriverError"),  # not reserved
    ("map", lambda g, a, h: (a, g, h[0]), "done"),
    ("map", lambda g, a, h: (a, g, h[0]), "DriverError"),  # mapped already
    ("map", lambda g, a, h: (a + g, 2 * g, h[1]), "done"),
    ("map", lambda g, a, h: (a + 2 * g, g, h[0]), "DriverError"),  # inside a mapping
    ("map", lambda g, a, h: (a + 4 * g, g, h[0]), "done"),  # the same page twice
    ("allow", lambda g, a, h: (a, 2 * g), "DriverError"),  # ends inside a mapping
    ("allow", lambda g, a, h: (a + 2 * g, g), "DriverError"),  # begins inside one
    ("allow", lambda g, a, h: (a, 5 * g), "DriverError"),  # over a hole
    ("allow", lambda g, a, h: (a + 5 * g, g), "DriverError"),  # nothing there
    ("allow", lambda g, a, h: (a, 3 * g), "done"),
    ("allow", lambda g, a, h: (a, 3 * g), "done"),  # once more
    ("free", lambda g, a, h: (a, 8 * g), "DriverError"),  # still mapped
    ("unmap", lambda g, a, h: (a + g, g), "DriverError"),  # a part of a mapping
    ("unmap", lambda g, a, h: (a, 5 * g), "DriverError"),  # over a hole
    ("unmap", lambda g, a, h: (a, 100), "ValueError"),
    ("release", lambda g, a, h: (h[0],), "done"),
    ("release", lambda g, a, h: (h[0],), "DriverError"),  # twice
    ("map", lambda g, a, h: (a + 5 * g, g, h[0]), "DriverError"),  # after the release
    ("unmap", lambda g, a, h: (a, 3 * g), "done"),
    ("unmap", lambda g, a, h: (a, 3 * g), "DriverError"),  # twice
    ("allow", lambda g, a, h: (a, 3 * g), "DriverError"),
    ("unmap", lambda g, a, h: (a + 4 * g, g), "done"),
    ("free", lambda g, a, h: (a, 4 * g), "DriverError"),  # not all of it
    ("free", lambda g, a, h: (a + g, 7 * g), "DriverError"),
    ("free", lambda g, a, h: (a, 8 * g), "done"),
    ("free", lambda g, a, h: (a, 8 * g), "DriverError"),  # twice
    ("map", lambda g, a, h: (a, 2 * g, h[1]), "DriverError"),  # the range is gone
    ("release", lambda g, a, h: (h[1],), "done"),
    ("close", lambda g, a, h: (), "done"),
    ("close", lambda g, a, h: (), "done"),
    ("create", lambda g, a, h: (g,), "DriverError"),  # closed
    ("reserve", lambda g, a, h: (g,), "DriverError"),
    ("unmap", lambda g, a, h: (a, g), "DriverError"),
]

BYTES_IN_USE = {0: 1, 1: 3, 29: 3, 32: 3, 35: 2, 41: 0}
"""Granules of physical memory after some of the steps."""


def play(driver: Any) -> None:
    """Run the script; raises ``AssertionError`` at the first other answer."""
    g = driver.granularity
    address = driver.reserve(8 * g)
    handles: list[int] = []
    for step, (verb, arguments, expected) in enumerate(SCRIPT):
        kind, made = _outcome(driver, verb, *arguments(g, address, handles))
        assert kind == expected, (step, verb, kind)
        if verb == "create" and isinstance(made, int):
            handles.append(made)
        if step in BYTES_IN_USE:
            assert driver.bytes_in_use == BYTES_IN_USE[step] * g, step


def _outcome(driver: Driver, verb: str, *args: int) -> tuple[str, object]:
    try:
        return "done", getattr(driver, verb)(*args)
    except KINDS as error:
        return next(kind.__name__ for kind in KINDS if isinstance(error, kind)), None
