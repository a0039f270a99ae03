"""Scenes of every verb of a mapped cache, for the driver calls of the last step to fail in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.pages.exchange import exchange
from kvalloc.tests.state_machine import Walk
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.driver import Driver

PAGE = 4096
# 128 bytes per token and tensor: 32 tokens in a page of 4,096.
PLAIN = KVGeometry("plain", (LayerShape(2, 16),) * 2, 4, "float32", max_context=400)
WINDOWED = KVGeometry(
    "windowed", (LayerShape(2, 16, window=24), LayerShape(2, 16)), 2, "float32", max_context=400
)
# 3,072 bytes per token and tensor: tokens straddle pages, and 4 of them fill a unit of 3 pages.
STRADDLING = KVGeometry("straddling", (LayerShape(3, 256),), 3, "float32", max_context=40)


class Scene:
    """A cache, and a model of what it holds."""

    def __init__(self, cache: VmmKVCache) -> None:
        self.cache = cache
        self.walk = Walk(cache, 0)

    def admit(self, seq: int, tokens: int, topic: int | None = None) -> None:
        contents = [(seq if topic is None else topic) * 1000 + i for i in range(tokens)]
        prefix = None if topic is None else [(content, 1) for content in contents]
        cached = self.cache.admit(seq, tokens, prefix=prefix)
        self.walk.tokens[seq] = contents
        self.walk.write([seq], [tokens - cached])

    def grow(self, *seqs: int) -> None:
        refused = self.cache.grow(list(seqs))
        served = [seq for seq in seqs if seq not in refused]
        for seq in served:
            self.walk.tokens[seq].append(seq * 1000 + 999)
        self.walk.write(served, None)
        if refused:
            raise next(iter(refused.values()))

    def fork(self, parent: int, child: int) -> None:
        self.cache.fork(parent, child)
        self.walk.tokens[child] = list(self.walk.tokens[parent])

    def release(self, seq: int) -> None:
        self.cache.release(seq)
        self.walk.tokens.pop(seq, None)

    def truncate(self, seq: int, tokens: int) -> None:
        self.cache.truncate(seq, tokens)
        del self.walk.tokens[seq][tokens:]

    def exchange(self, *sources: int) -> None:
        """The sequence of each place, from 1 on, takes over the tokens of its source."""
        seqs = range(1, len(sources) + 1)
        exchange(self.cache, seqs, sources)
        before = dict(self.walk.tokens)
        for seq, source in zip(seqs, sources, strict=True):
            self.walk.tokens[seq] = list(before[source])

    def reclaim(self) -> None:
        self.cache.reclaim()

    def offload(self, seq: int) -> None:
        self.cache.offload(seq)
        self.walk.away[seq] = self.walk.tokens.pop(seq)

    def restore(self, seq: int) -> None:
        self.cache.restore(seq)
        self.walk.tokens[seq] = self.walk.away.pop(seq)


Step = tuple[Any, ...]
"""A verb of ``Scene`` and its arguments."""


@dataclass(frozen=True)
class Scenario:
    """Steps that go well, then the one whose driver calls fail."""

    prepare: list[Step]
    act: Step
    pages: int = 60
    geometry: KVGeometry = PLAIN
    options: dict[str, Any] = field(default_factory=dict)

    def make(self, driver: Driver) -> VmmKVCache:
        memory = self.pages * PAGE
        return VmmKVCache(self.geometry, memory, PAGE, driver=driver, max_rows=16, **self.options)


SCRUB = {"scrub": True}
GUARD = {"guard": "zero"}
SHARED: list[Step] = [("admit", 1, 70), ("fork", 1, 2), ("grow", 1, 2)]
WINDOW: list[Step] = [("admit", 1, 96), ("admit", 2, 64), ("grow", 1, 2)]
BEAMS: list[Step] = [("admit", 1, 70), ("fork", 1, 2), ("admit", 3, 70), ("grow", 1, 2, 3)]
SCENARIOS = {
    "admit": Scenario([], ("admit", 1, 70)),
    "admit where warm pages are taken back": Scenario(
        [("admit", 1, 40), ("release", 1), ("admit", 2, 20)], ("admit", 3, 130), pages=24
    ),
    "admit beside a holder of the prefix": Scenario([("admit", 1, 70, 7)], ("admit", 2, 100, 7)),
    "admit a prefix without holder": Scenario(
        [("admit", 1, 70, 7), ("release", 1), ("admit", 2, 10)], ("admit", 3, 100, 7)
    ),
    "admit where the index must shrink": Scenario(
        [("admit", 1, 70, 7), ("release", 1)], ("admit", 2, 160), pages=24, options=SCRUB
    ),
    "grow": Scenario([("admit", 1, 32), ("admit", 2, 32)], ("grow", 1, 2)),
    "grow where warm pages are taken back": Scenario(
        [("admit", 1, 32), ("admit", 2, 32), ("admit", 3, 90), ("release", 3)],
        ("grow", 1, 2),
        pages=24,
    ),
    "grow past a window": Scenario(
        [("admit", 1, 64), ("admit", 2, 96)], ("grow", 1, 2), geometry=WINDOWED, options=SCRUB
    ),
    "fork": Scenario(
        [("admit", 1, 70), ("admit", 3, 40), ("release", 3)], ("fork", 1, 2), options=SCRUB
    ),
    "fork past a window": Scenario(WINDOW, ("fork", 1, 3), geometry=WINDOWED),
    "fork of a prefix": Scenario(
        [("admit", 1, 70, 7), ("admit", 2, 80, 7)], ("fork", 2, 3), options=SCRUB
    ),
    "fork where warm pages are taken back": Scenario(
        [("admit", 1, 70), ("admit", 2, 60), ("release", 2)], ("fork", 1, 3), pages=20
    ),
    "truncate through a page of another": Scenario(SHARED, ("truncate", 2, 40), options=SCRUB),
    "truncate where warm pages are taken back": Scenario(
        [*SHARED, ("admit", 3, 32), ("release", 3)], ("truncate", 2, 40), pages=20
    ),
    "truncate past a window": Scenario(
        [*WINDOW, ("fork", 1, 3)], ("truncate", 3, 94), geometry=WINDOWED, options=SCRUB
    ),
    "truncate a prefix": Scenario(
        [("admit", 1, 70, 7), ("admit", 2, 80, 7)], ("truncate", 2, 40), options=SCRUB
    ),
    "truncate inside a unit of a prefix": Scenario(
        [("admit", 1, 13, 7)], ("truncate", 1, 9), geometry=STRADDLING
    ),
    "truncate inside a unit of a prefix, scrubbed": Scenario(
        [("admit", 1, 13, 7)], ("truncate", 1, 9), geometry=STRADDLING, options=SCRUB
    ),
    "truncate inside a unit beside a holder": Scenario(
        [("admit", 1, 13, 7), ("admit", 2, 14, 7)], ("truncate", 2, 9), geometry=STRADDLING
    ),
    "truncate inside a unit beside a holder, scrubbed": Scenario(
        [("admit", 1, 13), ("fork", 1, 2)], ("truncate", 2, 9), geometry=STRADDLING, options=SCRUB
    ),
    "exchange": Scenario(BEAMS, ("exchange", 3, 1, 2)),
    "exchange past a window": Scenario(
        [("admit", 1, 96), ("admit", 2, 96), ("grow", 1, 2)],
        ("exchange", 2, 1),
        geometry=WINDOWED,
        options=SCRUB,
    ),
    "exchange of units": Scenario(
        [("admit", 1, 13), ("admit", 2, 13)], ("exchange", 2, 1), geometry=STRADDLING
    ),
    "reclaim": Scenario(
        [("admit", 1, 70), ("admit", 2, 90, 7), ("release", 2), ("release", 1)], ("reclaim",)
    ),
    "offload of a prefix": Scenario(
        [("admit", 1, 70, 7), ("admit", 2, 80, 7)], ("offload", 2), options=SCRUB
    ),
    "offload beside a holder": Scenario(SHARED, ("offload", 1), options=SCRUB),
    "offload past a window": Scenario(WINDOW, ("offload", 1), geometry=WINDOWED, options=SCRUB),
    "restore": Scenario([*SHARED, ("offload", 1), ("admit", 3, 100)], ("restore", 1)),
    "restore past a window": Scenario(
        [*WINDOW, ("offload", 1)], ("restore", 1), geometry=WINDOWED, options=SCRUB
    ),
    "restore where warm pages are taken back": Scenario(
        [("admit", 1, 70), ("offload", 1), ("admit", 2, 40), ("admit", 3, 60), ("release", 3)],
        ("restore", 1),
        pages=20,
    ),
    "release beside a holder": Scenario(SHARED, ("release", 1)),
    "release past a window": Scenario(WINDOW, ("release", 1), geometry=WINDOWED),
    "reclaim of tails": Scenario(
        [("admit", 1, 100), ("admit", 2, 40), ("truncate", 1, 33), ("release", 2)], ("reclaim",)
    ),
    "interleaved": Scenario(SHARED, ("admit", 3, 70), options={"layout": "interleaved"}),
}

GUARDED = {
    f"{name}, zeros behind": replace(scenario, options=scenario.options | GUARD)
    for name, scenario in SCENARIOS.items()
}
