"""The three transformers ``Cache`` classes, each over the rows of one kvalloc cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import transformers.cache_utils as hf
from transformers import PreTrainedConfig

from ..contract import Usage
from ..sequences import at_least_one, whole
from .backends import ContiguousRows, PagedRows, Pair, VmmRows
from .layers import DenseLayer, Layer
from .paged import ATTENTION, PagedLayer
from .refusals import row_numbers
from .rows import Rows
from .windows import cached_windows, layers_of

__all__ = ["ContiguousCache", "PagedCache", "VmmCache"]


class RowsCache(hf.Cache):  # type: ignore[misc]
    """A transformers ``Cache`` whose layers share the rows of one kvalloc cache.

    Made by ``from_config``. The rows grow in lock step, prompts padded on the left, as
    ``generate`` wants it; one cache serves several calls of ``generate``, one after the other.
    Shapes, dtype and device are those of the first tokens stored.
    """

    def __init__(
        self, rows: Rows | None = None, layers: Sequence[Any] = (), **options: object
    ) -> None:
        if not isinstance(rows, Rows) or options:  # called like one of transformers' own caches
            raise TypeError(
                f"make it with {type(self).__name__}.from_config(model.config, max_length=...)"
            )
        super().__init__(layers=list(layers))
        self._rows = rows
        self._storing: list[Layer] = [layer for layer in layers if isinstance(layer, Layer)]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> Pair:
        """Store new tokens of a layer; see the layers' own ``update``."""
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer {layer_idx} does not exist: the cache was made for a config of "
                f"{len(self.layers)} layers"
            )
        stored: Pair = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return stored

    def crop(self, tokens_to_remove: int) -> None:
        """Remove that many of the newest tokens, given as a negative number.

        What a positive number does is the installed transformers' affair: in 5.17 it is the
        length to keep, later an error.

        Raises
        ------
        ValueError
            A sliding window has let go of what the next token would have to see (call
            ``activate_past_recording`` before generating); nothing was changed.
        OutOfMemory
            The cut goes through pages that beams share, and there are none for copies; nothing
            was changed.
        DriverError
            ``VmmCache``: the cut could not be finished. ``get_seq_length`` tells whether the
            tokens are removed; their memory comes back with a later call.
        """
        length = self._length()
        keep = _kept(length, whole("tokens_to_remove", tokens_to_remove))
        self._rows.check_crop(keep)
        for layer in self._storing:  # first: no layer may look at what an error leaves half cut
            layer.length = max(0, layer.length - (length - keep))
        self._rows.crop(keep)

    def reset(self) -> None:
        """Forget all tokens; the memory stays for the next ones, in whatever batch size.

        Raises
        ------
        DriverError
            ``VmmCache``: the tokens are forgotten, and what they held goes with the next call.
        """
        for layer in self._storing:
            layer.forget()
        self._rows.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row ``i`` have the tokens that row ``beam_idx[i]`` has."""
        self._select(row_numbers("beam_idx", beam_idx).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, its copies beside it.

        Raises
        ------
        OutOfMemory
            No room for more rows; nothing was changed.
        """
        repeats = at_least_one("repeats", repeats)
        self._select([row for row in range(self._rows.num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (or a boolean mask) names, in that order.

        Raises
        ------
        OutOfMemory
            They are more than there were, and there is no room; nothing was changed.
        DriverError
            ``VmmCache``: if ``batch_size`` is the new one, the rows are selected, and what the
            others held goes with the next call; otherwise nothing was changed.
        """
        rows = torch.arange(self._rows.num_rows)
        chosen = row_numbers("indices", indices, mask=True)
        try:
            sources = rows[chosen].tolist()
        except IndexError:
            told = chosen.tolist()
            raise ValueError(f"a batch of {len(rows)} has no such rows: {told}") from None
        self._select(sources)

    def usage(self) -> Usage:
        """Where the bytes are, see ``contract.Usage``; ``RuntimeError`` before the first token."""
        self._rows.settle(self._length())
        return self._rows.kv.usage()

    def close(self) -> None:
        """Give all memory back; what is stored next takes it anew.

        Raises
        ------
        DriverError
            ``VmmCache``: tensors over its memory, from ``update``, are alive, or the driver
            failed; closing again goes on from there.
        """
        self.reset()
        self._rows.close()

    def __deepcopy__(self, _: object) -> Self:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied: crop back to a common prompt, or let rows "
            "share it with batch_repeat_interleave"
        )

    def _length(self) -> int:
        return max((layer.length for layer in self._storing), default=0)

    def _select(self, sources: list[int]) -> None:
        if self._rows.num_rows:
            self._rows.select(sources, self._length())


class VmmCache(RowsCache):
    """Grows without copying and without reserving: pages are mapped under the tokens.

    Every row has addresses for ``max_length`` tokens and memory for those that it stores.
    ``update`` returns views. Beams share pages; what fell out of a sliding window is unmapped.
    """

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        max_length: int,
        memory_bytes: int | None = None,
        page_bytes: int | None = None,
        layout: str | None = None,
    ) -> Self:
        """A cache for the layers of ``config``.

        Parameters
        ----------
        config
            ``model.config``: tells layers and their sliding windows.
        max_length
            Most tokens of a row; costs addresses, no memory.
        memory_bytes
            Most memory for all rows; None: what the first batch could need at most.
        page_bytes
            Size of a page; None: 64 KiB on the CPU (more where that could use up the mappings
            that a process may have), 2 MiB on a GPU.
        layout
            ``"head-major"``, ``"token-major"`` or ``"interleaved"``; None: what reads faster on
            the device.

        Raises
        ------
        TypeError, ValueError
            Sizes that are none, an unknown layout, or layers that have no K and V of every token;
            the message names the remedy.
        """
        rows = VmmRows(cached_windows(config), max_length, memory_bytes, page_bytes, layout)
        return cls(rows, layers_of(config, lambda i, window: DenseLayer(rows, i, window)))


class ContiguousCache(RowsCache):
    """Reserves ``max_length`` tokens a row from the start, as ``StaticCache`` does.

    ``update`` returns views of what is stored, so attention reads no further than that. Beams
    are copied.
    """

    @classmethod
    def from_config(
        cls, config: PreTrainedConfig, *, max_length: int, memory_bytes: int | None = None
    ) -> Self:
        """A cache for the layers of ``config``.

        Parameters
        ----------
        config
            As for ``VmmCache``.
        max_length
            Most tokens of a row; here it costs memory.
        memory_bytes
            Size of the arena; None: ``max_length`` tokens for each row of the first batch. More
            rows than that (``batch_repeat_interleave``) need it given.
        """
        rows = ContiguousRows(cached_windows(config), max_length, memory_bytes)
        return cls(rows, layers_of(config, lambda i, window: DenseLayer(rows, i, window)))


class PagedCache(RowsCache):
    """Tokens in small pages anywhere, read through block tables.

    Load the model with ``attn_implementation="kvalloc_paged"`` (or call
    ``model.set_attn_implementation``): then the paged kernel reads the pages where they are.
    With any other attention, or a model that bypasses transformers' attention interface (Falcon),
    every ``update`` copies all stored tokens of its layer together: as slow as ``DynamicCache``,
    with the memory of the copy on top.

    Beams share pages; pages that fell out of a sliding window are given back.
    """

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig,
        *,
        max_length: int,
        memory_bytes: int | None = None,
        page_size: int = 16,
    ) -> Self:
        """A cache for the layers of ``config``.

        Parameters
        ----------
        config
            As for ``VmmCache``. The attention implementation is looked up at every update.
        max_length
            Most tokens of a row.
        memory_bytes
            Size of the pool; None: ``max_length`` tokens for each row of the first batch.
        page_size
            Tokens per page.
        """
        rows = PagedRows(cached_windows(config), max_length, memory_bytes, page_size)
        text = config.get_text_config(decoder=True)

        def reads_pages() -> bool:
            return bool(text._attn_implementation == ATTENTION)

        return cls(rows, layers_of(config, lambda i, w: PagedLayer(rows, i, w, reads_pages)))


def _kept(length: int, tokens_to_remove: int) -> int:
    """Tokens that the installed transformers keeps of ``length``."""
    if tokens_to_remove <= 0:
        return max(0, length + tokens_to_remove)
    layer = hf.DynamicLayer()
    layer.update(torch.empty(1, 1, length, 1), torch.empty(1, 1, length, 1))
    layer.crop(tokens_to_remove)
    return int(layer.get_seq_length())
