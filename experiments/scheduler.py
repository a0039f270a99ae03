"""Who runs when: admission, preemption and lifetime of requests, in a fixed order of steps.

One step is: (0) the waiting queue is tried, first in first out, its head blocks; (1) arrivals
are admitted in trace order, and what was placed is computed; (2) every active sequence, in order
of admission, grows by one token, and one that produced its last token is released before the next
one grows.

The whole batch grows in one call that stops at the first refusal. That is exactly the
sequential definition: what is released in between can only help those behind it, so sequences
that were served are served alike, and before the refused one is judged everything that
finished before it is released. Where prefixes are cached, what is released may also save one
from eviction: there a batch ends behind whoever finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from ..contract import Allocator, NeverFits, OutOfMemory, Prefix
from ..sequences import Ints, at_least_one
from .errors import BadInput
from .scheduling import Counts, Endings, OnFailure, OnFull, Placed, Prefill, check_start
from .trace import whole_numbers


class Scheduler:
    """Requests ``0 … N − 1`` on one allocator.

    Parameters
    ----------
    allocator
        Whose memory it is, empty; nobody else may use it.
    prompt, output, max_new
        int64 ``[N]`` tokens of each request.
    on_full
        A refused admission waits (``queue``) or is lost (``reject``).
    on_failure
        A refused growth makes room by preempting, whose tokens are computed again later
        (``recompute``) or wait in host memory (``swap``), or loses the sequence (``drop``).
    max_running
        Admission waits while so many requests run; None for no bound.
    prefix
        Runs of each prompt (``Allocator.admit``), for sharing; None shares nothing.
    prefill
        Called in every step with the prompts placed in it, perhaps none: all admissions are made,
        nobody has grown or left yet.
    """

    def __init__(
        self,
        allocator: Allocator,
        prompt: Ints,
        output: Ints,
        max_new: Ints,
        *,
        on_full: OnFull = "queue",
        on_failure: OnFailure = "recompute",
        max_running: int | None = None,
        prefix: Sequence[Prefix] | None = None,
        prefill: Prefill | None = None,
    ) -> None:
        prompt, output, max_new = (
            whole_numbers(name, column)
            for name, column in (("prompt", prompt), ("output", output), ("max_new", max_new))
        )
        if not prompt.shape == output.shape == max_new.shape == (prompt.size,):
            raise ValueError("prompt, output and max_new must be columns of one length")
        if max_running is not None:
            max_running = at_least_one("max_running", max_running)
        check_start(allocator, max_new, on_full, on_failure)
        self.allocator = allocator
        self.counts = Counts()
        self.active: list[int] = []
        """Running requests in order of admission."""
        self.waiting: deque[int] = deque()
        self.refusals: list[tuple[int, OutOfMemory]] = []
        """First refusals of this step: request and reason."""
        self._prompt, self._output, self._max_new = prompt, output, max_new
        self._on_full, self._on_failure = on_full, on_failure
        self._max_running, self._prefix, self._prefill = max_running, prefix, prefill
        self._placed: list[Placed] = []  # in this step
        self._windowed = any(shape.window for shape in allocator.geometry.layers)
        self._endings = Endings()  # of active requests
        self._produced: dict[int, int] = {}  # of preempted requests
        self._swapped: set[int] = set()  # preempted requests in host memory
        self._refused: set[int] = set()  # refused before in this stay in the queue
        self._stuck_at: int | None = None  # free bytes when the head was refused last

    def step(self, arrivals: range) -> None:
        """Run one step; ``arrivals`` are the requests that arrive in it.

        Raises
        ------
        BadInput
            A request is refused though nobody runs: the system has less memory than the cache
            may take. The step is not finished, and the scheduler of no further use.
        """
        self.refusals.clear()
        joined: list[int] = []
        while self.waiting and self._worth_trying() and self._has_room(joined):
            if not self._admit(self.waiting[0], joined):
                break
            self.waiting.popleft()
        for request in arrivals:
            blocked = self._on_full == "queue" and len(self.waiting) > 0
            if blocked or not self._has_room(joined) or not self._admit(request, joined):
                self.waiting.append(request)
        if self._prefill is not None:
            placed, self._placed = self._placed, []
            self._prefill(placed)
        if joined:
            self.active += joined
            for request in joined:
                self._endings.enter(request, self._remaining(request))
            self._retire(len(self.active))  # those without any output
        self._endings.tick()
        self._grow_all()

    # ------------------------------------------------------------------ admission

    def _has_room(self, joined: list[int]) -> bool:
        return self._max_running is None or len(self.active) + len(joined) < self._max_running

    def _worth_trying(self) -> bool:
        """Nothing was freed since the head of the queue was refused: it would be again."""
        return self._stuck_at is None or (
            self._windowed and self.allocator.usage().free > self._stuck_at
        )

    def _admit(self, request: int, joined: list[int]) -> bool:
        """True if the request is dealt with: placed, lost, or told that it never fits."""
        produced = self._produced.get(request, 0)
        remaining = self._remaining(request)
        tokens = self._prompt.item(request) + produced
        queued = self._on_full == "queue" or request in self._produced
        headroom = int(queued and self._on_failure != "drop" and remaining > 0)
        limit = self.allocator.limit
        if limit is not None and tokens + remaining > limit:
            self._lose(request)
            return True
        try:
            self.counts.allocations += 1
            if request in self._swapped:
                self.allocator.restore(request, headroom=headroom)
                cached = tokens
            else:
                cached = self.allocator.admit(
                    request,
                    tokens,
                    max_new=max(self._max_new.item(request) - produced, 1 if produced else 0),
                    expected_new=remaining,
                    headroom=headroom,
                    prefix=None if self._prefix is None else self._prefix[request],
                )
        except NeverFits:
            self._lose(request)
            return True
        except OutOfMemory as refusal:
            return self._refuse(request, refusal, bool(self.active or joined))
        self._book_admission(request, tokens, cached)
        joined.append(request)
        if self._prefill is not None and cached < tokens:
            self._placed.append(Placed(request, tokens, cached))
        return True

    def _book_admission(self, request: int, tokens: int, cached: int) -> None:
        self._stuck_at = None
        self._refused.discard(request)
        if request in self._swapped:
            self._swapped.remove(request)
            self.counts.swapped_tokens += tokens
        elif request in self._produced:
            self.counts.recomputed_tokens += tokens - cached
        else:
            self.counts.admitted += 1
            self.counts.hit_tokens += cached

    def _lose(self, request: int) -> None:
        """A request that can never fit is told so, and what is left of it goes."""
        self.counts.never_fit += 1
        self.counts.rejected += request not in self._produced
        if request in self._swapped:
            self._swapped.remove(request)
            self.counts.allocations += 1
            self.allocator.release(request)

    def _refuse(self, request: int, refusal: OutOfMemory, may_free: bool) -> bool:
        if request not in self._refused:
            self.counts.fragmentation_failures += refusal.fragmented
            self.refusals.append((request, refusal))
        if self._on_full == "reject" and request not in self._produced:
            self.counts.rejected += 1
            return True
        if not may_free:
            raise BadInput(
                f"nothing runs, and request {request} does not fit ({refusal}): the system has "
                "less memory than the cache may take; give the cache less, or free some"
            ) from refusal
        self._refused.add(request)
        self._stuck_at = self.allocator.usage().free if self._windowed else 0
        return False

    def _remaining(self, request: int) -> int:
        return self._output.item(request) - self._produced.get(request, 0)

    # ------------------------------------------------------------------ growth

    def _grow_all(self) -> None:
        done = 0  # sequences before this one have grown
        while done < len(self.active):
            self.counts.allocations += 1
            end = self._batch_end(done)
            refused = self.allocator.grow(self.active[done:end], stop_at_refusal=True)
            if refused:
                first: Any = next(iter(refused))
                end = self.active.index(first, done)
            self.counts.tokens += end - done
            num_retired = self._retire(end)
            done = end - num_retired
            if refused and not num_retired:
                done = self._fail(done, next(iter(refused.values())))

    def _batch_end(self, done: int) -> int:
        """Where the batch ends that begins at ``done``: with the active sequences.

        Or behind the first that finishes, where pages of its may save a prefix from eviction.
        """
        ending = self._endings.due() if self._prefix is not None else ()
        return self.active.index(ending[0], done) + 1 if ending else len(self.active)

    def _retire(self, end: int) -> int:
        """Release those of the first ``end`` that have produced everything; returns how many."""
        ending = self._endings.due()
        if not ending:
            return 0
        finished, at = [], 0
        for request in ending:
            at = self.active.index(request, at)
            if at >= end:
                break
            finished.append((at, request))
        for i, request in reversed(finished):
            self.allocator.release(request)
            del self.active[i]
            self._endings.leave(request)
        self.counts.allocations += len(finished)
        self.counts.completed += len(finished)
        if finished:
            self._stuck_at = None
        return len(finished)

    def _fail(self, i: int, refusal: OutOfMemory) -> int:
        """Deal with the refused growth of the i-th; returns where to go on."""
        self.counts.growth_failures += 1
        self.counts.fragmentation_failures += refusal.fragmented
        request = self.active[i]
        self.refusals.append((request, refusal))
        length, capacity = self.allocator.length(request), self.allocator.capacity
        hopeless = not self._windowed and length + 1 > capacity
        if hopeless or self._on_failure == "drop":
            self._leave(i)
            self.counts.never_fit += hopeless and self._on_failure != "drop"
            return i
        victim = i if refusal.fragmented or refusal.blocked else len(self.active) - 1
        preempted = self.active[victim]
        left = self._endings.left(preempted) + 1  # it has not grown in this step
        self._produced[preempted] = int(self._output[preempted]) - left
        self._leave(victim, swap=self._on_failure == "swap")
        self.waiting.appendleft(preempted)
        self.counts.preemptions += 1
        return i

    def _leave(self, i: int, *, swap: bool = False) -> None:
        request = self.active.pop(i)
        if swap:
            self.allocator.offload(request)
            self._swapped.add(request)
        else:
            self.allocator.release(request)
        self.counts.allocations += 1
        self._endings.leave(request)
        self._stuck_at = None
