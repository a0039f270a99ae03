"""Attention over pages through transformers' interface, and its way out where pages do not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from transformers import DynamicCache

from kvalloc.hf import PagedCache, VmmCache
from kvalloc.hf import backends as hf_backends
from kvalloc.hf import paged as hf_paged
from kvalloc.tests.hf_models import CACHE, MAX_LENGTH, generate, model_of, one_thread, prompts
from kvalloc.tests.hf_updates import CONFIG, tokens

__all__ = ["one_thread"]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the first token of every copy."""
    firsts: list[int] = []
    gather = hf_backends.gather

    def counted(view: Any, first: int, length: int) -> Any:
        firsts.append(first)
        return gather(view, first, length)

    monkeypatch.setattr(hf_paged, "gather", counted)
    return firsts


def logits(model: Any, cache: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(ids, **{CACHE: cache}, **options).logits
    return out


@pytest.mark.parametrize("kind", ["holes", "float", "backwards"])
def test_masks_that_pages_cannot_serve(kind: str, gathers: list[int]) -> None:
    """Any other mask is obeyed all the same, over a copy of the tokens."""
    ids = prompts(2, 12)["input_ids"].clamp(min=1)
    mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 1, 12, 12).clone()
    if kind == "holes":
        mask[:, :, 6:, 3] = False
    elif kind == "backwards":
        mask[:, :, :4, :4] = True
    given = mask if kind != "float" else torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    plain, paged = model_of("llama"), model_of("llama", "kvalloc_paged")
    ours = logits(
        paged, PagedCache.from_config(paged.config, max_length=64), ids, attention_mask=given
    )
    theirs = logits(plain, DynamicCache(config=plain.config), ids, attention_mask=given)
    torch.testing.assert_close(ours, theirs)
    assert gathers == [0, 0]


def test_without_pages_it_is_sdpa(gathers: list[int]) -> None:
    """No cache, or another one: the same model runs as before."""
    model, plain, inputs = model_of("llama", "kvalloc_paged"), model_of("llama"), prompts(2, 20)
    wanted = generate(plain, DynamicCache(config=plain.config), inputs)
    for cache in (
        DynamicCache(config=model.config),
        VmmCache.from_config(model.config, max_length=MAX_LENGTH),
    ):
        assert torch.equal(generate(model, cache, inputs), wanted)
    with torch.no_grad():
        ids = inputs["input_ids"]
        torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert not gathers


def test_attention_is_looked_up_at_every_update(gathers: list[int]) -> None:
    model, inputs = model_of("qwen3", "kvalloc_paged"), prompts(1, 20)
    wanted = generate(model, DynamicCache(config=model.config), inputs)
    cache = PagedCache.from_config(model.config, max_length=MAX_LENGTH)
    try:
        model.set_attn_implementation("sdpa")
        assert torch.equal(generate(model, cache, inputs), wanted)
        assert gathers
    finally:
        model.set_attn_implementation("kvalloc_paged")


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"s_aux": torch.ones(4)}, {"dropout": 0.1}])
def test_what_the_kernels_do_not_compute(options: dict[str, Any]) -> None:
    key = torch.zeros(1, 2, 1, 64)
    key.kvalloc_pages = object()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="eager"):
        hf_paged.paged_attention(
            torch.nn.Module(), torch.zeros(1, 4, 1, 64), key, key, None, **options
        )


def test_softcapped_scores_are_refused() -> None:
    """Gemma-2's attention is not computed wrongly over pages: it is not computed."""
    model = model_of("gemma2", "kvalloc_paged")
    cache = PagedCache.from_config(model.config, max_length=MAX_LENGTH)
    with pytest.raises(ValueError, match="softcap"):
        generate(model, cache, prompts(1, 10))


def test_a_layer_that_was_skipped() -> None:
    cache: Any = PagedCache.from_config(CONFIG, max_length=MAX_LENGTH)
    cache.update(*tokens(1, 3), 0)
    with pytest.raises(ValueError, match="every layer"):
        cache.update(*tokens(1, 2), 1)
    cache.update(*tokens(1, 3), 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [3, 3]
