"""A random walk over a cache's verbs beside a dictionary model; every stored token is read back.

Each token's K and V carry numbers that name its layer and content, so that a token in the wrong
place, a shared page written by one of its holders, or another sequence's remains are seen.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import torch

from kvalloc.contract import DenseView, KVCache, NeverFits, OutOfMemory, PagedView, Usage

TOPICS = 3  # prompts begin with one of so many common beginnings


def stored(view: DenseView | PagedView, i: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """First readable position of the i-th sequence, and its K and V from there on."""
    if isinstance(view, DenseView):
        start, length = int(view.starts[i]), int(view.lengths[i])
        return -1, view.k[start : start + length], view.v[start : start + length]
    first, length = int(view.first[i]), int(view.lengths[i])
    position = torch.arange(first, length)
    page = view.block_table[i].long()[position // view.k.shape[1]]
    offset = position % view.k.shape[1]
    return first, view.k[page, offset], view.v[page, offset]


class Walk:
    """One cache, one model, one seed."""

    def __init__(self, cache: KVCache, seed: int, *, max_prompt: int = 90) -> None:
        self.cache = cache
        self.random = random.Random(seed)
        self.max_prompt = max_prompt
        self.tokens: dict[int, list[int]] = {}  # content of each token of each sequence
        self.away: dict[int, list[int]] = {}
        self.cut: set[int] = set()  # truncated since their last token: that one may see less
        self.next_seq = 0
        self.done = Counter[str]()
        self.num_hits = 0

    # What a token's content looks like in memory: exact in every dtype.
    def vectors(self, layer: int, contents: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.cache.geometry.layers[layer]
        dtype = getattr(torch, self.cache.geometry.dtype)
        n = torch.tensor(contents, dtype=torch.int64)
        rows = torch.stack([n % 127, n // 127 % 127, n // 127**2 % 127, n * 0 + layer], 1)
        k = torch.zeros(len(contents), shape.kv_heads, shape.head_dim, dtype=dtype)
        k[:, :, :4] = rows[:, None].to(dtype)
        return k, k + 1

    def fresh(self) -> int:
        self.next_seq += 1
        return self.next_seq

    def write(self, seqs: list[int], lens: list[int] | None) -> None:
        counts = lens or [1] * len(seqs)
        contents = [c for s, n in zip(seqs, counts, strict=True) for c in self.tokens[s][-n:] if n]
        for layer in range(len(self.cache.geometry.layers)):
            self.cache.write(layer, seqs, *self.vectors(layer, contents), lens=lens)

    # ------------------------------------------------------------------ verbs

    def admit(self) -> None:
        n, seq = self.random.randint(0, self.max_prompt), self.fresh()
        topic, common = self.random.randrange(TOPICS), self.random.randint(0, n)
        contents = [topic * 1000 + i for i in range(common)]
        contents += [self.random.randrange(10**6) for _ in range(n - common)]
        options: dict[str, Any] = {"max_new": 20, "expected_new": 10}
        if self.random.random() < 0.6:
            options["prefix"] = [(c, 1) for c in contents]
        before = self.cache.usage()
        try:
            cached = self.cache.admit(seq, n, **options)
        except (OutOfMemory, NeverFits):
            assert self.cache.usage() == before
            self.done["admit refused"] += 1
            return
        assert cached == 0 or cached < n
        self.num_hits += cached
        self.tokens[seq] = contents
        self.write([seq], [n - cached])
        self.done["admit"] += 1

    def grow(self) -> None:
        seqs = self.random.sample(sorted(self.tokens), self.random.randint(1, len(self.tokens)))
        n = self.random.choice([1, 1, 1, 2, 17])
        limit = self.cache.limit or self.cache.capacity
        seqs = [seq for seq in seqs if self.cache.length(seq) + n <= limit]
        before = {seq: self.cache.length(seq) for seq in seqs}
        refused = self.cache.grow(seqs, n)
        assert all(isinstance(reason, OutOfMemory) for reason in refused.values())
        assert list(refused) == [seq for seq in seqs if seq in refused]
        served = [seq for seq in seqs if seq not in refused]
        for seq in seqs:
            assert self.cache.length(seq) == before[seq] + (0 if seq in refused else n)
        for seq in served:
            self.tokens[seq] += [self.random.randrange(10**6) for _ in range(n)]
        self.cut.difference_update(served)
        self.write(served, [n] * len(served))
        self.done["grow"] += len(served)
        self.done["grow refused"] += len(refused)

    def release(self) -> None:
        seq = self.random.choice(sorted([*self.tokens, *self.away]))
        self.cache.release(seq)
        self.tokens.pop(seq, None)
        self.away.pop(seq, None)
        self.done["release"] += 1

    def fork(self) -> None:
        parent, child = self.random.choice(sorted(self.tokens)), self.fresh()
        before = self.books()
        try:
            self.cache.fork(parent, child)
        except OutOfMemory:
            assert self.books() == before
            self.done["fork refused"] += 1
            return
        self.tokens[child] = list(self.tokens[parent])
        self.cut |= {child} if parent in self.cut else set()
        self.done["fork"] += 1

    def truncate(self) -> None:
        seq = self.random.choice(sorted(self.tokens))
        n = self.random.randint(0, len(self.tokens[seq]))
        before = self.books()
        try:
            self.cache.truncate(seq, n)
        except OutOfMemory:
            assert self.books() == before
            self.done["truncate refused"] += 1
        except ValueError as error:
            assert "window" in str(error)
            self.done["truncate beyond window"] += 1
        else:
            self.cut |= {seq} if n < len(self.tokens[seq]) else set()
            del self.tokens[seq][n:]
            self.done["truncate"] += 1
        assert self.cache.length(seq) == len(self.tokens[seq])

    def offload(self) -> None:
        seq = self.random.choice(sorted(self.tokens))
        self.cache.offload(seq)
        self.away[seq] = self.tokens.pop(seq)
        self.done["offload"] += 1

    def restore(self) -> None:
        seq = self.random.choice(sorted(self.away))
        before = self.books()
        try:
            self.cache.restore(seq, headroom=self.random.randint(0, 1))
        except OutOfMemory:
            assert self.books() == before
            self.done["restore refused"] += 1
        else:
            self.tokens[seq] = self.away.pop(seq)
            self.done["restore"] += 1

    # ------------------------------------------------------------------ checking

    def books(self) -> Usage:
        """What a refusal must not change; which free pages are still mapped it may."""
        return self.cache.usage()._replace(warm=0)

    def read_back(self) -> None:
        seqs = sorted(self.tokens)
        self.random.shuffle(seqs)
        for layer, shape in enumerate(self.cache.geometry.layers):
            view = self.cache.view(layer, seqs)
            for i, seq in enumerate(seqs):
                first, k, v = stored(view, i)
                first = len(self.tokens[seq]) - len(k) if first < 0 else first
                if shape.window is None:
                    assert first == 0, "a token was let go of without a window"
                needed = len(self.tokens[seq]) - (shape.window or len(self.tokens[seq]))
                needed += seq in self.cut
                assert first <= max(needed, 0), "a token within the window is gone"
                expected = self.vectors(layer, self.tokens[seq][first:])
                assert torch.equal(k, expected[0]) and torch.equal(v, expected[1]), (layer, seq)

    def step(self) -> None:
        """One random verb; books and contents are checked after it."""
        verbs = [self.admit] * 3
        if self.tokens:
            verbs += [self.grow] * 6 + [self.fork, self.truncate, self.offload]
        if self.tokens or self.away:
            verbs += [self.release] * 2
        if self.away:
            verbs += [self.restore] * 2
        self.random.choice(verbs)()
        self.cache.check_invariants()
        self.read_back()

    def run(self, num_steps: int) -> None:
        """Random verbs, then a drain: everything is free again."""
        for _ in range(num_steps):
            self.step()
        for seq in [*self.tokens, *self.away]:
            self.cache.release(seq)
        self.cache.check_invariants()
        usage = self.cache.usage()
        assert usage.free == usage.capacity and usage.live == usage.reserved == 0
