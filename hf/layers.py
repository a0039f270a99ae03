"""Layers of a transformers cache whose tokens lie in rows at equal distance."""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

from .backends import DenseRows, Pair
from .refusals import check_states
from .rows import Rows


class Layer(CacheLayerMixin):  # type: ignore[misc]
    """What the layers of all backends tell transformers.

    Attributes
    ----------
    length : int
        Tokens stored in this layer.
    window : int | None
        Sliding window: the newest tokens that a query sees, its own included.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, rows: Rows, index: int, window: int | None) -> None:
        self._rows = rows
        self._index = index
        self.window = window
        self.length = 0

    @property
    def is_sliding(self) -> bool:
        """Whether the layer has a sliding window."""
        return self.window is not None

    @property
    def is_initialized(self) -> bool:
        """Whether a batch has been stored."""
        return self._rows.num_rows > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; ``AttributeError`` before there is one."""
        if not self._rows.num_rows:
            raise AttributeError("no batch yet")  # transformers asks with hasattr
        return self._rows.num_rows

    @property
    def keys(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> torch.Tensor | None:
        """K of the tokens that the next one can see, ``[rows, H_kv, tokens, D]``."""
        return self._visible()[0] if self.length else None

    @property
    def values(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> torch.Tensor | None:
        """V of the same tokens."""
        return self._visible()[1] if self.length else None

    def _visible(self) -> Pair:
        raise NotImplementedError

    def forget(self) -> None:
        """Begin anew with no tokens, looking at no memory."""
        self.length = 0

    def _misfit(self, k: torch.Tensor, v: torch.Tensor) -> ValueError:
        rows = self._rows
        return ValueError(
            f"layer {self._index} gives K {list(k.shape)} and V {list(v.shape)} of {k.dtype} on "
            f"{k.device}, but the cache holds {rows.shape} (rows, KV heads, head dim) of "
            f"{rows.dtype} on {rows.device}: call reset() before another batch; layers of "
            "unlike shape, or on several devices, need transformers' DynamicCache"
        )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the cache for tensors like these before the first token is stored."""
        self._rows.prepare(0, key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens stored, those that fell out of the window included."""
        return self.length

    def get_max_length(self) -> int:
        """Most tokens that can be stored."""
        return self._rows.max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that ``update`` will return for so many new ones, and the first one's position."""
        first = self._first(self.length)
        return self.length + query_length - first, first

    def _first(self, begin: int) -> int:
        """The first token that a query at ``begin`` sees."""
        return 0 if self.window is None else max(0, begin - self.window + 1)

    def activate_past_recording(self) -> None:
        """From now on nothing falls out of the window before a crop says so."""
        if self.window is not None:
            self._rows.record(self.length)

    @property
    def record_past(self) -> bool:
        """Whether tokens behind the window are kept for a crop."""
        return self._rows.recorded is not None

    @record_past.setter
    def record_past(self, is_on: bool) -> None:
        self._rows.record(self.length if is_on else None)


class DenseLayer(Layer):
    """Writes tokens where they stay and returns a view of them: nothing is copied again."""

    _rows: DenseRows

    def __init__(self, rows: DenseRows, index: int, window: int | None) -> None:
        super().__init__(rows, index, window)
        self._epoch = -1  # of the rows that the tensors below look at
        self._k = self._v = torch.empty(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> Pair:
        """Store new tokens; see ``Cache.update``.

        Parameters
        ----------
        key_states, value_states
            ``[rows, H_kv, n, D]``. No gradient flows through the cache.

        Returns
        -------
        tuple of torch.Tensor
            K and V ``[rows, H_kv, tokens, D]``: all tokens, or those in the window of the new
            ones. Views, valid until the next call of any method.

        Raises
        ------
        NeverFits, OutOfMemory
            Beyond ``max_length``, or no memory for now; no length changed.
        TypeError, ValueError
            A dtype, shape or device that does not fit what is stored.
        """
        check_states(key_states, value_states)
        rows, begin = self._rows, self.length
        num_rows, heads, num_tokens, dim = key_states.shape
        end = begin + num_tokens
        if not rows.num_rows:
            rows.prepare(end, key_states, value_states)
        if (
            (num_rows, heads, dim) != rows.shape
            or key_states.dtype != rows.dtype
            or key_states.device != rows.device
            or value_states.shape != key_states.shape
            or value_states.dtype != rows.dtype
        ):
            raise self._misfit(key_states, value_states)
        if end > rows.room:
            rows.prepare(end, key_states, value_states)
        if self._epoch != rows.epoch:
            self._look()
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        self._k.narrow(2, begin, num_tokens).copy_(key_states)
        self._v.narrow(2, begin, num_tokens).copy_(value_states)
        self.length = end
        first = self._first(begin)
        return self._k.narrow(2, first, end - first), self._v.narrow(2, first, end - first)

    def _look(self) -> None:
        self._k, self._v = self._rows.tensors(self._index)
        self._epoch = self._rows.epoch

    def forget(self) -> None:
        """Drop the tokens and the views of them."""
        super().forget()
        self._k = self._v = torch.empty(0)
        self._epoch = -1

    def _visible(self) -> Pair:
        if self._epoch != self._rows.epoch:
            self._look()
        first = self._first(self.length)
        num = self.length - first
        return self._k.narrow(2, first, num), self._v.narrow(2, first, num)
