"""One interval of a preallocated arena per sequence: the books of the classical KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..contract import NeverFits, OutOfMemory, Prefix, Seq
from ..geometry import KVGeometry, check_geometry
from ..pages.prefix import check_salt, has_runs, unit_keys
from ..sequences import Ints, Rows, at_least_one, check_fits, count, countable, named
from .moves import ArenaMoves
from .placement import PLACEMENTS
from .policies import check_policy, reservation


class ContiguousAllocator(ArenaMoves):
    """Each sequence at consecutive slots, chosen at admission; only swapping moves it.

    Nothing is ever shared: ``fork`` copies everything, and a prefix never hits. Sliding windows
    free nothing either: what a layer can no longer see lies in the middle of the sequence's
    interval of other layers, and its view starts at the first token.

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

    The refusals of growth that no ordinary release cures are ``blocked`` and say the ``reason``:
    exact growth met an occupied neighbour or the end of the arena, or a reservation is used up; the
    sequence has to start anew. ``needed`` is what growth lacks, so even a refusal past a
    reservation is ``fragmented`` when that much is free: the memory is there, and this sequence
    cannot use it.
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
        check_geometry(geometry)
        limit = geometry.max_context if limit is None else at_least_one("limit", limit)
        if limit is not None:
            countable("a limit", limit)
        check_policy(policy, limit)
        if placement not in PLACEMENTS:
            raise ValueError(f"unknown placement {placement!r}: use one of {', '.join(PLACEMENTS)}")
        memory_bytes = countable("memory", count("memory_bytes", memory_bytes))
        num_slots = memory_bytes // geometry.bytes_per_token
        if num_slots < 1:
            raise ValueError(
                f"{memory_bytes} bytes of memory are smaller than one token "
                f"({geometry.bytes_per_token} bytes): give more"
            )
        super().__init__(geometry, num_slots, policy, placement, limit)

    def admit(
        self,
        seq: Seq,
        tokens: int,
        *,
        max_new: int | None = None,
        expected_new: int | None = None,
        headroom: int = 0,
        prefix: Prefix | None = None,
        salt: int | str | bytes | None = None,
    ) -> int:
        """Place a prompt; see ``Allocator.admit``. A ``prefix`` is checked and never hits: 0.

        Exact growth finds ``headroom`` free behind the prompt; a reservation includes it, since
        that is all that it will ever grow into.
        """
        self._seqs.require_new(seq)
        tokens = count("tokens", tokens)
        roomy = tokens + count("headroom", headroom)
        check_salt(salt)
        check_fits(roomy, self.capacity, self.limit)
        if has_runs(prefix):
            unit_keys(prefix, tokens, tokens + 1, salt)  # no unit is full: the checks alone
        room = reservation(self.policy, tokens, max_new, expected_new, self.limit)
        if self.policy != "exact":
            room = roomy = max(roomy, room)
            check_fits(room, self.capacity, None)
        self._enter(seq, self._placed(room, roomy), tokens, room)
        return 0

    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        """Append room in place; see ``Allocator.grow``. Nothing is ever moved.

        Within a reservation this only counts. Past it, or where an occupied neighbour ends exact
        growth, the refusal is ``blocked``.
        """
        rows = self._seqs.rows(seqs)
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
        return {seqs[i]: self._refusal(int(missing[i]), "reservation") for i in refused}

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
                    room, reason = arena.rounded(wanted), None
                    if at is not None:
                        reason = "end" if at + room > self._num_slots else "neighbour"
                    refused[seq] = self._refusal(room - held[i], reason)
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
        """Free the whole interval, reservation included; it merges with free neighbours."""
        if self._seqs.away.pop(named(seq), None) is None:
            self._leave(seq)

    def length(self, seq: Seq) -> int:
        """Tokens of a sequence, offloaded or not."""
        away = self._seqs.away.get(named(seq))
        return int(self._length[self._seqs.row(seq)]) if away is None else away.length

    def spans(self, seq: Seq) -> list[tuple[int, int]]:
        """The one interval of the sequence, reservation included; none if it holds no slots."""
        row = self._seqs.row(seq)
        token_bytes = self.geometry.bytes_per_token
        start, held = int(self._start[row]), int(self._held[row])
        return [(start * token_bytes, (start + held) * token_bytes)] if held else []
