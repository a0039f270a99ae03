"""The words that every backend, kernel and experiment speaks.

The contract counts *sequences* and *tokens*, never pages, so that a backend
without pages can keep it. What differs between backends is only the view that
they hand to the attention kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from .refusals import NeverFits, OutOfMemory
from .usage import Usage
from .views import DenseView, PagedView

if TYPE_CHECKING:
    import torch

    from .geometry import KVGeometry

__all__ = [
    "Allocator",
    "DenseView",
    "KVCache",
    "NeverFits",
    "OutOfMemory",
    "PagedView",
    "Prefix",
    "Run",
    "Seq",
    "Usage",
]

Seq = Hashable
"""The caller's name of a sequence: any hashable value, unique among the live ones."""

Run = tuple[int | str | bytes, int]
"""``(key, num_tokens)`` with at least one token: equal keys mean equal tokens."""

Prefix = Sequence[Run]
"""What a prompt begins with: equal leading runs mean equal leading tokens, whatever the page
size. Token ids are runs of 1; Mooncake's ids are runs of 512 and a shorter last one."""


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
        """Most tokens that the memory can hold for one sequence: whole pages, rounded down.

        Of the whole memory, whoever holds it now: what is beyond this ``NeverFits``.
        """

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

        A prompt that is computed in chunks is admitted with its first one and grows by each
        further one, once the one before is written (``KVCache.write``).

        Parameters
        ----------
        seq
            A name that no live sequence has.
        tokens
            Prompt length, at least 0; of a prompt in chunks, that of the first one.
        max_new
            The most tokens that the request may generate; reserving policies need it. What is
            left of a prompt in chunks is to be counted here, and in ``expected_new``.
        expected_new
            The true output length, known only to a replay (policies ``pow2``, ``oracle``).
        headroom
            Refuse unless the sequence could at once grow by this many tokens where it is
            placed. They are not taken. A scheduler that preempts asks for 1, so that what it
            admits is not preempted again before it produced anything.
        prefix
            What the prompt is or begins with, as runs ``(key, num_tokens)``. Full units (the
            tokens of a page, or of as many pages as end with a whole token) that an earlier
            prompt brought are shared, the other full ones are entered for later prompts at once:
            write prompts in the order of their admission (or in one packed batch), and before
            releasing the sequence. It reaches no further than ``tokens``, and what a sequence
            grows by is never entered. The contiguous backend shares nothing.
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

        What is written to one of them later is never seen in the other. What is there at the fork
        belongs to both, and ``write`` refuses it from then on, in either: write it before forking;
        ``truncate`` and ``grow`` make room to write it anew. paged and vmm share full pages and
        copy the tail; contiguous copies everything, and reserves as much again.

        Raises
        ------
        OutOfMemory
            No room for what has to be copied; nothing changed.
        """

    @abstractmethod
    def truncate(self, seq: Seq, tokens: int) -> None:
        """Keep the first ``tokens`` tokens.

        After a sliding window the *next* token still sees all that it may; the last one kept
        may not, so compute it again only from a longer cut.

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

        Raises
        ------
        MemoryError
            A cache, and the host has no memory for the tokens; nothing changed.
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

        The *newest* tokens, so a prompt in chunks is written like this: ``admit`` the first chunk,
        write it, ``grow`` by the next, write that. With the whole prompt admitted, the first chunk
        would be stored at its end.

        A write reaches only what came after the last fork and behind the prefix hits, and what the
        layer still stores: on a layer with a sliding window write before the next ``grow``.

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

        Raises
        ------
        KeyError, TypeError, ValueError
            Before anything is written: also more tokens than a write may reach.
        """

    @abstractmethod
    def view(self, layer: int, seqs: Sequence[Seq]) -> DenseView | PagedView:
        """What ``attend`` needs to read one layer of ``seqs``, the layer's window included.

        Valid until the next verb that places, moves or frees tokens: any but ``write``, ``view``
        and those that only tell.
        """

    @abstractmethod
    def close(self) -> None:
        """Return all memory. Closing twice is harmless; any other verb afterwards raises.

        A mapped cache refuses (``DriverError``) while tensors from ``view`` are alive, since
        they would look at memory that is gone: drop them first.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
