"""A slow, obvious replay written from the step order in docs/replay.md; the real one must agree.

It shares no code with the package. Counts are tokens, one token is one byte.
"""

from __future__ import annotations

from typing import Any

from kvalloc.tests.simulated_memory import Intervals, Pages, Refused, TooLarge


def memory(backend: str, capacity: int, limit: int | None) -> Intervals | Pages:
    """The memory that a SPEC string names."""
    kind, *rest = backend.split(":")
    if kind == "contiguous":
        return Intervals(capacity, rest[0], rest[1] if rest[1:] else "first-fit", limit)
    return Pages(capacity, int(rest[0]) if rest else 16, limit)


class Replay:
    """One trace on one memory."""

    def __init__(
        self,
        requests: list[dict[str, int]],
        store: Intervals | Pages,
        on_full: str,
        on_failure: str,
        limit: int | None = None,
    ) -> None:
        self.limit = limit
        self.requests, self.store = requests, store
        self.on_full, self.on_failure = on_full, on_failure
        self.queue: list[int] = []
        self.active: list[int] = []  # in order of admission
        self.produced = [0] * len(requests)
        self.admitted: set[int] = set()
        self.never: set[int] = set()
        self.refused_once: set[int] = set()  # in the present stay in the queue
        self.completed = self.tokens = self.preemptions = 0
        self.growth_failures = self.fragmentation_failures = 0
        self.series: dict[str, list[int]] = {
            name: [] for name in ("step", "live", "reserved", "free", "largest_free")
        }

    def remaining(self, i: int) -> int:
        return self.requests[i]["output"] - self.produced[i]

    def try_admit(self, i: int) -> bool:
        """True if the request is dealt with: placed, or told that it never fits."""
        request, done = self.requests[i], self.produced[i]
        if self.limit is not None and request["prompt"] + request["output"] > self.limit:
            self.never.add(i)
            return True
        # Without room for one token more, refused growth and return would take turns for ever.
        waiting = self.on_full == "queue" or i in self.admitted
        room = int(self.on_failure == "recompute" and waiting and self.remaining(i) > 0)
        max_new = max(request["max_new"] - done, 1) if done else request["max_new"]
        try:
            self.store.admit(i, request["prompt"] + done, max_new, self.remaining(i), room)
        except TooLarge:
            self.never.add(i)
            return True
        except Refused as refusal:
            if i not in self.refused_once:
                self.fragmentation_failures += refusal.fragmented
            self.refused_once.add(i)
            return False
        self.active.append(i)
        self.admitted.add(i)
        self.refused_once.discard(i)
        return True

    def step(self, now: int, arrivals: list[int]) -> None:
        while self.queue and self.try_admit(self.queue[0]):
            self.queue.pop(0)
        for i in arrivals:
            if self.on_full == "reject":
                self.try_admit(i)
            elif self.queue or not self.try_admit(i):
                self.queue.append(i)
        for i in [i for i in self.active if self.remaining(i) == 0]:
            self.finish(i)
        for i in list(self.active):
            if i in self.active:  # not preempted for one that came before
                self.grow(i)
        for name, value in (
            ("step", now),
            ("live", sum(self.store.length.values())),
            ("reserved", self.store.reserved_tokens()),
            ("free", self.store.free_tokens()),
            ("largest_free", self.store.largest_free()),
        ):
            self.series[name].append(value)

    def grow(self, i: int) -> None:
        """Grow by one token, whatever it takes; finish after the last one."""
        while i in self.active:
            try:
                self.store.grow(i)
            except Refused as refusal:
                self.growth_failures += 1
                self.fragmentation_failures += refusal.fragmented
                self.make_room(i, refusal)
            else:
                self.produced[i] += 1
                self.tokens += 1
                if self.remaining(i) == 0:
                    self.finish(i)
                return

    def make_room(self, i: int, refusal: Refused) -> None:
        hopeless = self.store.length[i] + 1 > self.store.longest
        if hopeless or self.on_failure == "drop":
            self.leave(i)
            if hopeless and self.on_failure == "recompute":
                self.never.add(i)
            return
        victim = i if refusal.stuck else self.active[-1]
        self.leave(victim)
        self.queue.insert(0, victim)
        self.preemptions += 1

    def finish(self, i: int) -> None:
        self.leave(i)
        self.completed += 1

    def leave(self, i: int) -> None:
        self.store.release(i)
        self.active.remove(i)

    def run(self) -> None:
        steps = {request["step"] for request in self.requests}
        now, quiet = min(steps, default=0), 0
        while self.active or self.queue or any(step >= now for step in steps):
            if not self.active and not self.queue:
                now = min(step for step in steps if step >= now)
            before = self.tokens, len(self.admitted), len(self.queue) + len(self.active)
            self.step(now, [i for i, r in enumerate(self.requests) if r["step"] == now])
            after = self.tokens, len(self.admitted), len(self.queue) + len(self.active)
            quiet = quiet + 1 if before == after else 0
            assert quiet < 100, f"livelock: nothing changed in the 100 steps before {now}"
            now += 1


def simulate(
    requests: list[dict[str, int]],
    capacity: int,
    backend: str,
    *,
    on_full: str,
    on_failure: str,
    limit: int | None = None,
) -> dict[str, Any]:
    """Replay ``requests`` (``step, prompt, output, max_new`` each, sorted by step).

    Parameters
    ----------
    capacity
        Token slots. Paged and vmm use whole pages of them.
    backend
        ``contiguous:max|limit|pow2|oracle|exact[:first-fit|best-fit|buddy]``, ``paged:B``,
        ``vmm[:P]``, P in tokens.
    on_full, on_failure
        ``queue`` or ``reject``; ``recompute`` or ``drop``.
    limit
        The model's context limit; a request beyond it never fits.

    Returns
    -------
    dict
        The counters of one backend in compare.json, and its series.
    """
    replay = Replay(requests, memory(backend, capacity, limit), on_full, on_failure, limit)
    replay.run()
    series = replay.series
    free = list(zip(series["free"], series["largest_free"], strict=True))
    held = list(zip(series["reserved"], series["live"], strict=True))
    return {
        "admitted": len(replay.admitted),
        "rejected": len(requests) - len(replay.admitted),
        "never_fit": len(replay.never),
        "completed": replay.completed,
        "growth_failures": replay.growth_failures,
        "fragmentation_failures": replay.fragmentation_failures,
        "preemptions": replay.preemptions,
        "peak_live": max(series["live"], default=0),
        "peak_reserved": max(series["reserved"], default=0),
        "peak_waste": max((reserved - live for reserved, live in held), default=0),
        "peak_fragmentation": max((1 - largest / f for f, largest in free if f), default=0),
        "steps": len(series["step"]),
        "tokens": replay.tokens,
        "series": series,
    }
