"""The contiguous allocator with an arena of tensors behind its books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..contract import DenseView, KVCache, Seq
from ..geometry import KVGeometry
from ..sequences import Ints, flag
from ..tensors import (
    BatchMemo,
    check_device,
    check_layer,
    check_lens,
    check_tensors,
    default_layout,
    host_memory,
    made,
    newest,
    on_device,
    seal,
    torch_dtype,
)
from .allocator import ContiguousAllocator

SLICE_TOKENS = 16
"""From this many tokens per sequence on, one slice copy per sequence beats one indexed write.

Measured on a CPU with 8 heads × 128: 16 tokens take 5 µs as a slice and 13 µs by index; one token
for each of 128 sequences takes 40–90 µs by index and 400–700 µs as slices.
"""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the packed tokens of one write go, in every layer alike."""

    num_tokens: int
    index: torch.Tensor | None
    """int64 ``[num_tokens]``, the slot of each token; None for slices."""
    slices: list[tuple[slice, slice]]
    """Per sequence its slots and its packed tokens; empty where ``index`` is used."""


class ContiguousKVCache(ContiguousAllocator, KVCache):
    """One arena tensor per layer for K and one for V, addressed by slot.

    What is not told here is as for ``ContiguousAllocator``.

    Parameters
    ----------
    memory_bytes
        Size of the arenas of all layers together.
    device
        Where the tensors live, a torch device or its name. On a CPU the system commits the
        memory page by page, when it is first written.
    layout
        How an arena lies in memory; kernels see ``[T, H_kv, D]`` either way, by strides.

        - ``"token-major"``: ``[T, H_kv, D]``;
        - ``"head-major"``: ``[H_kv, T, D]``, so that the rows which one head reads are adjacent,
          which a CPU's prefetcher needs. The price is a write per head: one token for each of
          128 sequences of 8 heads × 64 takes 0.7 ms per layer with cold pages, not 0.08.

        None takes head-major on a CPU and token-major elsewhere.
    scrub
        Overwrite tokens with zeros when their sequence gives them up, so that slots which hold
        no token are zero at any time.

    Raises
    ------
    ValueError
        Also for a geometry that stores latents (MLA), which is accounting only, and for a device
        that is not there.
    MemoryError
        The tensors cannot be made.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        memory_bytes: int,
        *,
        policy: str = "max",
        placement: str = "first-fit",
        limit: int | None = None,
        device: torch.device | str = "cpu",
        layout: str | None = None,
        scrub: bool = False,
    ) -> None:
        super().__init__(geometry, memory_bytes, policy=policy, placement=placement, limit=limit)
        dtype = torch_dtype(geometry)
        where = check_device(device)
        self.layout = default_layout(where, layout)
        self.scrub = flag("scrub", scrub)
        self._layers = [
            (self._new_arena(i, dtype, where), self._new_arena(i, dtype, where))
            for i in range(len(geometry.layers))
        ]
        # As tensors spell it: with an index, where the kind of device has one.
        self.device = self._layers[0][0].device
        self._destination: BatchMemo[Destination] = BatchMemo()
        self._place: BatchMemo[tuple[torch.Tensor, torch.Tensor, int]] = BatchMemo()

    def _new_arena(self, layer: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One ``[T, H_kv, D]`` tensor in the cache's layout, uninitialised unless scrubbed."""
        shape = self.geometry.layers[layer]
        heads, tokens, dim = shape.kv_heads, self._num_slots, shape.head_dim
        make = torch.zeros if self.scrub else torch.empty
        if self.layout == "token-major":
            return made(make, tokens, heads, dim, dtype=dtype, device=device)
        return made(make, heads, tokens, dim, dtype=dtype, device=device).transpose(0, 1)

    def write(
        self,
        layer: int,
        seqs: Sequence[Seq],
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lens: Sequence[int] | None = None,
    ) -> None:
        """Store the newest tokens at their slots; see ``KVCache.write``.

        ``k`` and ``v`` are ``[sum(lens), H_kv, D]``, packed in the order of ``seqs``.
        """
        to = self._destination.get(
            self._version, seqs, lens, lambda: self._destination_of(seqs, lens)
        )
        check_tensors(self.geometry, layer, k, v, to.num_tokens, self.device)
        for arena, given in zip(self._layers[layer], (k.detach(), v.detach()), strict=True):
            if to.index is not None:
                arena[to.index] = given
            for slots, tokens in to.slices:
                arena[slots] = given[tokens]

    def _destination_of(self, seqs: Sequence[Seq], lens: Sequence[int] | None) -> Destination:
        rows = self._seqs.rows(seqs)
        start, length = self._start[rows], self._length[rows]
        counts = check_lens(seqs, length, lens, self._seqs.sealed[rows])
        num_tokens = int(counts.sum())
        if num_tokens < SLICE_TOKENS * len(rows):
            owner, position = newest(length, counts)
            index = on_device(start[owner] + position, self.device)
            return Destination(num_tokens, index, [])
        return Destination(num_tokens, None, _slices(start + length, counts))

    def view(self, layer: int, seqs: Sequence[Seq]) -> DenseView:
        """The whole arena of a layer and where each sequence lies in it; nothing is copied.

        A layer with a sliding window shows the sequence from its first token on, too: contiguous
        intervals cannot let go of the tokens that fell out of the window.
        """
        k, v = self._layers[check_layer(self.geometry, layer)]
        starts, lengths, longest = self._place.get(
            self._version, seqs, None, lambda: self._place_of(seqs)
        )
        return DenseView(k, v, starts, lengths, self.geometry.layers[layer].window, longest)

    def _place_of(self, seqs: Sequence[Seq]) -> tuple[torch.Tensor, torch.Tensor, int]:
        rows = self._seqs.rows(seqs)
        lengths = self._length[rows].astype("int32")
        starts = on_device(self._start[rows], self.device)
        return starts, on_device(lengths, self.device), int(lengths.max(initial=0))

    # ------------------------------------------------------------------ contents of slots

    def _arenas(self) -> list[torch.Tensor]:
        return [arena for pair in self._layers for arena in pair]

    def _copy(self, source: int, start: int, length: int) -> None:
        for arena in self._arenas():
            arena[start : start + length] = arena[source : source + length]

    def _read(self, start: int, length: int) -> list[torch.Tensor]:
        with host_memory():
            return [arena[start : start + length].to("cpu", copy=True) for arena in self._arenas()]

    def _write_back(self, start: int, length: int, contents: list[torch.Tensor]) -> None:
        for arena, saved in zip(self._arenas(), contents, strict=True):
            arena[start : start + length] = saved.to(self.device)

    def _scrub(self, start: int, stop: int) -> None:
        if self.scrub:
            for arena in self._arenas():
                arena[start:stop] = 0

    def close(self) -> None:
        """Return all memory; any verb but ``close`` raises afterwards."""
        self._layers.clear()
        self._seqs.away.clear()
        self._destination.clear()
        self._place.clear()
        seal(self)


def _slices(ends: Ints, counts: Ints) -> list[tuple[slice, slice]]:
    """Per sequence the slots of its newest tokens, which end at ``ends``, and the packed rows."""
    packed = counts.cumsum()
    edges = zip(ends.tolist(), packed.tolist(), counts.tolist(), strict=True)
    return [(slice(end - n, end), slice(last - n, last)) for end, last, n in edges if n]
