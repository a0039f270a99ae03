"""The books of the contiguous backend: which interval of the arena each row holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..contract import Allocator, OutOfMemory, Seq, Usage
from ..geometry import KVGeometry
from ..sequences import Ints, SequenceTable, resized
from .placement import PLACEMENTS


class ArenaBooks(Allocator):
    """Rows over intervals of slots, one token each.

    Per row: where the interval starts, tokens ``length`` ≤ tokens reserved ``room`` ≤ slots
    ``held``. A row without reservation holds no slots and starts at 0.
    """

    def __init__(
        self, geometry: KVGeometry, num_slots: int, policy: str, placement: str, limit: int | None
    ) -> None:
        self.geometry = geometry
        self.limit = limit
        self.policy = policy
        self.placement = placement
        self._num_slots = num_slots
        self._arena = PLACEMENTS[placement](num_slots)
        self._seqs = SequenceTable()
        self._start: Ints = np.zeros(0, np.int64)
        self._length: Ints = np.zeros(0, np.int64)
        self._room: Ints = np.zeros(0, np.int64)
        self._held: Ints = np.zeros(0, np.int64)
        self._num_live = 0
        self._num_room = 0
        self._version = 0  # of the books: changes with every call that may change them

    @property
    def capacity(self) -> int:
        """Most tokens of one sequence; under buddy placement the largest block."""
        return self._arena.largest

    # ------------------------------------------------------------------ taking and freeing

    def _placed(self, room: int, roomy: int, fill: Callable[[int], None] | None = None) -> int:
        """Take ``room`` slots where ``roomy`` are free; their start (0 for no slots).

        ``fill`` is told the start; if it fails, nothing is taken.
        """
        start = self._arena.take(roomy) if roomy else 0
        if start is None:
            raise self._refusal(self._arena.rounded(roomy))
        if roomy > room:
            self._arena.trim(start, self._arena.rounded(roomy), room)
            start = start if room else 0
        if fill is not None and room:
            try:
                fill(start)
            except BaseException:
                self._arena.give_back(start, self._arena.rounded(room))
                raise
        return start

    def _enter(self, seq: Seq, start: int, length: int, room: int, sealed: int = 0) -> None:
        """Book a sequence on slots that were taken for it."""
        self._version += 1
        row = self._seqs.add(seq, sealed=sealed)
        if row >= len(self._start):
            self._start = resized(self._start, row + 1)
            self._length = resized(self._length, row + 1)
            self._room = resized(self._room, row + 1)
            self._held = resized(self._held, row + 1)
        self._start[row] = start
        self._length[row] = length
        self._room[row] = room
        self._held[row] = self._arena.rounded(room)
        self._num_live += length
        self._num_room += room

    def _leave(self, seq: Seq) -> None:
        """Take a sequence out of the books and free its slots."""
        row = self._seqs.remove(seq)
        self._version += 1
        start, length = int(self._start[row]), int(self._length[row])
        self._scrub(start, start + length)
        if held := int(self._held[row]):
            self._arena.give_back(start, held)
        self._num_live -= length
        self._num_room -= int(self._room[row])
        for array in (self._start, self._length, self._room, self._held):
            array[row] = 0

    def _refusal(self, needed: int, reason: str | None = None) -> OutOfMemory:
        arena = self._arena
        return OutOfMemory(needed, arena.num_free, arena.largest_free, reason=reason)

    # ------------------------------------------------------------------ telling

    def usage(self) -> Usage:
        """The books in bytes, in O(1); ``largest_free`` is the longest free run of slots."""
        token_bytes = self.geometry.bytes_per_token
        reserved = self._num_slots - self._arena.num_free
        return Usage(
            capacity=self._num_slots * token_bytes,
            live=self._num_live * token_bytes,
            reserved=reserved * token_bytes,
            reservation=(self._num_room - self._num_live) * token_bytes,
            tail=(reserved - self._num_room) * token_bytes,
            free=self._arena.num_free * token_bytes,
            largest_free=self._arena.largest_free * token_bytes,
            warm=0,
            table_bytes=self._start.itemsize * len(self._seqs),
        )

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` unless held and free intervals tile the arena. O(memory)."""
        self._arena.check()
        rows = np.array([row for _, row in self._seqs.items()], np.intp)
        length, room, held = self._length[rows], self._room[rows], self._held[rows]
        assert len(np.unique(rows)) == len(rows), "two sequences share a row"
        self._seqs.check_sealed(self._length)
        assert (length >= 0).all() and (length <= room).all() and (room <= held).all()
        assert held.tolist() == [self._arena.rounded(n) for n in room.tolist()]
        assert self.policy != "exact" or (length == room).all(), "exact growth reserved something"
        assert self._num_live == length.sum() and self._num_room == room.sum()
        # Held and free intervals must tile the arena: nothing aliased, nothing lost.
        taken = zip(self._start[rows].tolist(), held.tolist(), strict=True)
        intervals = [(start, size) for start, size in taken if size]
        end = 0
        for start, size in sorted([*intervals, *self._arena.free_intervals()]):
            assert start == end, f"slots {end} to {start} are held twice or by nobody"
            end = start + size
        assert end == self._num_slots, "the intervals do not fill the arena"
        for name in ("_start", "_length", "_room", "_held"):
            array = getattr(self, name).copy()
            array[rows] = 0
            assert not array.any(), f"{name} of a released row was not cleared"

    # ------------------------------------------------------------------ what a cache adds

    def _copy(self, source: int, start: int, length: int) -> None:
        """Copy the contents of ``length`` slots from ``source`` on to ``start``."""

    def _read(self, start: int, length: int) -> Any:
        """A copy of the contents of slots, in host memory; None where there is no tensor."""

    def _write_back(self, start: int, length: int, contents: Any) -> None:
        """Store what ``_read`` returned."""

    def _scrub(self, start: int, stop: int) -> None:
        """Overwrite slots whose tokens are given up (if asked to)."""
