"""The words of a scheduler: what it may choose, places and counts, and when requests end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ..contract import Allocator
from ..sequences import Ints

OnFull = Literal["queue", "reject"]
"""What happens to a refused admission."""
OnFailure = Literal["recompute", "swap", "drop"]
"""What happens to a refused growth."""


class Placed(NamedTuple):
    """A prompt that was admitted: its tokens, and how many leading ones are in memory already."""

    request: int
    tokens: int
    cached: int


def check_start(
    allocator: Allocator, max_new: Ints, on_full: OnFull, on_failure: OnFailure
) -> None:
    """What would run as something else, or wait for ever, is told before the first step.

    Raises
    ------
    TypeError, ValueError
        No allocator, an unknown choice, sequences of somebody else, who may never leave, or
        requests whose ``max_new`` nobody has said.
    """
    if not isinstance(allocator, Allocator):
        raise TypeError(
            f"an allocator or a cache is needed, not {allocator!r}: make one, as in "
            "PagedAllocator(geometry, memory_bytes)"
        )
    for name, word, words in (
        ("on_full", on_full, get_args(OnFull)),
        ("on_failure", on_failure, get_args(OnFailure)),
    ):
        if word not in words:
            raise ValueError(f"unknown {name} {word!r}; choose one of {', '.join(words)}")
    if num_unsaid := int((max_new < 0).sum()):
        raise ValueError(
            f"{num_unsaid} requests do not say what they may generate: give "
            "trace.with_max_new(), which fills it in"
        )
    if reserved := allocator.usage().reserved:
        raise ValueError(
            f"the allocator holds {reserved:,} bytes of other sequences: release them, or give an "
            "empty one"
        )


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


class Endings:
    """When each active request produces its last token; time is counted in growths of the batch."""

    def __init__(self) -> None:
        self._now = 0
        self._end: dict[int, int] = {}
        self._ending: dict[int, list[int]] = {}  # the same, by time

    def enter(self, request: int, remaining: int) -> None:
        """A request becomes active that has so many tokens to produce."""
        end = self._end[request] = self._now + remaining
        self._ending.setdefault(end, []).append(request)

    def leave(self, request: int) -> None:
        """A request ends or is preempted."""
        end = self._end.pop(request)
        self._ending[end].remove(request)
        if not self._ending[end]:
            del self._ending[end]

    def tick(self) -> None:
        """All active requests grow once more."""
        self._now += 1

    def due(self) -> Sequence[int]:
        """Those that have produced everything once they have grown now, in order of admission."""
        return self._ending.get(self._now, ())

    def left(self, request: int) -> int:
        """Tokens that a request has to produce after this growth."""
        return self._end[request] - self._now
