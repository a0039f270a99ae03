"""kvalloc's caches beside transformers' own: same answers to the same calls, whatever the order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the extra [transformers] is missing")

from transformers import DynamicCache, LlamaConfig, Qwen3NextConfig, T5Config
from transformers.cache_utils import DynamicLayer

from kvalloc.contract import NeverFits, OutOfMemory
from kvalloc.hf import ContiguousCache, PagedCache, VmmCache
from kvalloc.hf.caches import RowsCache
from kvalloc.tests.hf_models import MAX_LENGTH, every_cache, one_thread
from kvalloc.tests.hf_updates import CONFIG, DIM, HEADS, require_same, sliding, tokens, update

__all__ = ["one_thread"]

CACHES = every_cache()


@pytest.mark.parametrize("cache", CACHES)
def test_crop_further_than_the_beginning(cache: str) -> None:
    """Case 24: three tokens, five removed: none left, never a negative length."""
    ours = CACHES[cache](CONFIG)
    update(ours, tokens(1, 3))
    ours.crop(-5)
    assert ours.get_seq_length() == 0
    assert ours.get_mask_sizes(1, 0) == (1, 0)
    new = tokens(1, 1)
    assert torch.equal(update(ours, new)[0][0], new[0])


@pytest.mark.parametrize("cache", CACHES)
def test_reset_starts_afresh(cache: str) -> None:
    """Case 25: length 0, then another batch size, shape and dtype; keys are those of the new."""
    ours = CACHES[cache](CONFIG)
    update(ours, tokens(2, 40))
    ours.reset()
    assert ours.get_seq_length() == 0 and ours.layers[0].keys is None
    new = tokens(5, 7)
    require_same(ours, DynamicCache(config=CONFIG), new)
    ours.reset()
    other = torch.randn(3, 1, 6, 32, dtype=torch.bfloat16)
    assert torch.equal(ours.update(other, -other, 0)[1], -other)
    assert torch.equal(ours.layers[0].values, -other)


@pytest.mark.parametrize("cache", CACHES)
def test_a_refused_update_changes_no_length(cache: str) -> None:
    """Cases 26, 29: past the maximum length, which is the one that was asked for."""
    ours = CACHES[cache](CONFIG)
    assert ours.get_max_length() == MAX_LENGTH
    first = update(ours, tokens(2, MAX_LENGTH - 1))
    with pytest.raises(NeverFits, match=f"max_length of {MAX_LENGTH}"):
        ours.update(*tokens(2, 2), 0)
    assert [layer.get_seq_length() for layer in ours.layers] == [MAX_LENGTH - 1] * 2
    assert ours.get_mask_sizes(1, 0) == (MAX_LENGTH, 0)
    last = update(ours, tokens(2, 1))
    assert torch.equal(last[0][0][:, :, :-1], first[0][0])


@pytest.mark.parametrize("kind", ["vmm", "paged"])
def test_memory_runs_out(kind: str) -> None:
    """Case 26: a refusal in the middle of a batch takes back what other rows were given."""
    small: dict[str, Callable[[], RowsCache]] = {
        "vmm": lambda: VmmCache.from_config(
            CONFIG, max_length=4096, memory_bytes=(3 * 8 + 12) * 4096, page_bytes=4096
        ),
        "paged": lambda: PagedCache.from_config(CONFIG, max_length=4096, memory_bytes=7 << 15),
    }
    ours: Any = small[kind]()
    new = tokens(3, 16)
    update(ours, new)
    before = ours.usage()
    with pytest.raises(OutOfMemory) as refused:
        for _ in range(100):
            before = ours.usage()
            update(ours, tokens(3, 1))
    assert "memory_bytes" in "".join(refused.value.__notes__)
    assert ours.usage().live == before.live
    ours._rows.kv.check_invariants()
    assert torch.equal(ours.layers[0].keys[:, :, :16], new[0])


@pytest.mark.parametrize("cache", CACHES)
def test_a_window_of_one(cache: str) -> None:
    """Case 27: nothing but the new tokens, and memory that does not grow."""
    ours = CACHES[cache](sliding(1))
    for _ in range(100):
        new = tokens(2, 1)
        assert ours.get_mask_sizes(1, 0) == (1, ours.get_seq_length())
        assert torch.equal(update(ours, new)[0][0], new[0])
    if cache != "contiguous":
        assert ours.usage().reserved < 100 * 2 * ours._rows.kv.geometry.bytes_per_token / 2


@pytest.mark.parametrize("cache", CACHES)
def test_a_positive_crop(cache: str) -> None:
    """Case 30: the length to keep, or an error, as the installed transformers has it."""
    ours, layer = CACHES[cache](CONFIG), DynamicLayer()
    new = tokens(1, 9)
    update(ours, new)
    layer.update(*new)
    try:
        layer.crop(4)
    except ValueError:
        with pytest.raises(ValueError, match="positive"):
            ours.crop(4)
        assert ours.get_seq_length() == 9
    else:
        ours.crop(4)
        assert ours.get_seq_length() == layer.get_seq_length() == 4
        ours.crop(6)
        assert ours.get_seq_length() == 4


@pytest.mark.parametrize("cache", ["vmm", "paged"])
def test_crop_behind_a_window(cache: str) -> None:
    """What was unmapped cannot come back: an error that changes nothing, unless it was kept."""
    ours = CACHES[cache](sliding(8))
    for _ in range(80):
        update(ours, tokens(1, 1))
    with pytest.raises(ValueError, match="window"):
        ours.crop(-60)
    assert ours.get_seq_length() == 80
    ours.crop(-1)
    assert ours.get_seq_length() == 79


def test_a_refused_crop_after_a_reset() -> None:
    """Rows of the books are not numbered as the rows of the batch: all or none is cut."""
    ours = PagedCache.from_config(CONFIG, max_length=64, memory_bytes=65536, page_size=8)
    update(ours, tokens(1, 8))
    ours.batch_repeat_interleave(6)
    ours.reset()
    new = tokens(2, 16)
    update(ours, new)
    ours.batch_select_indices(torch.tensor([1, 1, 1, 1]))
    usage = ours.usage()
    with pytest.raises(OutOfMemory):
        ours.crop(-5)
    assert ours.usage() == usage and ours.get_seq_length() == 16
    ours.batch_select_indices(torch.tensor([0, 1]))
    ours.crop(-5)
    more = tokens(2, 1)
    wanted = torch.cat([new[0][[1, 1], :, :11], more[0]], 2)
    assert torch.equal(update(ours, more)[0][0], wanted)


def test_the_last_holder_of_a_page_needs_no_copy() -> None:
    """Two beams, one page to cut through and one free: the first one's copy."""
    ours = PagedCache.from_config(CONFIG, max_length=64, memory_bytes=3 * 16384, page_size=8)
    new = tokens(1, 16)
    update(ours, new)
    ours.batch_repeat_interleave(2)
    ours.crop(-5)
    got: Any = ours.layers[0]
    assert torch.equal(got.keys, new[0][[0, 0], :, :11])


@pytest.mark.parametrize("kind", [VmmCache, ContiguousCache, PagedCache])
def test_a_refused_batch_of_another_shape(kind: Any) -> None:
    """The cache was made anew for it; the next batch is not taken for one that it can hold."""
    small: dict[str, Any] = {"page_bytes": 4096} if kind is VmmCache else {}
    ours = kind.from_config(CONFIG, max_length=16, memory_bytes=2 << 18, **small)
    update(ours, tokens(1, 5))
    ours.reset()
    other = torch.randn(200, 1, 16, 32)
    with pytest.raises(OutOfMemory):
        ours.update(other, other, 0)
    new = tokens(2, 5)
    require_same(ours, DynamicCache(config=CONFIG), new)


@pytest.mark.parametrize("cache", ["vmm", "vmm-token-major", "paged"])
def test_beams_share_pages(cache: str) -> None:
    """Case 28: repeated and reordered rows are stored once, up to their tails."""
    kind: Any = PagedCache if cache == "paged" else VmmCache
    options: Any = {} if cache == "paged" else {"page_bytes": 4096}
    if cache == "vmm-token-major":
        options["layout"] = "token-major"
    ours = kind.from_config(CONFIG, max_length=256, memory_bytes=4 << 20, **options)
    update(ours, tokens(1, 100))
    alone = ours.usage().reserved
    ours.batch_repeat_interleave(4)
    assert ours.usage().reserved < 2.5 * alone
    update(ours, tokens(4, 1))
    ours.reorder_cache(torch.tensor([3, 3, 0, 0]))
    assert ours.usage().reserved < 2.5 * alone
    assert ours.layers[0].keys.shape[0] == ours.batch_size == 4


def test_memory_is_taken_as_tokens_come() -> None:
    """At 1k of 32k tokens: the live bytes and at most a page per buffer."""
    config = LlamaConfig(num_hidden_layers=1)
    ours: Any = VmmCache.from_config(config, max_length=32768)
    ours.update(*tokens(1, 1024), 0)
    resident = ours._rows.kv.physical.driver.bytes_in_use
    live = 2 * HEADS * 1024 * DIM * 4
    assert resident <= 1.15 * live + 2 * HEADS * 65536
    ours.close()
    ours.update(*tokens(1, 1), 0)
    assert ours.get_seq_length() == 1


def test_updates_are_views() -> None:
    """Nothing is copied: what ``update`` returns lies where the tokens stay."""
    for name in ("vmm", "vmm-token-major", "contiguous"):
        ours = CACHES[name](CONFIG)
        first, _ = ours.update(*tokens(2, 5), 0)
        second, _ = ours.update(*tokens(2, 5), 0)
        assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize("cache", CACHES)
def test_wrong_tensors(cache: str) -> None:
    """Batch, heads, dim, dtype: never broadcast or converted in silence; lengths stay."""
    ours = CACHES[cache](CONFIG)
    with pytest.raises(TypeError, match="QuantizedCache"):
        ours.update(torch.zeros(1, 2, 3, 4, dtype=torch.int8), torch.zeros(1, 2, 3, 4), 0)
    with pytest.raises(ValueError, match="one shape"):
        ours.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 8), 0)
    update(ours, tokens(4, 5))
    for shape in ((1, HEADS, 1, DIM), (4, 1, 1, DIM), (4, HEADS, 1, 1)):
        with pytest.raises(ValueError, match="reset"):
            ours.update(torch.zeros(shape), torch.zeros(shape), 0)
    k, v = tokens(4, 1)
    for pair in ((k.double(), v), (k, v.half()), (k, v[:, :, :0])):
        with pytest.raises(ValueError, match="reset"):
            ours.update(*pair, 1)
    assert ours.get_seq_length() == 5
    with pytest.raises(ValueError, match="cannot become"):
        ours.reorder_cache(torch.tensor([0, 1, 2, 4]))


def test_gradients_do_not_flow_through() -> None:
    ours = VmmCache.from_config(CONFIG, max_length=32)
    k, v = (t.requires_grad_() for t in tokens(1, 3))
    ours.update(k, v, 0)
    keys, _ = ours.update(k * 2, v * 2, 0)
    assert not keys.requires_grad


@pytest.mark.parametrize("kind", [VmmCache, ContiguousCache, PagedCache])
def test_models_that_are_refused(kind: type[RowsCache]) -> None:
    make: Any = kind
    with pytest.raises(ValueError, match="EncoderDecoderCache"):
        make.from_config(T5Config(), max_length=8)
    with pytest.raises(ValueError, match="linear_attention"):
        make.from_config(Qwen3NextConfig(), max_length=8)
    with pytest.raises(ValueError, match="max_length"):
        make.from_config(CONFIG, max_length=0)
    with pytest.raises(RuntimeError, match="run the model"):
        make.from_config(CONFIG, max_length=8).usage()


def test_a_copy_is_refused() -> None:
    """The same memory behind two caches would be worse than an error."""
    with pytest.raises(TypeError, match="batch_repeat_interleave"):
        copy.deepcopy(VmmCache.from_config(CONFIG, max_length=8))


def test_early_initialization() -> None:
    """``torch.export`` recipes make the tensors before the first token."""
    ours = VmmCache.from_config(CONFIG, max_length=32)
    ours.early_initialization(2, HEADS, DIM, torch.float32, torch.device("cpu"))
    assert ours.is_initialized and ours.batch_size == 2 and not ours.is_compileable
    require_same(ours, DynamicCache(config=CONFIG), tokens(2, 5))


@pytest.mark.parametrize("kind", [VmmCache, ContiguousCache, PagedCache])
def test_made_like_a_cache_of_transformers(kind: Any) -> None:
    told = rf"make it with {kind.__name__}\.from_config\(model\.config, max_length="
    makers: list[Callable[[], object]] = [
        lambda: kind(),
        lambda: kind(CONFIG),
        lambda: kind(config=CONFIG, max_cache_len=64),
    ]
    for make in makers:
        with pytest.raises(TypeError, match=told):
            make()


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (VmmCache, {"page_bytes": 0}, "page_bytes must be at least 1, not 0"),
        (VmmCache, {"page_bytes": "64KiB"}, "page_bytes must be an integer"),
        (VmmCache, {"layout": "nope"}, "unknown layout 'nope'; choose one of .*interleaved"),
        (VmmCache, {"memory_bytes": 0}, "memory_bytes must be at least 1"),
        (ContiguousCache, {"memory_bytes": 1.5}, "memory_bytes must be an integer, not 1.5"),
        (PagedCache, {"page_size": 0}, "page_size must be at least 1"),
        (PagedCache, {"page_size": None}, "page_size must be an integer"),
    ],
)
def test_sizes_are_checked_before_the_first_token(
    kind: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        kind.from_config(CONFIG, max_length=8, **options)


@pytest.mark.parametrize("cache", CACHES)
def test_wrong_rows_and_counts(cache: str) -> None:
    ours = CACHES[cache](CONFIG)
    for repeats in ("2", -1, 0, 1.5):
        with pytest.raises((TypeError, ValueError), match="repeats must"):
            ours.batch_repeat_interleave(repeats)
    update(ours, tokens(2, 5))
    for wrong in (torch.tensor([0.0, 1.0]), "01", None, torch.tensor([True, False]), 1):
        with pytest.raises(TypeError, match="beam_idx must be a list or a tensor of row numbers"):
            ours.reorder_cache(wrong)
    for wrong in (torch.tensor([0.5]), "01", None):
        with pytest.raises(TypeError, match=r"indices must be .* row numbers or a mask"):
            ours.batch_select_indices(wrong)
    for rows in ([2], [True]):
        with pytest.raises(ValueError, match="a batch of 2 has no such rows"):
            ours.batch_select_indices(rows)
    for tokens_to_remove in ("x", 1.5, None):
        with pytest.raises(TypeError, match="tokens_to_remove must be an integer"):
            ours.crop(tokens_to_remove)
    k, v = tokens(2, 1)
    for pair, name in (((k[0], v[0]), "key"), ((None, v), "key"), ((k, None), "value")):
        with pytest.raises(TypeError, match=rf"{name}_states must be a tensor \[rows, KV heads"):
            ours.update(*pair, 0)
    for layer in (9, -1):
        with pytest.raises(ValueError, match=f"layer {layer} does not exist"):
            ours.update(k, v, layer)
    assert ours.get_seq_length() == 5
    ours.reorder_cache([1, 0])
    ours.batch_select_indices([True, False])
    assert ours.batch_size == 1
