"""Models generate the tokens that they generate with transformers' own cache, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from transformers import DynamicCache

from kvalloc.tests.hf_models import (
    CONFIGS,
    READS_PAGES,
    every_cache,
    generate,
    model_of,
    one_thread,
    prompts,
)

__all__ = ["one_thread"]  # a fixture

CACHES = every_cache()
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 4},
    "sampling": {"do_sample": True},
    "chunked": {"prefill_chunk_size": 7},
}


def expected(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> Any:
    return generate(model, DynamicCache(config=model.config), inputs, **options)


@pytest.mark.parametrize("cache", ["vmm", "contiguous", "paged"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_a_padded_batch(name: str, cache: str) -> None:
    """Greedy and beam search over four prompts of different lengths; the books stay in order."""
    model, inputs = model_of(name), prompts(4, 30)
    for mode in ("greedy", "beam"):
        ours = CACHES[cache](model.config)
        tokens = generate(model, ours, inputs, **MODES[mode])
        assert torch.equal(tokens, expected(model, inputs, **MODES[mode])), mode
        assert ours.get_seq_length() == 53
        ours.usage()
        ours._rows.kv.check_invariants()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_tokens_of_one_prompt(name: str, cache: str) -> None:
    model, inputs = model_of(name), prompts(1, 30)
    for options in MODES.values():
        tokens = generate(model, CACHES[cache](model.config), inputs, **options)
        assert torch.equal(tokens, expected(model, inputs, **options)), options


@pytest.mark.parametrize("name", READS_PAGES)
def test_tokens_read_from_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paged kernel sees no copy of the pages, in any mode, padding and windows included."""

    def refuse(*_: object) -> None:
        raise AssertionError("pages were gathered")

    monkeypatch.setattr("kvalloc.hf.paged.gather", refuse)
    model = model_of(name, "kvalloc_paged")
    inputs = prompts(4, 30)
    for mode in ("greedy", "beam", "sampling"):
        tokens = generate(model, CACHES["paged"](model.config), inputs, **MODES[mode])
        assert torch.equal(tokens, expected(model_of(name), inputs, **MODES[mode])), mode


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("draft", ["assistant", "prompt lookup"])
def test_tokens_with_drafts(draft: str, cache: str) -> None:
    """Assisted decoding: drafts are rejected in part and cropped, behind sliding windows too."""
    options: dict[str, Any]
    if draft == "assistant":  # without windows: 5.17's own cache of the assistant breaks there
        model = model_of("llama")
        options = {"assistant_model": perturbed(model)}
    else:
        model = model_of("gemma3")
        options = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    inputs, ours = prompts(1, 30), CACHES[cache](model.config)
    crops: list[int] = []
    crop: Callable[[int], None] = ours.crop

    def counted(num_tokens: int) -> None:
        crops.append(num_tokens)
        crop(num_tokens)

    ours.crop = counted
    tokens = generate(model, ours, inputs, **options)
    assert torch.equal(tokens, expected(model, inputs, **options))
    assert len(set(crops)) > 1, "every draft was accepted, or none"


def perturbed(model: Any) -> Any:
    """A model that often says the same, but not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for weight in other.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        weight.data += 0.2 * weight.std().nan_to_num() * noise
    return other


@pytest.mark.parametrize("cache", CACHES)
def test_several_turns_on_one_cache(cache: str) -> None:
    """The second call computes the new tokens only; after reset the cache is as new."""
    model, first, more = model_of("gemma3"), prompts(2, 30), prompts(2, 9)["input_ids"] + 1
    ours, theirs = CACHES[cache](model.config), DynamicCache(config=model.config)
    answers = []
    for turns in (ours, theirs):
        tokens = generate(model, turns, first, max_new_tokens=20)
        ids = torch.cat([tokens, more % 60 + 1], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 29, dtype=torch.int64)], dim=1)
        second = {"input_ids": ids, "attention_mask": mask}
        answers.append(generate(model, turns, second, max_new_tokens=20))
    assert torch.equal(*answers)
    assert answers[0].shape[1] == 30 + 20 + 9 + 20
    ours.reset()
    inputs = prompts(4, 30)
    assert torch.equal(generate(model, ours, inputs), expected(model, inputs))
