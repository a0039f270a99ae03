"""Measuring from outside: a wrapper that times every call of a cache, so that none times itself."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from .contract import Allocator, DenseView, KVCache, OutOfMemory, PagedView, Prefix, Seq, Usage

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Clock:
    """Start and duration of every timed call, in nanoseconds, by name.

    Attributes
    ----------
    starts, durations : dict of str to array
        ``perf_counter_ns`` at the call, and how long it took.
    """

    starts: dict[str, array[int]] = field(default_factory=dict)
    durations: dict[str, array[int]] = field(default_factory=dict)

    def add(self, name: str, start_ns: int, duration_ns: int) -> None:
        """Book one call."""
        if name not in self.durations:
            self.starts[name], self.durations[name] = array("q"), array("q")
        self.starts[name].append(start_ns)
        self.durations[name].append(duration_ns)

    def timed(self, name: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call and book it, refused or not."""
        start = perf_counter_ns()
        try:
            return call(*args, **kwargs)
        finally:
            self.add(name, start, perf_counter_ns() - start)

    def seconds(self, *names: str) -> float:
        """Total time of the named calls."""
        return sum(sum(self.durations.get(name, ())) for name in names) / 1e9

    def all_durations(self, *names: str) -> list[int]:
        """Durations of the named calls, in nanoseconds."""
        return [ns for name in names for ns in self.durations.get(name, ())]


class MeasuredAllocator(Allocator):
    """Any allocator, its state-changing verbs timed under their own names."""

    def __init__(self, inner: Allocator, clock: Clock | None = None) -> None:
        if not isinstance(inner, Allocator):
            raise TypeError(f"what is measured is an allocator or a cache, not {inner!r}")
        self.inner = inner
        self.clock = clock or Clock()
        self.geometry = inner.geometry
        self.limit = inner.limit

    @property
    def capacity(self) -> int:
        """Capacity of the allocator within."""
        return self.inner.capacity

    def admit(
        self,
        seq: Seq,
        tokens: int,
        *,
        max_new: int | None = None,
        expected_new: int | None = None,
        headroom: int = 0,
        prefix: Prefix | None = None,
        salt: int | str | bytes | None = None,
    ) -> int:
        """Timed ``admit``."""
        return self.clock.timed(
            "admit",
            self.inner.admit,
            seq,
            tokens,
            max_new=max_new,
            expected_new=expected_new,
            headroom=headroom,
            prefix=prefix,
            salt=salt,
        )

    def grow(
        self, seqs: Sequence[Seq], tokens: int = 1, *, stop_at_refusal: bool = False
    ) -> dict[Seq, OutOfMemory]:
        """Timed ``grow``."""
        return self.clock.timed(
            "grow", self.inner.grow, seqs, tokens, stop_at_refusal=stop_at_refusal
        )

    def release(self, seq: Seq) -> None:
        """Timed ``release``."""
        self.clock.timed("release", self.inner.release, seq)

    def fork(self, parent: Seq, child: Seq) -> None:
        """Timed ``fork``."""
        self.clock.timed("fork", self.inner.fork, parent, child)

    def truncate(self, seq: Seq, tokens: int) -> None:
        """Timed ``truncate``."""
        self.clock.timed("truncate", self.inner.truncate, seq, tokens)

    def offload(self, seq: Seq) -> None:
        """Timed ``offload``."""
        self.clock.timed("offload", self.inner.offload, seq)

    def restore(self, seq: Seq, *, headroom: int = 0) -> None:
        """Timed ``restore``."""
        self.clock.timed("restore", self.inner.restore, seq, headroom=headroom)

    def length(self, seq: Seq) -> int:
        """Length by the allocator within."""
        return self.inner.length(seq)

    def spans(self, seq: Seq) -> list[tuple[int, int]]:
        """Spans by the allocator within."""
        return self.inner.spans(seq)

    def usage(self) -> Usage:
        """Usage of the allocator within."""
        return self.inner.usage()

    def check_invariants(self) -> None:
        """Invariants of the allocator within."""
        self.inner.check_invariants()


class Measured(MeasuredAllocator, KVCache):
    """Any cache, its verbs timed under their own names.

    ``cache = Measured(PagedKVCache(…))``, and later ``cache.clock.seconds("grow")``.
    """

    inner: KVCache

    def __init__(self, inner: KVCache, clock: Clock | None = None) -> None:
        super().__init__(inner, clock)
        if not isinstance(inner, KVCache):
            raise TypeError(
                f"Measured takes a cache, not {type(inner).__name__}: for books alone use "
                "MeasuredAllocator"
            )
        self.device = inner.device

    def write(
        self,
        layer: int,
        seqs: Sequence[Seq],
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lens: Sequence[int] | None = None,
    ) -> None:
        """Timed ``write``."""
        self.clock.timed("write", self.inner.write, layer, seqs, k, v, lens=lens)

    def view(self, layer: int, seqs: Sequence[Seq]) -> DenseView | PagedView:
        """Timed ``view``."""
        return self.clock.timed("view", self.inner.view, layer, seqs)

    def close(self) -> None:
        """Timed ``close``."""
        self.clock.timed("close", self.inner.close)
