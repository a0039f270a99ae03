"""One interval of a preallocated arena per sequence: the books of the classical KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import Allocator, NeverFits, OutOfMemory, Seq, Usage
from ..geometry import KVGeometry
from ..sequences import Ints, Rows, SequenceTable, check_fits, count, resized
from .placement import PLACEMENTS
from .policies import check_policy, reservation


class ContiguousAllocator(Allocator):
    """Each sequence at consecutive slots, chosen at admission and never moved.

    Parameters
    ----------
    geometry
        Gives the bytes per token; ``SLOTS`` counts bare tokens.
    memory_bytes
        Size of the arena, rounded down to whole tokens.
    policy
        What an admission sets aside, see ``policies``: ``"max"``, ``"limit"``, ``"pow2"``,
        ``"oracle"``, or ``"exact"``, which grows in place while the slots behind are free.
    placement
        ``"first-fit"``, ``"best-fit"`` or ``"buddy"``. Buddy rounds what is taken up to a power
        of two; the rounding is held, may be grown into, and counts as ``tail`` waste.
    limit
        Most tokens of one sequence; by default the geometry's context limit.

    Notes
    -----
    A sequence without tokens and reservation holds no slots; exact growth then places it anew.

    Both refusals of growth that no ordinary release cures are ``blocked``: exact growth met an
    occupied neighbour or the end of the arena, or a reservation is used up; the sequence has to
    start anew. ``needed`` is what growth lacks, so even a refusal past a reservation is
    ``fragmented`` when that much is free: the memory is there, and this sequence cannot use it.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int,
        *,
        policy: str = "max",
        placement: str = "first-fit",
        limit: int | None = None,
    ) -> None:
        self.geometry = geometry
        self.limit = geometry.max_context if limit is None else count("limit", limit)
        check_policy(policy, self.limit)
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: use one of {', '.join(PLACEMENTS)}")
        self.policy = policy
        self.placement = placement
        self._num_slots = count("memory_bytes", memory_bytes) // geometry.bytes_per_token
        if self._num_slots < 1:
            raise ValueError(
                f"{memory_bytes} bytes of memory are smaller than one token "
                f"({geometry.bytes_per_token} bytes): give more"
            )
        self._arena = PLACEMENTS[placement](self._num_slots)
        self._table = SequenceTable()
        # By row: where the interval starts, tokens stored, tokens reserved, slots held.
        self._start = np.zeros(0, np.int64)
        self._length = np.zeros(0, np.int64)
        self._room = np.zeros(0, np.int64)
        self._held = np.zeros(0, np.int64)
        self._num_live = 0
        self._num_room = 0
        self._version = 0  # of the books: changes with every call that may change them

    @property
    def capacity(self) -> int:
        """Most tokens of one sequence; under buddy placement the largest block."""
        return self._arena.largest

    def admit(
        self,
        seq: Seq,
        tokens: int,
        *,
        max_new: int | None = None,
        expected_new: int | None = None,
        headroom: int = 0,
    ) -> int:
        """Place a prompt; see ``Allocator.admit``.

        Exact growth finds ``headroom`` free behind the prompt; a reservation includes it, since
        that is all that it will ever grow into.
        """
        self._table.require_new(seq)
        tokens = count("tokens", tokens)
        roomy = tokens + count("headroom", headroom)
        check_fits(roomy, self.capacity, self.limit)
        room = reservation(self.policy, tokens, max_new, expected_new, self.limit)
        if self.policy != "exact":
            room = roomy = max(roomy, room)
            check_fits(room, self.capacity, None)
        start = self._placed(room, roomy)
        self._version += 1
        row = self._table.add(seq)
        self._resize(self._table.num_rows)
        self._start[row] = start
        self._length[row] = tokens
        self._room[row] = room
        self._held[row] = self._arena.rounded(room)
        self._num_live += tokens
        self._num_room += room
        return 0

    def _placed(self, room: int, roomy: int) -> int:
        """Take ``room`` slots where ``roomy`` are free; their start (0 for no slots)."""
        if roomy == 0:
            return 0
        start = self._arena.take(roomy)
        if start is None:
            raise self._refusal(self._arena.rounded(roomy))
        if roomy > room:
            self._arena.trim(start, self._arena.rounded(roomy), room)
        return start if room else 0

    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        rows = self._table.rows(seqs)
        tokens = count("tokens", tokens)
        if not len(rows):
            return {}
        check_fits(tokens, self._num_slots, None)  # also keeps the sums below within int64
        wanted = self._length[rows] + tokens
        if (wanted <= self._room[rows]).all():  # and therefore within the limit
            self._version += 1
            self._length[rows] = wanted
            self._num_live += tokens * len(rows)
            return {}
        if self.limit is not None and wanted.max() > self.limit:
            i = int(np.argmax(wanted > self.limit))
            raise NeverFits(
                f"sequence {seqs[i]!r} would grow to {wanted[i]} tokens, beyond the limit of "
                f"{self.limit} per sequence; nothing was changed"
            )
        self._version += 1
        if self.policy == "exact":
            return self._grow_in_place(seqs, rows, tokens, stop_at_refusal)
        return self._grow_past_reservation(seqs, rows, wanted, stop_at_refusal)

    def _grow_past_reservation(
        self, seqs: Sequence[Seq], rows: Rows, wanted: Ints, stop_at_refusal: bool
    ) -> dict[Seq, OutOfMemory]:
        """A reservation never moves or grows; only buddy's rounding may hold a few slots more."""
        missing = wanted - self._held[rows]
        refused = np.flatnonzero(missing > 0).tolist()
        served = missing <= 0
        if stop_at_refusal and refused:
            served[refused[0] :] = False
            refused = refused[:1]
        self._store(rows[served], wanted[served])
        return {seqs[i]: self._refusal(int(missing[i]), blocked=True) for i in refused}

    def _grow_in_place(
        self, seqs: Sequence[Seq], rows: Rows, tokens: int, stop_at_refusal: bool
    ) -> dict[Seq, OutOfMemory]:
        """Exact growth, one sequence after the other: each may take what the next one needs."""
        arena = self._arena
        start, length, held = (
            array[rows].tolist() for array in (self._start, self._length, self._held)
        )
        refused: dict[Seq, OutOfMemory] = {}
        for i, seq in enumerate(seqs):
            wanted = length[i] + tokens
            if wanted > held[i]:
                if held[i]:
                    at, size = start[i], arena.extend(start[i], held[i], wanted)
                else:
                    at, size = arena.take(wanted), arena.rounded(wanted)
                if at is None or size is None:
                    needed = arena.rounded(wanted) - held[i]
                    refused[seq] = self._refusal(needed, blocked=at is not None)
                    if stop_at_refusal:
                        break
                    continue
                start[i], held[i] = at, size
            length[i] = wanted
        self._start[rows] = start
        self._held[rows] = held
        self._store(rows, np.array(length, np.int64))
        return refused

    def _store(self, rows: Rows, length: Ints) -> None:
        """New lengths; what was stored past a reservation counts as reserved."""
        room = np.maximum(self._room[rows], length)
        self._num_live += int((length - self._length[rows]).sum())
        self._num_room += int((room - self._room[rows]).sum())
        self._length[rows], self._room[rows] = length, room

    def release(self, seq: Seq) -> None:
        row = self._table.remove(seq)
        self._version += 1
        if held := int(self._held[row]):
            self._arena.give_back(int(self._start[row]), held)
        self._num_live -= int(self._length[row])
        self._num_room -= int(self._room[row])
        for array in (self._start, self._length, self._room, self._held):
            array[row] = 0

    def length(self, seq: Seq) -> int:
        return int(self._length[self._table.row(seq)])

    def spans(self, seq: Seq) -> list[tuple[int, int]]:
        """The one interval of the sequence, reservation included; none if it holds no slots."""
        row = self._table.row(seq)
        token_bytes = self.geometry.bytes_per_token
        start, held = int(self._start[row]), int(self._held[row])
        return [(start * token_bytes, (start + held) * token_bytes)] if held else []

    def usage(self) -> Usage:
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
            table_bytes=self._start.itemsize * len(self._table),
        )

    def check_invariants(self) -> None:
        self._arena.check()
        rows = np.array([row for _, row in self._table.items()], np.intp)
        length, room, held = self._length[rows], self._room[rows], self._held[rows]
        assert len(np.unique(rows)) == len(rows), "two sequences share a row"
        assert (length >= 0).all() and (length <= room).all() and (room <= held).all()
        assert held.tolist() == [self._arena.rounded(n) for n in room.tolist()]
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

    def _refusal(self, needed: int, *, blocked: bool = False) -> OutOfMemory:
        arena = self._arena
        return OutOfMemory(needed, arena.num_free, arena.largest_free, blocked=blocked)

    def _resize(self, num_rows: int) -> None:
        if num_rows > len(self._start):
            self._start = resized(self._start, num_rows)
            self._length = resized(self._length, num_rows)
            self._room = resized(self._room, num_rows)
            self._held = resized(self._held, num_rows)
