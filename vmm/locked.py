"""The mapped allocator's verbs under its pool's lock: the mapper changes the books as well."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract import OutOfMemory, Prefix, Seq, Usage
from .allocator import VmmAllocator
from .mapper import Mapper


class LockedVmmAllocator(VmmAllocator):
    """``VmmAllocator`` for two threads: a caller, and the mapper, which it wakes."""

    mapper: Mapper | None

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
        """See ``Allocator.admit``."""
        with self.pool.lock:
            cached = super().admit(
                seq,
                tokens,
                max_new=max_new,
                expected_new=expected_new,
                headroom=headroom,
                prefix=prefix,
                salt=salt,
            )
        if self.mapper is not None:
            self.mapper.wake()
        return cached

    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        """See ``Allocator.grow``."""
        with self.pool.lock:
            refused = super().grow(seqs, tokens, stop_at_refusal=stop_at_refusal)
        if self.mapper is not None:
            self.mapper.wake()
        return refused

    def release(self, seq: Seq) -> None:
        """See ``Allocator.release``."""
        with self.pool.lock:
            super().release(seq)

    def fork(self, parent: Seq, child: Seq) -> None:
        """See ``Allocator.fork``."""
        with self.pool.lock:
            super().fork(parent, child)

    def truncate(self, seq: Seq, tokens: int) -> None:
        """See ``Allocator.truncate``."""
        with self.pool.lock:
            super().truncate(seq, tokens)

    def offload(self, seq: Seq) -> None:
        """See ``Allocator.offload``."""
        with self.pool.lock:
            super().offload(seq)

    def restore(self, seq: Seq, *, headroom: int = 0) -> None:
        """See ``Allocator.restore``."""
        with self.pool.lock:
            super().restore(seq, headroom=headroom)

    def reclaim(self) -> int:
        """See ``VmmAllocator.reclaim``."""
        with self.pool.lock:
            return super().reclaim()

    def usage(self) -> Usage:
        """See ``Allocator.usage``."""
        with self.pool.lock:
            return super().usage()

    def check_invariants(self) -> None:
        """See ``Allocator.check_invariants``."""
        with self.pool.lock:
            super().check_invariants()
