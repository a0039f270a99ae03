"""Where the bytes are: the one answer that all accounting is made of."""

from __future__ import annotations

from typing import NamedTuple


class Usage(NamedTuple):
    """Where the bytes are. With the geometry ``SLOTS`` one token is one byte.

    ``reserved + free == capacity`` and ``live + reservation + tail == reserved``, always.

    Where several allocators draw on one pool, ``live``, ``reserved``, ``reservation``, ``tail`` and
    ``table_bytes`` are those of the one that is asked. ``free``, ``largest_free`` and ``warm`` are
    of the pool, since each may take what another keeps warm; so ``capacity`` falls while others
    hold pages. All ``reserved`` together and one ``free`` make up the pool.
    """

    capacity: int
    """Bytes that are held or free: whole pages (or whole tokens)."""
    live: int
    """Bytes of stored tokens; a token shared by several sequences counts once."""
    reserved: int
    """Bytes that live sequences hold; a page with several holders counts once."""
    reservation: int
    """Waste: bytes held for tokens that are not generated yet."""
    tail: int
    """Waste: the unfilled end of last pages, and rounding of reservations."""
    free: int
    """Bytes that a new sequence could take, warm ones included."""
    largest_free: int
    """The largest free run of bytes that one reservation could use."""
    warm: int
    """Of the free bytes: pages still mapped or cached, taken back when needed."""
    table_bytes: int
    """Size of the lookup tables that a kernel reads to find the tokens."""

    @property
    def waste(self) -> int:
        """Internal waste in bytes: reserved and not live."""
        return self.reserved - self.live

    @property
    def external_fragmentation(self) -> float:
        """``1 − largest_free / free``; 0 when nothing is free."""
        return 1.0 - self.largest_free / self.free if self.free else 0.0
