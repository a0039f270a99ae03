"""A view is shown without a look at the tokens: most of a mapped buffer cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.contract import DenseView, PagedView
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.kernels import dense
from kvalloc.models import geometry
from kvalloc.paged import PagedKVCache
from kvalloc.tests.host_children import run_well
from kvalloc.vmm import VmmKVCache

MAPPED = """
import copy, pickle
import torch
from kvalloc.models import geometry
from kvalloc.vmm import VmmKVCache

cache = VmmKVCache(geometry("tiny"), 8 << 20, 1 << 16, guard="fault")
cache.admit("a", 3)
view = cache.view(0, ["a"])
"""


def test_a_mapped_view_is_printed_in_shapes() -> None:
    said = run_well(MAPPED + "say(repr(view))")
    rows = said.partition("[")[2].partition(",")[0]
    kept = f"<float32 [{rows}, 2, 64] on cpu>"
    assert (
        said == f"DenseView(k={kept}, v={kept}, starts=[0], lengths=[3], window=None, longest=3)\n"
    )


def test_a_mapped_view_is_not_compared_token_by_token() -> None:
    said = run_well(MAPPED + "say((view == view, view == cache.view(0, ['a']), hash(view) != 0))")
    assert said == "(True, False, True)\n"


def test_a_mapped_view_is_neither_pickled_nor_copied() -> None:
    said = run_well(
        MAPPED
        + """
for whole in (pickle.dumps, copy.deepcopy, copy.copy):
    try:
        whole(view)
    except TypeError as error:
        say(str(error))
"""
    )
    assert said.count("can be neither pickled nor copied") == 3
    assert said.count("copy the rows [starts, starts + lengths) of k and v") == 3


def test_a_view_of_many_sequences_is_shortened() -> None:
    with PagedKVCache(geometry("tiny"), 8 << 20) as cache:
        for seq in range(10):
            cache.admit(seq, seq)
        told = repr(cache.view(0, list(range(10))))
    assert "block_table=<int32 [10, " in told
    assert "lengths=[0, 1, 2, 3, 4, 5, 6, 7, and 2 more]" in told
    assert len(told) < 400 and "\n" not in told


def test_a_view_elsewhere_shows_no_numbers() -> None:
    """Reading them would wait for the device."""
    here = torch.zeros(1, dtype=torch.int32)
    pages = torch.zeros(1, 1, 1, 1)
    view = PagedView(pages, pages, here[None], here, here.to("meta"))
    assert repr(view).endswith("first=[0], lengths=<int32 [1] on meta>, window=None)")


def test_a_dense_view_knows_its_longest_sequence() -> None:
    """Also behind a window, where the view is shorter than the sequence."""
    windowed = KVGeometry(
        "windowed", (LayerShape(1, 64, window=32), LayerShape(1, 64)), 1, "float32"
    )
    for cache in (
        ContiguousKVCache(windowed, 8 << 20, policy="exact"),
        VmmKVCache(windowed, 8 << 20, 4096),
    ):
        with cache:
            for seq, tokens in enumerate((3, 100, 7)):
                cache.admit(seq, tokens)
            cache.grow([1], 100)
            for batch in ([0, 1, 2], [2, 0], []):
                views = [cache.view(layer, batch) for layer in range(2)]
                for view in views:
                    assert isinstance(view, DenseView)
                    assert view.longest == max(view.lengths.tolist(), default=0)
                    del view
                views.clear()


def test_attention_on_a_gpu_does_not_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading ``lengths`` there would wait for everything queued, in each layer."""
    told: list[Any] = []
    monkeypatch.setattr(dense, "_check_flash_limits", lambda *_: None)
    monkeypatch.setattr(dense, "flash", lambda *arguments, **_: told.append(arguments[5]))
    kv, starts = torch.zeros(16, 1, 8), torch.zeros(1, dtype=torch.int64)
    lengths = torch.ones(1, dtype=torch.int32)
    for longest in (9, None):
        view = DenseView(kv, kv, starts, lengths, longest=longest)
        dense._flash_attention(torch.zeros(1, 1, 8), view, [1], 1.0, None)
    assert told == [9, 1]
