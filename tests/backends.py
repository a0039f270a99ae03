"""A small allocator of every kind, one byte per token, for tests of what all of them promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contract import Allocator, Prefix
from kvalloc.geometry import SLOTS
from kvalloc.paged import PagedAllocator
from kvalloc.pages.allocator import PageAllocator
from kvalloc.vmm import VmmAllocator

Make = Callable[[int], Allocator]


@dataclass(frozen=True)
class Backend:
    """How to make an allocator of so many tokens, and the tokens that one of its pages holds.

    Full pages are what forks and equal prompts share; None: it has no pages, and shares nothing.
    """

    make: Make
    page: int | None = None


BACKENDS = {
    "contiguous:max": Backend(lambda n: ContiguousAllocator(SLOTS, n)),
    "contiguous:exact": Backend(lambda n: ContiguousAllocator(SLOTS, n, policy="exact")),
    "contiguous:exact:buddy": Backend(
        lambda n: ContiguousAllocator(SLOTS, n, policy="exact", placement="buddy")
    ),
    "paged:1": Backend(lambda n: PagedAllocator(SLOTS, n, 1), 1),
    "paged:4": Backend(lambda n: PagedAllocator(SLOTS, n, 4), 4),
    "paged:16": Backend(lambda n: PagedAllocator(SLOTS, n, 16), 16),
    "vmm:4": Backend(lambda n: VmmAllocator(SLOTS, n, 4), 4),
    "vmm:16 fit-prompt": Backend(lambda n: VmmAllocator(SLOTS, n, 16, adoption="fit-prompt"), 16),
}

every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=list(BACKENDS))


pages_of_4 = pytest.mark.parametrize("name", ["paged:4", "vmm:4"])


def page_allocator(name: str, tokens: int) -> PageAllocator:
    """An allocator over pages, with its books open to a test."""
    allocator = BACKENDS[name].make(tokens)
    assert isinstance(allocator, PageAllocator)
    return allocator


def slots_of(allocator: Allocator, seq: object) -> list[int]:
    """Physical bytes that a sequence holds."""
    return [at for start, stop in allocator.spans(seq) for at in range(start, stop)]


def tokens_of(name: str, num_tokens: int) -> Prefix:
    """A prompt as runs of one token each, all its own."""
    return [(f"{name} {i}", 1) for i in range(num_tokens)]
