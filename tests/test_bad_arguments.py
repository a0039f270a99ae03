"""What a program can get wrong about a cache: one clear error that names the remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvalloc.contiguous import ContiguousAllocator, ContiguousKVCache
from kvalloc.contract import Allocator, KVCache
from kvalloc.geometry import SLOTS, KVGeometry
from kvalloc.kernels.attention import attend
from kvalloc.models import geometry
from kvalloc.paged import PagedAllocator, PagedKVCache
from kvalloc.vmm import VmmAllocator, VmmKVCache
from kvalloc.vmm.driver import DriverError

TINY = geometry("tiny")
MIB = 1 << 20
CACHES: dict[str, Callable[..., KVCache]] = {
    "contiguous": lambda **options: ContiguousKVCache(TINY, **{"memory_bytes": MIB, **options}),
    "paged": lambda **options: PagedKVCache(TINY, **{"memory_bytes": MIB, **options}),
    "vmm": lambda **options: VmmKVCache(
        TINY, **{"memory_bytes": MIB, "page_bytes": 1 << 16, **options}
    ),
}
KINDS = (
    *(ContiguousAllocator, PagedAllocator, VmmAllocator),
    *(ContiguousKVCache, PagedKVCache, VmmKVCache),
)
every_cache = pytest.mark.parametrize("name", CACHES)


@every_cache
@pytest.mark.parametrize("device", ["nope", "meta", "cuda", "cuda:99", "cpu:x", "", None, 1.5])
def test_a_device_that_is_not_there(name: str, device: Any) -> None:
    if torch.cuda.is_available() and str(device).startswith("cuda"):
        pytest.skip("there is a GPU here")
    with pytest.raises((ValueError, DriverError), match=r"use (device=)?'?cpu"):
        CACHES[name](device=device)


@pytest.mark.parametrize("name", ["contiguous", "paged"])
def test_more_memory_than_there_is(name: str) -> None:
    options = {"page_size": 1 << 20} if name == "paged" else {}
    with pytest.raises(MemoryError, match="give the cache less memory"):
        CACHES[name](memory_bytes=1 << 55, **options)  # beyond what addresses can be


@pytest.mark.parametrize("maker", [ContiguousAllocator, PagedAllocator, VmmAllocator])
@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_limit_is_at_least_one_token(maker: Any, limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="limit must"):
        maker(SLOTS, 8 * MIB, limit=limit)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"page_bytes": 0}, "page_bytes must be at least 1"),
        ({"page_bytes": True}, "page_bytes must be an integer"),
        ({"page_bytes": 5000}, "give a multiple of 4096"),
        ({"max_rows": 0}, "max_rows must be at least 1"),
        ({"max_rows": -1}, "max_rows must not be negative"),
        ({"memory_bytes": 0}, "give more memory"),
    ],
)
def test_what_a_mapped_cache_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        CACHES["vmm"](**options)


@every_cache
def test_after_close_every_method_says_so(name: str) -> None:
    cache: Any = CACHES[name]()
    cache.admit("a", 5, max_new=5)
    kind = type(cache)
    cache.close()
    cache.close()
    public = [m for m in dir(cache) if not m.startswith("_") and m != "close" and m != "capacity"]
    methods = [getattr(cache, m) for m in public if callable(getattr(kind, m, None))]
    assert len(methods) >= 13
    entered: list[Callable[[], object]] = [lambda: cache.capacity, lambda: cache.__enter__()]
    for call in (*methods, *entered):
        with pytest.raises(RuntimeError, match=f"this {kind.__name__} is closed: make a new one"):
            call()
    assert isinstance(cache, kind) and type(cache).__name__ == kind.__name__


@pytest.mark.parametrize(
    "options",
    [
        {"q_lens": [1.0]},
        {"q_lens": [True]},
        {"q_lens": ["1"]},
        {"q_lens": torch.tensor([1.0])},
        {"window": 1.5},
        {"window": True},
        {"window": "4"},
    ],
)
def test_attend_counts_in_whole_numbers(options: dict[str, Any]) -> None:
    with CACHES["contiguous"]() as cache:
        cache.admit("a", 1, max_new=1)
        shape = TINY.layers[0]
        k = torch.zeros(1, shape.kv_heads, shape.head_dim)
        cache.write(0, ["a"], k, k)
        q = torch.zeros(1, TINY.q_heads, shape.head_dim)
        with pytest.raises(TypeError, match="must be a whole number"):
            attend(q, cache.view(0, ["a"]), **options)


BOOKS: dict[str, Callable[[], Allocator]] = {
    "contiguous": lambda: ContiguousAllocator(SLOTS, 1 << 42),
    "paged": lambda: PagedAllocator(SLOTS, 1 << 42, 1 << 24),
    "vmm": lambda: VmmAllocator(SLOTS, 1 << 42, 1 << 24),
    "exact": lambda: ContiguousAllocator(SLOTS, 1 << 42, policy="exact"),
    "buddy": lambda: ContiguousAllocator(SLOTS, 1 << 42, placement="buddy"),
    "interleaved": lambda: VmmAllocator(SLOTS, 1 << 42, 1 << 24, layout="interleaved"),
}


@pytest.mark.parametrize("name", BOOKS)
def test_capacities_beyond_a_tebitoken(name: str) -> None:
    """Counts are int64 everywhere: 2^42 tokens are counted to the last one."""
    books = BOOKS[name]()
    assert books.capacity == 1 << 42
    books.admit("a", (1 << 41) + 1, max_new=1 << 40)
    assert not books.grow(["a"], 1 << 33)
    assert books.length("a") == books.usage().live == (1 << 41) + (1 << 33) + 1
    books.truncate("a", 1 << 41)
    books.check_invariants()
    books.release("a")
    assert books.usage().free == 1 << 42


@pytest.mark.parametrize("kind", ["memory", "limit", "context"])
@pytest.mark.parametrize("maker", [PagedAllocator, VmmAllocator, ContiguousAllocator])
def test_what_int64_does_not_count_is_refused(kind: str, maker: Callable[..., Any]) -> None:
    """At the door: the books would go wrong in the middle of a verb."""
    beyond, page = 1 << 63, 1 << 60
    options: dict[str, Any] = {} if maker is ContiguousAllocator else {"page_size": page}
    if maker is VmmAllocator:
        options = {"page_bytes": page}
    shape = replace(SLOTS, max_context=beyond if kind == "context" else None)
    memory = beyond if kind == "memory" else 1 << 62
    limit = beyond if kind == "limit" else None
    with pytest.raises(ValueError, match="at most 2\\^62"):
        maker(shape, memory, limit=limit, **options)
    books = maker(SLOTS, 1 << 62, limit=1 << 62, **options)
    books.admit("a", (1 << 61) - 1, max_new=1)
    assert not books.grow(["a"])
    books.check_invariants()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["llama-3-8b", None, {"layers": 2}, 2048, KVGeometry])
def test_what_is_no_geometry(kind: Any, wrong: Any) -> None:
    name = wrong if isinstance(wrong, str) else "tiny"
    told = rf"must be a KVGeometry, not .*: kvalloc\.models\.geometry\('{name}'\) makes one"
    with pytest.raises(TypeError, match=told):
        kind(wrong, MIB)


@every_cache
@pytest.mark.parametrize(
    "prefix",
    ["sys", ("sys", 3), [("sys",)], [3], [("sys", 3, 4)], 5, np.arange(5), {("sys", 3)}, {"a": 3}],
)
def test_a_prefix_that_is_no_list_of_runs(name: str, prefix: Any) -> None:
    with CACHES[name]() as cache:
        with pytest.raises(TypeError, match=r"a prefix is a list of runs \(key, num_tokens\)"):
            cache.admit("a", 5, prefix=prefix)
        assert cache.usage().reserved == 0
        cache.check_invariants()


def test_a_mapped_cache_needs_memory_or_a_pool() -> None:
    with pytest.raises(ValueError, match="give memory_bytes, or a pool"):
        VmmKVCache(TINY)


def test_a_refusal_says_why_wherever_it_is_shown() -> None:
    books = PagedAllocator(SLOTS, 8, 4)
    books.admit("a", 4)
    books.admit("b", 4)
    refused = books.grow(["b"])
    told = "1 page needed, 0 free, the largest free run is 0"
    assert str(refused["b"]) == told and told in repr(refused)
    assert str(pickle.loads(pickle.dumps(refused["b"]))) == told


@every_cache
@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ("ab", r"a batch is a list of sequences: write \['ab'\]"),
        (b"ab", r"a batch is a list of sequences: write \[b'ab'\]"),
        (None, "a batch is a list of sequences, not NoneType"),
        (3, "a batch is a list of sequences, not int"),
        ({"a"}, "a batch is a list of sequences, not set"),
        (np.array([["a", "b"]]), "a batch is a list of sequences, not ndarray"),
        ([["a"]], r"named by a string, a number or the like, not \['a'\]"),
    ],
)
def test_what_is_no_batch(name: str, batch: Any, told: str) -> None:
    """The letters of a string may well be sequences, and even the batch before."""
    with CACHES[name]() as cache:
        k = torch.zeros(2, TINY.layers[0].kv_heads, TINY.layers[0].head_dim)
        for seq in "ab":
            cache.admit(seq, 1, max_new=5)
        cache.write(0, ["a", "b"], k, k)
        cache.view(0, ["a", "b"])
        verbs: list[Callable[[], object]] = [
            lambda: cache.grow(batch),
            lambda: cache.write(0, batch, k, k),
            lambda: cache.view(0, batch),
        ]
        for verb in verbs:
            with pytest.raises(TypeError, match=told):
                verb()
        assert [cache.length(seq) for seq in "ab"] == [1, 1]


@pytest.mark.parametrize("name", BOOKS)
def test_a_name_that_no_table_can_look_up(name: str) -> None:
    books, wrong = BOOKS[name](), cast(Any, ["a"])
    books.admit("a", 1, max_new=5)
    verbs: list[Callable[[], object]] = [
        lambda: books.admit(wrong, 1, max_new=5),
        lambda: books.fork("a", wrong),
        lambda: books.fork(wrong, "b"),
        lambda: books.grow(["a", wrong]),
        *(partial(verb, wrong) for verb in (books.release, books.length, books.spans)),
        *(partial(verb, wrong) for verb in (books.offload, books.restore)),
        lambda: books.truncate(wrong, 0),
    ]
    for verb in verbs:
        with pytest.raises(TypeError, match=r"named by a string, .* not \['a'\]"):
            verb()
    assert books.length("a") == 1
    books.check_invariants()
