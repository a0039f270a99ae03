"""The rows of a model's batch as sequences of one KV cache: always equally long, side by side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ..contract import KVCache, NeverFits
from ..geometry import KVGeometry, LayerShape, canonical_dtype
from ..sequences import at_least_one
from .refusals import advice, check, or_none


class Rows(ABC):
    """Sequences ``0 … num_rows − 1`` of a ``KVCache``, which is made when the first tokens come.

    Parameters
    ----------
    windows
        Per cached layer its sliding window, or None.
    max_length
        Most tokens of a row.
    memory_bytes
        Most memory for all rows; None: what the first batch needs if it grows to ``max_length``.

    Attributes
    ----------
    num_rows : int
        0 before the first tokens.
    room : int
        Tokens that each row can take before ``grow`` has to be asked.
    shape : tuple of int
        Rows, KV heads and head dim of what is stored.
    dtype, device
        Of what is stored.
    recorded : int | None
        What a crop to so many tokens or more needs is kept; None: whatever the newest can see.
    epoch : int
        Changes whenever rows come, go or move.
    """

    def __init__(
        self, windows: Sequence[int | None], max_length: int, memory_bytes: int | None
    ) -> None:
        self.windows = tuple(windows)
        self.max_length = at_least_one("max_length", max_length)
        self.memory_bytes = or_none("memory_bytes", memory_bytes)
        self.num_rows = self.room = self.epoch = 0
        self.shape = (0, 0, 0)
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.recorded: int | None = None
        self._booked = 0
        self._num_live = 0  # sequences in the cache; after an error perhaps more than rows
        self._is_uneven = False  # after an error: some rows have more tokens than are booked
        self._num_planned = 0  # rows that the memory was sized for
        self._kv: KVCache | None = None

    @property
    def kv(self) -> KVCache:
        """The cache behind the rows."""
        if self._kv is None:
            raise RuntimeError("nothing was stored yet: run the model first")
        return self._kv

    @property
    def seqs(self) -> list[int]:
        """Names of the rows in the cache."""
        return list(range(self.num_rows))

    # ------------------------------------------------------------------ lengths

    def prepare(self, end: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Make room for ``end`` tokens in every row: in all of them, or an error and no change.

        Parameters
        ----------
        k, v
            What is to be stored, ``[rows, H_kv, tokens, D]``: tells the shape of a new batch.
        """
        if end > self.max_length:
            raise NeverFits(
                f"{end} tokens are beyond the cache's max_length of {self.max_length}: "
                "make it with a larger one"
            )
        with advice():
            if self.num_rows == 0:
                check(k, v)
                self._open(len(k), end, k)
            elif end > self._booked:
                self._grow(end)

    def _open(self, num_rows: int, tokens: int, k: torch.Tensor) -> None:
        self._tidy()
        if not self._serves(num_rows, k):
            self._kv = None  # its memory goes with the last tensor over it
            self._kv = self._build(num_rows, k)
            self._num_planned = num_rows
            self.dtype, self.device = k.dtype, k.device
            self.shape = (0, k.shape[1], k.shape[3])
        self._admit(num_rows, tokens)
        self._count(num_rows)
        self._book(tokens)

    def _serves(self, num_rows: int, k: torch.Tensor) -> bool:
        """Whether the cache that is there can take a batch like ``k``."""
        if self._kv is None or (self.memory_bytes is None and num_rows > self._num_planned):
            return False
        alike = self.shape[1:] == (k.shape[1], k.shape[3]) and self.dtype == k.dtype
        return alike and self.device == k.device

    def _admit(self, num_rows: int, tokens: int) -> None:
        try:
            for seq in range(num_rows):
                self.kv.admit(seq, tokens)
                self._num_live += 1
        except BaseException:
            self._tidy()
            raise

    def _grow(self, end: int) -> None:
        self._tidy()
        self._is_uneven = True  # until all of them have grown
        refused = self.kv.grow(self.seqs, end - self._booked)
        if refused:
            self._tidy()
            raise next(iter(refused.values()))
        self._is_uneven = False
        self._book(end)

    def _tidy(self) -> None:
        """Finish what an error ended early: rows still to be released, tokens still to be cut.

        Whatever changes the cache begins with this; after an error here the next call goes on.
        """
        while self._num_live > self.num_rows:
            self.kv.release(self._num_live - 1)  # the last first: names and places have no gap
            self._num_live -= 1
        if self._is_uneven:
            for seq in self.seqs:
                self.kv.truncate(seq, self._booked)
            self._is_uneven = False
            self._book(self._booked)

    def _book(self, tokens: int) -> None:
        self._booked = tokens
        self.room = min(self._num_room(), self.max_length)

    def _count(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.shape = (num_rows, *self.shape[1:])
        self.epoch += 1

    def _num_room(self) -> int:
        """Tokens that each row can take as it is; the books follow when it is exceeded."""
        return self._booked

    def settle(self, length: int) -> None:
        """Let the books say what is stored: ``length`` tokens a row."""
        self._tidy()
        if length > self._booked:
            self._grow(length)

    def check_crop(self, length: int) -> None:
        """Refuse a crop to ``length`` tokens that could not be made in every row."""
        self._tidy()

    def crop(self, length: int) -> None:
        """Keep ``length`` tokens of every row, as ``check_crop`` allowed.

        After an error the tokens are gone all the same, and their memory follows.
        """
        if length < self._booked:
            self._booked = self.room = length
            self._is_uneven = True
            self._tidy()

    def record(self, length: int | None) -> None:
        """Keep whatever a crop to ``length`` tokens or more needs; None: no longer."""
        self.recorded = length

    # ------------------------------------------------------------------ the batch

    def select(self, sources: Sequence[int], length: int) -> None:
        """Let row ``i`` have the ``length`` tokens that row ``sources[i]`` had.

        Raises
        ------
        OutOfMemory
            No room for more rows; nothing was changed.
        """
        before = self.num_rows
        if not sources or not all(0 <= source < before for source in sources):
            raise ValueError(f"a batch of {before} cannot become its rows {list(sources)}")
        self.settle(length)
        try:
            with advice():
                self._add(range(before, len(sources)), sources)
            self._rearrange(list(sources[:before]), length)
        except BaseException:
            self._tidy()
            raise
        if len(sources) != before:
            self._count(len(sources))
            self._tidy()

    def _add(self, more: range, sources: Sequence[int]) -> None:
        """New rows, each with what its source has now."""
        for seq in more:
            self.kv.fork(sources[seq], seq)
            self._num_live += 1

    def reset(self) -> None:
        """Forget all tokens, even if an error leaves memory to the next call.

        The next ones may come in another batch size.
        """
        self.room = self._booked = 0
        self._is_uneven = False
        self._count(0)
        self._tidy()

    def close(self) -> None:
        """Give all memory back; the next tokens take it anew."""
        self.reset()
        if self._kv is not None:
            self._kv.close()
            self._kv = None

    # ------------------------------------------------------------------ what backends add

    def geometry(self, k: torch.Tensor) -> KVGeometry:
        """All layers shaped like ``k``."""
        _, heads, _, dim = k.shape
        layers = tuple(LayerShape(heads, dim, window) for window in self.windows)
        return KVGeometry("model", layers, heads, canonical_dtype(str(k.dtype)), self.max_length)

    @abstractmethod
    def _build(self, num_rows: int, k: torch.Tensor) -> KVCache:
        """A cache for tensors like ``k``."""

    @abstractmethod
    def _rearrange(self, sources: list[int], length: int) -> None:
        """Let the first rows have what their sources have: all at once."""
