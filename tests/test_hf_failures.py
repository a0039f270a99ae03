"""Every driver call under a ``VmmCache`` fails once: told truly, usable, nothing left behind."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from kvalloc.hf import VmmCache
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.hf_models import MAX_LENGTH, PAGE_BYTES, one_thread
from kvalloc.tests.hf_updates import CONFIG, require_same, sliding, tokens
from kvalloc.tests.test_hf_walk import Plain
from kvalloc.vmm.driver import DriverError
from kvalloc.vmm.host import HostDriver

__all__ = ["one_thread"]

WINDOW = 20


class WatchedDriver(FailingDriver):
    """Tells how much memory its cache left to be returned by closing the driver."""

    left = 0

    def close(self) -> None:
        self.left += self.bytes_in_use
        super().close()


class Both:
    """A cache and what it has to return."""

    def __init__(self, window: int | None) -> None:
        self.ours: Any = VmmCache.from_config(
            CONFIG if window is None else sliding(window),
            max_length=MAX_LENGTH,
            memory_bytes=300 * PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            layout="token-major",  # the fewest buffers: each call of each fails once
        )
        self.plain = Plain(window)

    def update(self, num_rows: int, num_tokens: int) -> None:
        require_same(self.ours, self.plain, tokens(num_rows, num_tokens))

    def repeat(self, repeats: int) -> None:
        self.select([row for row in range(self.num_rows) for _ in range(repeats)], "repeat")

    def reorder(self, rows: list[int]) -> None:
        self.select(rows, "reorder")

    def select(self, rows: list[int], how: str = "select") -> None:
        self.plain.select(rows)
        if how == "repeat":
            self.ours.batch_repeat_interleave(len(rows) // self.ours.layers[0].batch_size)
        elif how == "reorder":
            self.ours.reorder_cache(torch.tensor(rows))
        else:
            self.ours.batch_select_indices(torch.tensor(rows))

    def crop(self, num_tokens: int) -> None:
        self.plain.crop(num_tokens)
        self.ours.crop(num_tokens)

    def reset(self) -> None:
        self.plain.reset()
        self.ours.reset()

    def close(self) -> None:
        self.plain.reset()
        self.ours.close()

    @property
    def num_rows(self) -> int:
        stored = self.plain.stored[0]
        return 0 if stored is None else stored[0].shape[0]

    def is_told(self) -> bool:
        """Whether the cache says that it holds what ``plain`` does."""
        rows = self.ours.layers[0].batch_size if self.ours.is_initialized else 0
        told = rows, *map(self.ours.get_seq_length, range(2))
        return told == (self.num_rows, *map(self.plain.get_seq_length, range(2)))


Step = tuple[Any, ...]


@dataclass(frozen=True)
class Scene:
    """Steps that go well, then the one whose driver calls fail."""

    prepare: list[Step]
    act: Step
    window: int | None = None


BEAMS: list[Step] = [("update", 1, 64), ("repeat", 3), ("update", 3, 1)]
SCENES = {
    "admit": Scene([], ("update", 3, 20)),
    "admit anew": Scene([("update", 2, 20), ("reset",)], ("update", 3, 40)),
    "admit beside warm beams": Scene([*BEAMS, ("reset",)], ("update", 4, 70)),
    "grow": Scene([("update", 3, 16)], ("update", 3, 1)),
    "grow past a window": Scene([("update", 3, 15), ("update", 3, 33)], ("update", 3, 1), WINDOW),
    "fork": Scene([("update", 1, 40)], ("repeat", 4)),
    "fork past a window": Scene([("update", 2, 40), ("update", 2, 10)], ("repeat", 2), WINDOW),
    "crop through shared pages": Scene(BEAMS, ("crop", -30)),
    "crop at a page's end": Scene(BEAMS, ("crop", -33)),
    "crop": Scene([("update", 3, 40)], ("crop", -30)),
    "reorder": Scene([("update", 3, 40)], ("reorder", [2, 2, 0])),
    "select more": Scene([("update", 3, 40)], ("select", [2, 2, 0, 1, 1])),
    "select fewer": Scene(BEAMS, ("select", [2, 0])),
    "reset": Scene([("update", 3, 40)], ("reset",)),
    "reset of beams": Scene(BEAMS, ("reset",)),
    "reset past a window": Scene([("update", 3, 40), ("update", 3, 20)], ("reset",), WINDOW),
    "close": Scene([("update", 2, 40)], ("close",)),
    "close with beams": Scene(BEAMS, ("close",)),
}
WITHOUT_CALLS = ("crop", "reset")
"""Rows keep the pages that they share with nobody where they are."""


class Drivers:
    """Makes the drivers of caches, and lets a call of the newest one fail."""

    def __init__(self) -> None:
        self.made: list[WatchedDriver] = []
        self._fail_at = 0

    def __call__(self, device: object, page_bytes: int, guard: Any) -> WatchedDriver:
        self.made.append(WatchedDriver(HostDriver(page_bytes, guard), self._fail_at))
        self._fail_at = 0
        return self.made[-1]

    def arm(self, fail_at: int) -> None:
        if self.made:
            self.made[-1].arm(fail_at)
        else:
            self._fail_at = fail_at  # the first one's, which is made by the call that fails


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Drivers:
    # A record of a failure keeps its traceback, and so the views that its frames have.
    caplog.set_level(logging.ERROR, "kvalloc")
    made = Drivers()
    monkeypatch.setattr("kvalloc.vmm.cache.make_driver", made)
    return made


def do(both: Both, step: Step) -> bool:
    """Whether a step was done; after an error, everything is as before or as asked for."""
    verb, *arguments = step
    before = copy.copy(both.plain)
    before.stored = [*both.plain.stored]
    try:
        getattr(both, verb)(*arguments)
    except DriverError:
        after, both.plain = both.plain, before
        if both.is_told():
            return False
        both.plain = after
        assert both.is_told(), "neither as before nor as asked for"
    return True


def require_usable(both: Both, drivers: Drivers) -> None:
    """Reads, takes tokens and changes rows, though the first call of each fails once more."""
    if both.num_rows:
        length = both.plain.get_seq_length()
        stored, got = both.plain.stored[0], both.ours.layers[0].keys
        assert (got is not None) == (length > 0)
        if stored is not None and length:
            assert torch.equal(got, stored[0][:, :, both.plain.first(0) :])
    rows = both.num_rows or 2
    for step in (("update", rows, 1), ("select", [*range(rows)][:2]), ("update", min(rows, 2), 17)):
        drivers.arm(1)
        if not do(both, step):
            assert do(both, step)
    both.ours.usage()
    both.ours._rows.kv.check_invariants()


def fails_at(drivers: Drivers, scene: Scene, n: int) -> bool:
    """Let the n-th call fail; False if there is no n-th."""
    drivers.made.clear()
    both = Both(scene.window)
    for step in scene.prepare:
        assert do(both, step)
    drivers.arm(n)
    done = do(both, scene.act)
    failed = drivers.made[0].failed
    if n % 2:  # otherwise the next call is the one that closes
        require_usable(both, drivers)
    elif not done and scene.act[0] != "close":
        assert do(both, scene.act), "a second try fails"
    drivers.arm(0)
    both.close()
    assert not any(driver.left or driver.bytes_in_use for driver in drivers.made)
    return failed


@pytest.mark.parametrize("name", SCENES)
def test_a_failing_driver_call(drivers: Drivers, name: str) -> None:
    """An error changes nothing, or removes what was to be removed: the length tells which."""
    n = 1
    while fails_at(drivers, SCENES[name], n):
        n += 1
    assert (n > 1) == (name not in WITHOUT_CALLS)
