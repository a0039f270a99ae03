"""The words that every backend, kernel and experiment speaks.

The contract counts *sequences* and *tokens*, never pages, so that a backend
without pages can keep it. What differs between backends is only the view that
they hand to the attention kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    import torch

    from .geometry import KVGeometry

Seq = Hashable
"""The caller's name of a sequence: any hashable value, unique among the live ones."""

Run = tuple[int | str | bytes, int]
"""``(key, num_tokens)`` with at least one token: equal keys mean equal tokens."""

Prefix = Sequence[Run]
"""What a prompt begins with: equal leading runs mean equal leading tokens, whatever the page
size. Token ids are runs of 1; Mooncake's ids are runs of 512 and a shorter last one."""


class OutOfMemory(Exception):
    """A refusal: nothing was changed, a later attempt may succeed.

    Attributes
    ----------
    needed, free, largest_free : int
        What would be taken, what is free, and the largest free interval, in ``unit``.
    unit : str
        ``"tokens"`` (contiguous) or ``"pages"`` (paged, vmm).
    blocked : bool
        Growth in place met an occupied neighbour (relocation is not allowed).
    """

    def __init__(
        self,
        needed: int,
        free: int,
        largest_free: int,
        *,
        unit: str = "tokens",
        blocked: bool = False,
    ) -> None:
        self.needed = needed
        self.free = free
        self.largest_free = largest_free
        self.unit = unit
        self.blocked = blocked
        reason = (
            "the neighbour is occupied" if blocked else f"the largest free run is {largest_free}"
        )
        super().__init__(f"{needed} {unit} needed, {free} free, {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_refusal, (
            self.needed,
            self.free,
            self.largest_free,
            self.unit,
            self.blocked,
        )

    @property
    def fragmented(self) -> bool:
        """Enough is free, but not where it is needed."""
        return self.free >= self.needed


def _rebuild_refusal(
    needed: int, free: int, largest_free: int, unit: str, blocked: bool
) -> OutOfMemory:
    return OutOfMemory(needed, free, largest_free, unit=unit, blocked=blocked)


class NeverFits(ValueError):
    """The request is larger than the whole memory or beyond the model's limit.

    Told at once, so that it cannot wait at the head of a queue for ever.
    """


class Usage(NamedTuple):
    """Where the bytes are. One token is one byte where there is no geometry.

    ``reserved + free == capacity`` and ``live + reservation + tail == reserved``, always.
    """

    capacity: int
    """Bytes under management: whole pages (or whole tokens)."""
    live: int
    """Bytes of stored tokens; a token shared by several sequences counts once."""
    reserved: int
    """Bytes that live sequences hold."""
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


@dataclass(frozen=True, slots=True)
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
    """

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
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
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor


class Allocator(ABC):
    """Decides where the tokens of each sequence live. Bookkeeping only, no tensors.

    Misuse raises and changes nothing: ``KeyError`` for a sequence that is unknown (or
    was released already), ``ValueError`` for a duplicate, a negative or an oversized count.

    A sequence that is in host memory (``offload``) keeps its name: every verb but ``length``,
    ``restore`` and ``release`` raises ``ValueError`` for it.
    """

    geometry: KVGeometry
    limit: int | None
    """Most tokens that one sequence may have (the model's context limit), or None."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Most tokens that the memory can hold for one sequence: whole pages, rounded down."""

    @abstractmethod
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
        """Place a prompt of ``tokens`` tokens.

        Parameters
        ----------
        seq
            A name that no live sequence has.
        tokens
            Prompt length, at least 0.
        max_new
            The most tokens that the request may generate; reserving policies need it.
        expected_new
            The true output length, known only to a replay (policies ``pow2``, ``oracle``).
        headroom
            Refuse unless the sequence could at once grow by this many tokens where it is
            placed. They are not taken. A scheduler that preempts asks for 1, so that what it
            admits is not preempted again before it produced anything.
        prefix
            What the prompt is or begins with, as runs ``(key, num_tokens)``. Full units (the
            tokens of a page, or of as many pages as end with a whole token) that an earlier
            prompt brought are shared, the other full ones are entered for later prompts: write
            the prompt before releasing the sequence. The contiguous backend shares nothing.
        salt
            Prompts with different salts never share.

        Returns
        -------
        int
            Leading tokens that are in memory already: neither to be computed nor written. At
            least one token of a prompt is left to compute, since its output is the next token.

        Raises
        ------
        OutOfMemory
            Refused for now; nothing changed.
        NeverFits
            Larger than the whole memory or than ``limit``.
        TypeError, ValueError
            Also a key or salt that is no int, str or bytes, or a prefix longer than the prompt.
        """

    @abstractmethod
    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        """Append room for ``tokens`` tokens to each sequence, in the given order.

        Each sequence is served whole or refused and left unchanged; the others are served
        all the same. With ``stop_at_refusal`` nothing after the first refused sequence is
        served, so that a scheduler can make room and go on from there.

        Returns
        -------
        dict
            The refused sequences and why, in order. Empty in the common case.

        Raises
        ------
        KeyError, ValueError
            Before anything is changed: unknown or repeated sequence, negative count, or
            ``NeverFits`` if a sequence would pass ``limit``.
        """

    @abstractmethod
    def release(self, seq: Seq) -> None:
        """Forget a sequence, offloaded or not, and free what it alone holds."""

    @abstractmethod
    def fork(self, parent: Seq, child: Seq) -> None:
        """Give ``child`` the tokens of ``parent``.

        What is written to one of them later is never seen in the other. paged and vmm share full
        pages and copy the tail; contiguous copies everything, and reserves as much again.

        Raises
        ------
        OutOfMemory
            No room for what has to be copied; nothing changed.
        """

    @abstractmethod
    def truncate(self, seq: Seq, tokens: int) -> None:
        """Keep the first ``tokens`` tokens.

        Raises
        ------
        ValueError
            The sequence has fewer, or a sliding window has let go of tokens that the next one
            would have to see.
        OutOfMemory
            The cut goes through a page that others read as well, and there is none for a copy;
            nothing changed.
        """

    @abstractmethod
    def offload(self, seq: Seq) -> None:
        """Move a sequence to host memory.

        It keeps its name and length; what it alone held becomes free.
        """

    @abstractmethod
    def restore(self, seq: Seq, *, headroom: int = 0) -> None:
        """Bring an offloaded sequence back, its tokens unchanged, perhaps to another place.

        Parameters
        ----------
        headroom
            As in ``admit``.

        Raises
        ------
        OutOfMemory
            Refused for now; the sequence is still offloaded and nothing changed.
        ValueError
            The sequence is not offloaded, or ``NeverFits``: with ``headroom`` it is larger than
            the whole memory or than ``limit``.
        """

    @abstractmethod
    def length(self, seq: Seq) -> int:
        """Tokens of a sequence, offloaded or not."""

    @abstractmethod
    def spans(self, seq: Seq) -> list[tuple[int, int]]:
        """Physical byte intervals ``[start, stop)`` that a sequence holds, in token order."""

    @abstractmethod
    def usage(self) -> Usage:
        """The books, in O(1)."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if the books do not balance. O(memory); for tests."""


class KVCache(Allocator):
    """An allocator with tensors behind it."""

    device: torch.device

    @abstractmethod
    def write(
        self,
        layer: int,
        seqs: Sequence[Seq],
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lens: Sequence[int] | None = None,
    ) -> None:
        """Store the newest tokens of each sequence.

        Parameters
        ----------
        layer
            Layer index, from 0.
        seqs
            Sequences whose room was made by ``admit`` or ``grow`` before.
        k, v
            ``[sum(lens), H_kv, D]``, packed in the order of ``seqs``, dtype and device of
            the cache.
        lens
            How many of the newest tokens of each sequence are given; None means one each.
        """

    @abstractmethod
    def view(self, layer: int, seqs: Sequence[Seq]) -> DenseView | PagedView:
        """What ``attend`` needs to read one layer of ``seqs``.

        Valid until the next verb that places, moves or frees tokens: any but ``write``, ``view``
        and those that only tell.
        """

    @abstractmethod
    def close(self) -> None:
        """Return all memory. Closing twice is harmless; any other use afterwards raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
