"""Copying, cutting and moving sequences over intervals: fork, truncate, offload, restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..contract import Seq
from ..sequences import check_fits, count
from .books import ArenaBooks


@dataclass(frozen=True)
class _Away:
    """A sequence in host memory: its tokens, what it had reserved, what its slots held."""

    length: int
    sealed: int
    room: int
    contents: Any


class ArenaMoves(ArenaBooks):
    """The verbs of ``Allocator`` that copy, cut and move."""

    def fork(self, parent: Seq, child: Seq) -> None:
        """Copy a sequence whole, with as much reserved as the parent has; nothing is shared.

        What is there is sealed for both all the same, so that no backend allows more than another.
        """
        row = self._seqs.row(parent)
        self._seqs.require_new(child)
        source, length, room = int(self._start[row]), int(self._length[row]), int(self._room[row])
        start = self._placed(room, room, lambda at: self._copy(source, at, length))
        self._enter(child, start, length, room, sealed=length)
        self._seqs.sealed[row] = length

    def truncate(self, seq: Seq, tokens: int) -> None:
        """Keep the first ``tokens`` tokens and the reservation.

        Exact growth has none: it gives back the slots behind, and all of them at 0 tokens.
        """
        row, tokens = self._seqs.row(seq), count("tokens", tokens)
        start, length = int(self._start[row]), int(self._length[row])
        if tokens > length:
            raise ValueError(f"cannot keep {tokens} tokens of sequence {seq!r}: it has {length}")
        if tokens == length:
            return
        self._version += 1
        self._scrub(start + tokens, start + length)
        self._length[row] = tokens
        self._seqs.unseal(row, tokens)
        self._num_live -= length - tokens
        if self.policy == "exact":
            self._arena.trim(start, int(self._held[row]), tokens)
            self._start[row] = start if tokens else 0
            self._held[row] = self._arena.rounded(tokens)
            self._num_room -= int(self._room[row]) - tokens
            self._room[row] = tokens

    def offload(self, seq: Seq) -> None:
        """Move a sequence to host memory; its whole interval becomes free."""
        row = self._seqs.row(seq)
        start, length, room = int(self._start[row]), int(self._length[row]), int(self._room[row])
        sealed = self._seqs.sealed.item(row)
        away = _Away(length, sealed, room, self._read(start, length))
        self._leave(seq)
        self._seqs.away[seq] = away

    def restore(self, seq: Seq, *, headroom: int = 0) -> None:
        """Place an offloaded sequence anew, with the reservation that it had.

        ``headroom`` is found or made part of the reservation as in ``admit``.
        """
        away = self._seqs.offloaded(seq)
        length, room = away.length, away.room
        roomy = length + count("headroom", headroom)
        check_fits(roomy, self.capacity, self.limit)
        if self.policy != "exact":
            room = roomy = max(roomy, room)
        start = self._placed(room, roomy, lambda at: self._write_back(at, length, away.contents))
        del self._seqs.away[seq]
        self._enter(seq, start, length, room, away.sealed)
