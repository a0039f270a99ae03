"""The words of a scheduler: what it may choose, what it places, what it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

OnFull = Literal["queue", "reject"]
"""What happens to a refused admission."""
OnFailure = Literal["recompute", "swap", "drop"]
"""What happens to a refused growth."""


class Placed(NamedTuple):
    """A prompt that was admitted: its tokens, and how many leading ones are in memory already."""

    request: int
    tokens: int
    cached: int


Prefill = Callable[[list[Placed]], None]


@dataclass
class Counts:
    """What happened to the requests and their tokens.

    Attributes
    ----------
    hit_tokens : int
        Prompt tokens found in memory at the first admission of a request.
    recomputed_tokens : int
        Tokens that a preempted request had to compute again when it came back.
    swapped_tokens : int
        Tokens that came back from host memory instead.
    allocations : int
        Allocator calls.
    """

    admitted: int = 0
    rejected: int = 0
    never_fit: int = 0
    completed: int = 0
    growth_failures: int = 0
    fragmentation_failures: int = 0
    preemptions: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    allocations: int = 0
