"""What the tokens of a state machine look like in memory, and how they are read back.

A token is a number, ``writer · 1024 + position``: every write of every sequence has a writer of
its own. So the number tells lineage and position, and a token in the wrong place, a page that a
sharer wrote, or what another sequence left behind is seen as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvalloc.contract import Allocator, DenseView, KVCache, PagedView
from kvalloc.kernels.attention import attend

POSITIONS = 1024
DIGITS = 4  # to the base of 127, exact in every dtype down to float16 and bfloat16
Ints = NDArray[np.int64]


class Lost(AssertionError):
    """A token is not where it was written, or not as it was written."""


class Store(Protocol):
    """Where a machine's tokens are."""

    def write(self, seqs: list[int], lens: list[int], tokens: dict[int, list[int]]) -> None:
        """Store the newest tokens of each sequence."""
        ...

    def settle(self, seqs: Sequence[int], tokens: dict[int, list[int]]) -> None:
        """The allocator moved or copied these: books without tensors have to be followed."""
        ...

    def read_back(self, seqs: list[int], tokens: dict[int, list[int]], cut: set[int]) -> int:
        """Compare every stored token with the model; returns how many. ``Lost`` if one differs.

        After a cut a window is kept for the next token, not for the last one of ``cut``.
        """
        ...


def ranges(starts: Ints, counts: Ints) -> Ints:
    """``starts[i] … starts[i] + counts[i] − 1`` for each ``i``, one after the other."""
    shift = starts - (np.cumsum(counts) - counts)
    packed: Ints = np.arange(counts.sum()) + np.repeat(shift, counts)
    return packed


def stored(view: DenseView | PagedView, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """First readable position of the i-th sequence (−1: of a dense view, which does not tell)."""
    counts, k, v = readable(view)
    begin = int(counts[:i].sum())
    span = slice(begin, begin + int(counts[i]))
    return -1 if isinstance(view, DenseView) else int(view.first[i]), k[span], v[span]


def readable(view: DenseView | PagedView) -> tuple[Ints, torch.Tensor, torch.Tensor]:
    """How many tokens of each sequence a view shows, and all their K and V, packed."""
    lengths: Ints = view.lengths.numpy().astype(np.int64)
    if isinstance(view, DenseView):
        at = torch.from_numpy(ranges(view.starts.numpy(), lengths))
        return lengths, view.k[at], view.v[at]
    first: Ints = view.first.numpy().astype(np.int64)
    counts = lengths - first
    position = ranges(first, counts)
    owner, size = np.repeat(np.arange(len(counts)), counts), view.k.shape[1]
    page = view.block_table.numpy()[owner, position // size].astype(np.int64)
    at, offset = torch.from_numpy(page), torch.from_numpy(position % size)
    return counts, view.k[at, offset], view.v[at, offset]


class Tensors:
    """The tensors of a cache: written by ``write``, read through ``view`` and ``attend``."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.dtype: torch.dtype = getattr(torch, cache.geometry.dtype)

    def vectors(self, layer: int, contents: Sequence[int] | Ints) -> torch.Tensor:
        """K of some tokens in one head, ``[n, 1, D]``: digits, the last one plus the layer, zeros.

        V is one more.
        """
        n = np.asarray(contents, np.int64)
        k = np.zeros((len(n), 1, self.cache.geometry.layers[layer].head_dim), np.float32)
        for digit in range(DIGITS):
            k[:, 0, digit] = n // 127**digit % 127
        k[:, 0, DIGITS - 1] = (k[:, 0, DIGITS - 1] + layer) % 127
        return torch.from_numpy(k).to(self.dtype)

    def write(self, seqs: list[int], lens: list[int], tokens: dict[int, list[int]]) -> None:
        contents = [c for s, n in zip(seqs, lens, strict=True) if n for c in tokens[s][-n:]]
        for layer in range(len(self.cache.geometry.layers)):
            self.write_layer(layer, seqs, lens, contents)

    def write_layer(
        self, layer: int, seqs: list[int], lens: list[int], contents: Sequence[int]
    ) -> None:
        k = self.vectors(layer, contents)
        k = k.expand(-1, self.cache.geometry.layers[layer].kv_heads, -1)
        self.cache.write(layer, seqs, k, k + 1, lens=lens)

    def first_stored(self, seq: int) -> list[int]:
        """By layer, the first token of a sequence that is stored still."""
        length = self.cache.length(seq)
        views = [self.cache.view(layer, [seq]) for layer in range(len(self.cache.geometry.layers))]
        return [length - int(readable(view)[0][0]) for view in views]

    def settle(self, seqs: Sequence[int], tokens: dict[int, list[int]]) -> None:
        """The cache moves its contents itself."""

    def read_back(self, seqs: list[int], tokens: dict[int, list[int]], cut: set[int]) -> int:
        contents = np.array([c for seq in seqs for c in tokens[seq]], np.int64)
        lengths = np.array([len(tokens[seq]) for seq in seqs], np.int64)
        after_cut = np.array([seq in cut for seq in seqs], np.int64)
        num_read = 0
        for layer, shape in enumerate(self.cache.geometry.layers):
            counts, k, v = readable(self.cache.view(layer, seqs))
            needed = lengths
            if shape.window is not None:
                needed = np.minimum(lengths, shape.window - after_cut)
            if not ((needed <= counts) & (counts <= lengths)).all():
                raise Lost(f"layer {layer} shows {counts} tokens of {lengths}")
            expected = self.vectors(layer, contents[ranges(lengths.cumsum() - counts, counts)])
            if not bool((k == expected).all()) or not bool((v == expected + 1).all()):
                raise Lost(f"layer {layer}: {_first_wrong(k, expected)}")
            num_read += len(k)
        return num_read

    def attend(self, seqs: list[int], tokens: dict[int, list[int]]) -> None:
        """Attention of the newest token of each sequence is what the model's tokens give."""
        layers = self.cache.geometry.layers
        layer = sum(len(tokens[seq]) for seq in seqs) % len(layers)
        shape, heads = layers[layer], self.cache.geometry.q_heads
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.05
        q = torch.linspace(-0.1, 0.1, len(seqs) * heads * shape.head_dim, dtype=self.dtype)
        q = q.view(len(seqs), heads, shape.head_dim)
        got = attend(q, self.cache.view(layer, seqs))
        for i, seq in enumerate(seqs):
            k = self.vectors(layer, tokens[seq][-(shape.window or POSITIONS) :])[:, 0].double()
            weights = (q[i].double() @ k.T * shape.head_dim**-0.5).softmax(-1)
            expected = weights @ (k + 1)
            torch.testing.assert_close(got[i].double(), expected, rtol=tolerance, atol=tolerance)


def _first_wrong(k: torch.Tensor, expected: torch.Tensor) -> str:
    wrong = (k != expected).any(-1).any(-1).nonzero()
    if not len(wrong):
        return "K is right, V is not"
    at = int(wrong[0])
    return f"{len(wrong)} of {len(k)} tokens, the first {k[at, 0].tolist()}, not {expected[at, 0]}"


class Shadow:
    """What lies where, if an allocator without tensors had some: one number for each slot.

    Slots are those that ``spans`` names, so two sequences on one slot overwrite each other here
    as they would in memory.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.token_bytes = allocator.geometry.bytes_per_token
        self.memory = np.full(allocator.usage().capacity // self.token_bytes + 1, -1, np.int64)

    def slots(self, seq: int, length: int) -> tuple[int, Ints]:
        """First position that is still held, and the slots from there on."""
        spans = np.array(self.allocator.spans(seq), np.int64).reshape(-1, 2) // self.token_bytes
        held = ranges(spans[:, 0], spans[:, 1] - spans[:, 0])
        page = getattr(self.allocator, "page_bytes", 0) // self.token_bytes
        # Pages that fell out of a window lead: the last one held is the last one of all.
        first = -(-length // page) * page - len(held) if page else 0
        return first, held[: length - first]

    def write(self, seqs: list[int], lens: list[int], tokens: dict[int, list[int]]) -> None:
        for seq, n in zip(seqs, lens, strict=True):
            if n:
                _, slots = self.slots(seq, len(tokens[seq]))
                n = min(n, len(slots))  # a long growth leaves pages behind at once
                self.memory[slots[len(slots) - n :]] = tokens[seq][len(tokens[seq]) - n :]

    def settle(self, seqs: Sequence[int], tokens: dict[int, list[int]]) -> None:
        held: dict[int, set[int]] = {
            seq: set(self.slots(seq, len(content))[1].tolist()) for seq, content in tokens.items()
        }
        for seq in seqs:
            others = set().union(*(slots for other, slots in held.items() if other != seq))
            first, slots = self.slots(seq, len(tokens[seq]))
            for position, slot in enumerate(slots.tolist(), first):
                if slot not in others:
                    self.memory[slot] = tokens[seq][position]

    def read_back(self, seqs: list[int], tokens: dict[int, list[int]], cut: set[int]) -> int:
        windows = [shape.window for shape in self.allocator.geometry.layers]
        needed = POSITIONS if None in windows else max(window or 0 for window in windows)
        num_read = 0
        for seq in seqs:
            content = tokens[seq]
            first, slots = self.slots(seq, len(content))
            if first > max(len(content) - needed + (seq in cut), 0):
                raise Lost(f"sequence {seq}: position {first} is the first that is left")
            if not np.array_equal(self.memory[slots], content[first:]):
                raise Lost(f"sequence {seq} holds {self.memory[slots]}, not {content[first:]}")
            num_read += len(slots)
        return num_read

    def attend(self, seqs: list[int], tokens: dict[int, list[int]]) -> None:
        """There is nothing to attend to."""
