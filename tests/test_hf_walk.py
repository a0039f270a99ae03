"""Random calls of a cache beside a few lines that say what each of them has to return."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from kvalloc.contract import NeverFits, OutOfMemory
from kvalloc.hf import PagedCache, VmmCache
from kvalloc.tests.hf_models import MAX_LENGTH, every_cache, one_thread
from kvalloc.tests.hf_updates import CONFIG, Tokens, require_same, sliding, tokens

__all__ = ["one_thread"]

CACHES = every_cache()


class Plain:
    """What a cache has to return, in a few lines: everything kept, the window cut out."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.reset()

    def reset(self) -> None:
        self.stored: list[Tokens | None] = [None, None]

    def get_seq_length(self, layer: int = 0) -> int:
        stored = self.stored[layer]
        return 0 if stored is None else stored[0].shape[2]

    def first(self, layer: int) -> int:
        return 0 if self.window is None else max(0, self.get_seq_length(layer) - self.window + 1)

    def get_mask_sizes(self, num_tokens: int, layer: int) -> tuple[int, int]:
        first = self.first(layer)
        return self.get_seq_length(layer) + num_tokens - first, first

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> Tokens:
        first, stored = self.first(layer), self.stored[layer]
        if stored is not None:
            k, v = torch.cat([stored[0], k], 2), torch.cat([stored[1], v], 2)
        self.stored[layer] = k, v
        return k[:, :, first:], v[:, :, first:]

    def select(self, rows: Any) -> None:
        self.stored = [
            None if pair is None else (pair[0][rows], pair[1][rows]) for pair in self.stored
        ]

    def crop(self, num_tokens: int) -> None:
        keep = self.get_seq_length() + num_tokens
        self.stored = [
            None if pair is None else (pair[0][:, :, :keep], pair[1][:, :, :keep])
            for pair in self.stored
        ]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [None, 20])
def test_any_order_of_calls(cache: str, window: int | None) -> None:
    """Cases 25, 28: crop, reset, reorder, repeat and select, forty walks of random calls."""
    for seed in range(40):
        torch.manual_seed(seed)
        draw = random.Random(seed)
        ours, plain = CACHES[cache](CONFIG if window is None else sliding(window)), Plain(window)
        ours.activate_past_recording()
        num_rows = num_new = 0
        for _ in range(25):
            call = draw.choice(["update"] * 4 + ["crop", "reorder", "select", "reset"])
            if call == "update" or not num_rows:
                num_rows = num_rows or draw.randint(1, 4)
                num_tokens = draw.choice([1, 1, 1, 2, 9, 17])
                if ours.get_seq_length() + num_tokens <= MAX_LENGTH:
                    require_same(ours, plain, tokens(num_rows, num_tokens))
                    num_new += num_tokens
            elif call == "crop":
                num_tokens = draw.randint(0, min(5, num_new))  # recording keeps no more
                ours.crop(-num_tokens)
                plain.crop(-num_tokens)
                num_new = 0
            elif call == "reorder":
                beams = [draw.randrange(num_rows) for _ in range(num_rows)]
                ours.reorder_cache(torch.tensor(beams))
                plain.select(beams)
            elif call == "select":
                keep = draw.sample(range(num_rows), draw.randint(1, num_rows))
                ours.batch_select_indices(torch.tensor(keep))
                plain.select(keep)
                num_rows = len(keep)
            else:
                ours.reset()
                plain.reset()
                num_rows = num_new = 0
            if num_rows:
                ours.usage()
                ours._rows.kv.check_invariants()
        ours.close()


@pytest.mark.parametrize("cache", CACHES)
def test_rows_that_leave_behind_a_window(cache: str) -> None:
    """Pages have fallen out of the window when the batch shrinks, and when beams change places."""
    ours, plain = CACHES[cache](sliding(20)), Plain(20)
    for num_rows, selected in ((4, [3, 1, 0]), (3, [2, 2, 0]), (3, [1])):
        for num_tokens in (17, 1, 1, 20):
            require_same(ours, plain, tokens(num_rows, num_tokens))
        ours.batch_select_indices(torch.tensor(selected))
        plain.select(selected)
        ours._rows.kv.check_invariants()
    require_same(ours, plain, tokens(1, 1))
    if cache != "contiguous":
        usage, token_bytes = ours.usage(), ours._rows.kv.geometry.bytes_per_token
        assert usage.reserved < 118 * token_bytes * 0.75


@pytest.mark.parametrize("layout", ["head-major", "token-major", "interleaved"])
def test_a_window_outgrows_the_memory(layout: str) -> None:
    """Past what the memory could hold at once: a row has addresses for ``max_length`` tokens."""
    ours: Any = VmmCache.from_config(
        sliding(8), max_length=200, memory_bytes=80 * 4096, page_bytes=4096, layout=layout
    )
    plain = Plain(8)
    require_same(ours, plain, tokens(2, 17))
    assert ours._rows.kv.capacity < 170
    for _ in range(183):
        require_same(ours, plain, tokens(2, 1))
    with pytest.raises(NeverFits, match="max_length of 200"):
        ours.update(*tokens(2, 1), 0)
    ours.batch_select_indices([1])
    plain.select([1])
    assert plain.stored[0] is not None
    assert torch.equal(ours.layers[0].keys, plain.stored[0][0][:, :, plain.first(0) :])


@pytest.mark.parametrize(
    ("kind", "options"),
    [(PagedCache, {"page_size": 8}), (VmmCache, {"page_bytes": 4096, "layout": "token-major"})],
)
def test_a_crop_is_refused_as_cutting_row_by_row_would_be(kind: Any, options: Any) -> None:
    """Beams in any order, memory for 56 tokens: told beforehand, neither too soon nor too late."""
    num_cut = num_refused = 0
    for seed in range(120):
        draw = random.Random(seed)
        ours: Any = kind.from_config(CONFIG, max_length=64, memory_bytes=56 * 2048, **options)
        plain, num_rows = Plain(None), 1
        try:
            for num_tokens in (17, 15):
                require_same(ours, plain, tokens(num_rows, num_tokens))
                beams = [draw.randrange(num_rows) for _ in range(draw.randint(num_rows, 4))]
                ours.batch_select_indices(beams)
                plain.select(beams)
                num_rows = len(beams)
        except OutOfMemory:
            continue
        cut, usage = draw.randint(1, 32), ours.usage()
        try:
            ours.crop(-cut)
        except OutOfMemory:
            num_refused += 1
            assert ours.usage() == usage and ours.get_seq_length() == 32
            with pytest.raises(OutOfMemory):
                for seq in ours._rows.seqs:
                    ours._rows.kv.truncate(seq, 32 - cut)
        else:
            num_cut += 1
            plain.crop(-cut)
            require_same(ours, plain, tokens(num_rows, 0))
        ours._rows.kv.check_invariants()
    assert num_cut > 40 and num_refused > 10
