"""What a cache hands to a kernel: where the tokens of a batch are, in one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch


MOST_SHOWN = 8
"""Sequences whose numbers ``repr`` shows."""


# Comparing and printing the fields would read the whole buffer, of which much may be unmapped.
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DenseView:
    """One layer of a batch, each sequence at consecutive addresses of one big buffer.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[T, H_kv, D]``, any strides with a contiguous last dimension. Token ``j`` of
        sequence ``i`` is row ``starts[i] + j``. Rows outside ``[starts, starts + lengths)``
        may be unmapped: touching them can kill the process.
    starts : torch.Tensor
        int64 ``[S]``.
    lengths : torch.Tensor
        int32 ``[S]``: readable tokens. After a sliding window dropped leading tokens,
        ``starts`` is advanced and ``lengths`` shortened.
    window : int | None
        The layer's sliding window, which ``attend`` holds to; None: none.
    longest : int | None
        The largest of ``lengths``, so that a kernel on a GPU need not wait to learn it; None:
        it has to look.
    """

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    window: int | None = None
    longest: int | None = None

    def __repr__(self) -> str:
        return _shown(self)

    def __reduce__(self) -> NoReturn:  # pickle and deepcopy read the whole buffer, too
        raise TypeError(
            "a view of a cache can be neither pickled nor copied, since its buffer may be "
            "unmapped: copy the rows [starts, starts + lengths) of k and v"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PagedView:
    """One layer of a batch, each sequence scattered over pages.

    Attributes
    ----------
    k, v : torch.Tensor
        ``[num_pages, page_size, H_kv, D]``, any strides with a contiguous last dimension.
        Token ``t`` of sequence ``i`` is ``k[block_table[i, t // B], t % B]``.
    block_table : torch.Tensor
        int32 ``[S, max_pages]``. Entries that hold no token of ``[first, lengths)`` are
        undefined and never to be read.
    first : torch.Tensor
        int32 ``[S]``: the first token still stored (a sliding window may have dropped
        leading pages).
    lengths : torch.Tensor
        int32 ``[S]``: tokens of the sequence, dropped ones included; tokens
        ``first <= t < lengths`` are readable.
    window : int | None
        The layer's sliding window, which ``attend`` holds to; None: none.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    window: int | None = None

    def __repr__(self) -> str:
        return _shown(self)


def _shown(view: DenseView | PagedView) -> str:
    """A view in one line that reads no key or value."""
    told = (f"{field.name}={_told(getattr(view, field.name))}" for field in fields(view))
    return f"{type(view).__name__}({', '.join(told)})"


def _told(value: Any) -> str:
    """The numbers of a batch; of tensors with more dimensions the shape, and where they are."""
    if not hasattr(value, "shape"):
        return repr(value)
    if value.ndim != 1 or value.is_floating_point() or value.device.type != "cpu":
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}>"
    numbers = ", ".join(map(str, value[:MOST_SHOWN].tolist()))
    rest = len(value) - MOST_SHOWN
    return f"[{numbers}, and {rest} more]" if rest > 0 else f"[{numbers}]"
