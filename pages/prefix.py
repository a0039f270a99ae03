"""Which full pages of prompts are in memory already: chained hashes, least recently used first out.

A prompt is told as *runs* ``(key, num_tokens)``: equal leading runs mean equal leading tokens,
whatever the page size. The hash of a unit (the tokens of one page, or of as many pages as it
takes for tokens and pages to end together) covers everything before it, so that equal hashes
mean equal tokens at equal positions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeGuard

import numpy as np

from ..contract import Prefix
from ..sequences import Ints, count
from .pool import PageIds


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    key: tuple[bytes, int]
    pages: PageIds


def unit_keys(
    prefix: Prefix, tokens: int, unit_tokens: int, salt: int | str | bytes | None = None
) -> list[bytes]:
    """Hashes of the full units among the first ``tokens`` tokens that the runs describe.

    Parameters
    ----------
    salt
        Sequences with different salts never share.

    Raises
    ------
    TypeError, ValueError
        A key that is not an int, str or bytes; a run without tokens; more than ``tokens``.
    """
    chain = blake2b(b"" if salt is None else _encoded(salt), digest_size=16)
    keys: list[bytes] = []
    room, total = unit_tokens, 0
    for run in prefix:
        if not isinstance(run, Sequence) or isinstance(run, str | bytes) or len(run) != 2:
            raise TypeError(f"a prefix is a list of runs (key, num_tokens), not {run!r} in a row")
        key, size = run
        size = count("tokens of a run", size)
        total += size
        if size < 1 or total > tokens:
            raise ValueError(
                f"runs of a prefix hold at least one token each and at most the prompt's {tokens}"
            )
        name, at = _encoded(key) + b"/%d" % size, 0
        while size - at >= room:
            at += room
            chain.update(b"%s@%d;" % (name, at))
            keys.append(chain.digest())
            room = unit_tokens
        if at < size:
            chain.update(b"%s+%d;" % (name, size - at))
            room -= size - at
    return keys


def has_runs(prefix: Prefix | None) -> TypeGuard[Prefix]:
    """Whether a prompt begins with runs; refuses what is no list of them."""
    if prefix is None:
        return False
    if not isinstance(prefix, Sequence) or isinstance(prefix, str | bytes):
        raise TypeError(
            f"a prefix is a list of runs (key, num_tokens), not {type(prefix).__name__}"
        )
    return len(prefix) > 0


def check_salt(salt: int | str | bytes | None) -> None:
    """Refuse a salt of another type, also where there is no prefix to use it for."""
    if salt is not None:
        _encoded(salt)


def _encoded(key: int | str | bytes) -> bytes:
    if isinstance(key, bool) or not isinstance(key, int | str | bytes | np.integer):
        raise TypeError(f"keys of runs and salts are ints, strings or bytes, not {key!r}")
    kind = b"s" if isinstance(key, str) else b"b" if isinstance(key, bytes) else b"i"
    text = key if isinstance(key, bytes) else str(key).encode()
    return b"%s%d:%s" % (kind, len(text), text)


class PrefixIndex:
    """Full units of prompts by hash. Units without holders can be evicted, oldest first.

    Attributes
    ----------
    unit_tokens : int
        Tokens per unit.
    num_cached : int
        Pages of units that nobody holds: they count as free.
    """

    def __init__(self, unit_tokens: int) -> None:
        self.unit_tokens = unit_tokens
        self.num_cached = 0
        self._entries: dict[tuple[bytes, int], _Entry] = {}
        self._entry_of: dict[int, _Entry] = {}  # by any of its pages
        self._idle: OrderedDict[tuple[bytes, int], _Entry] = OrderedDict()

    @property
    def num_entries(self) -> int:
        """Units in the index, times groups of buffers."""
        return len(self._entries)

    def match(self, keys: Sequence[bytes], num_groups: int) -> int:
        """How many leading units are present in every group."""
        for n, key in enumerate(keys):
            if any((key, g) not in self._entries for g in range(num_groups)):
                return n
        return len(keys)

    def pages(self, keys: Sequence[bytes], g: int) -> list[PageIds]:
        """Pages of present units in a group, each ``[columns × pages per unit]``."""
        return [self._entries[key, g].pages for key in keys]

    def num_idle(self, pages: PageIds) -> int:
        """How many of the pages are in units that nobody holds."""
        return sum(self._entry_of[page].key in self._idle for page in pages.tolist())

    def insert(self, key: bytes, g: int, pages: PageIds) -> None:
        """Enter a unit that a sequence holds; one that is present already stays."""
        if (key, g) in self._entries:
            return
        entry = _Entry((key, g), pages.copy())
        self._entries[key, g] = entry
        self._entry_of.update(dict.fromkeys(pages.tolist(), entry))

    def holds(self, pages: PageIds) -> bool:
        """Whether any of the pages is in the index."""
        return bool(self._entry_of) and any(page in self._entry_of for page in pages.tolist())

    def retire(self, pages: PageIds) -> PageIds:
        """Keep those of the pages that are in the index; returns the others.

        The pages have lost their last holder. Units are always given up whole. Later units go
        first when memory is short: they are useless without those before them.
        """
        others: list[int] = []
        entries: dict[tuple[bytes, int], _Entry] = {}
        for page in pages.tolist():
            entry = self._entry_of.get(page)
            if entry is None:
                others.append(page)
            else:
                entries[entry.key] = entry
        for key in reversed(entries):
            self._idle[key] = entries[key]
        self.num_cached += len(pages) - len(others)
        return np.array(others, np.intp)

    def claim(self, pages: PageIds) -> None:
        """Protect the units of pages from eviction: somebody holds them again."""
        for page in pages.tolist():
            entry = self._idle.pop(self._entry_of[page].key, None)
            if entry is not None:
                self.num_cached -= len(entry.pages)

    def evict(self, num_pages: int) -> PageIds:
        """Remove the longest unused units until ``num_pages`` pages are free, or none is left."""
        freed: list[int] = []
        while self._idle and len(freed) < num_pages:
            _, entry = self._idle.popitem(last=False)
            self.num_cached -= len(entry.pages)
            self._remove(entry)
            freed += entry.pages.tolist()
        return np.array(freed, np.intp)

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        for page in entry.pages.tolist():
            del self._entry_of[page]

    def check(self, refs: Ints) -> None:
        """Assert that exactly the units without holders can be evicted."""
        for key, entry in self._entries.items():
            held = refs[entry.pages] > 0
            assert held.all() or not held.any(), "a unit is held in part"
            assert (key in self._idle) == (not held.any()), "a unit in use could be evicted"
        cached = sum(len(entry.pages) for entry in self._idle.values())
        assert cached == self.num_cached, "cached pages differ"
