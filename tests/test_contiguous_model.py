"""The contiguous allocator, step by step, against one flag per slot and plain dictionaries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contiguous.placement import PLACEMENTS
from kvalloc.contiguous.policies import POLICIES
from kvalloc.contract import NeverFits, OutOfMemory, Usage
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.tests.arena_bitmap import Bitmap

GEOMETRY = KVGeometry("odd", (LayerShape(1, 3), LayerShape(2, 1, tensors=1)), 2, "float16")
TOKEN_BYTES = 16  # 2 · 1 · 3 · 2 + 1 · 2 · 1 · 2


class Model:
    """The contract's words, taken literally, one sequence at a time."""

    def __init__(self, slots: int, policy: str, rule: str, limit: int | None) -> None:
        self.bitmap = Bitmap(slots, rule)
        self.policy, self.limit = policy, limit
        self.longest = max(size for _, size in self.bitmap.intervals())
        self.start: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.room: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.away: dict[int, tuple[int, int]] = {}  # length and reservation

    def missing(self, seq: int) -> type[Exception] | None:
        """What a verb raises for a sequence that is not in the arena."""
        if seq in self.away:
            return ValueError
        return None if seq in self.length else KeyError

    def refusal(self, needed: int, blocked: bool = False) -> tuple[object, ...]:
        largest = max((size for _, size in self.bitmap.intervals()), default=0)
        return "refused", needed, sum(self.bitmap.free), largest, blocked

    def place(self, seq: int, room: int, roomy: int) -> tuple[object, ...] | None:
        """Hold ``room`` slots at a place where ``roomy`` are free."""
        start = self.bitmap.choose(self.bitmap.rounded(roomy)) if roomy else 0
        if start is None:
            return self.refusal(self.bitmap.rounded(roomy))
        held = self.bitmap.rounded(room)
        start = start if room else 0
        self.bitmap.mark(start, held, False)
        self.start[seq], self.held[seq], self.room[seq] = start, held, room
        return None

    def admit(self, seq: int, tokens: int, new: int, headroom: int) -> object:
        if seq in self.length or seq in self.away:
            return ValueError
        power = 0 if new == 0 else next(2**i for i in range(9) if 2**i >= new)
        extra = {"max": new, "oracle": new, "pow2": power, "exact": 0}.get(self.policy)
        limit = self.longest + 99 if self.limit is None else self.limit
        room = limit if extra is None else min(tokens + extra, limit)
        roomy = tokens + headroom
        if roomy > limit or max(roomy, room) > self.longest:
            return NeverFits
        room = room if self.policy == "exact" else max(room, roomy)
        refusal = self.place(seq, room, max(room, roomy))
        if refusal is None:
            self.length[seq] = tokens
        return refusal

    def grow(self, seqs: list[int], tokens: int, stop: bool) -> object:
        if wrong := [error for error in map(self.missing, seqs) if error]:
            return wrong[0]
        if len(set(seqs)) < len(seqs):
            return ValueError
        if self.limit is not None and any(self.length[s] + tokens > self.limit for s in seqs):
            return NeverFits
        if seqs and tokens > len(self.bitmap.free):
            return NeverFits
        refused = {}
        for seq in seqs:
            refusal = self.grow_one(seq, self.length[seq] + tokens)
            if refusal is not None:
                refused[seq] = refusal
                if stop:
                    break
        return refused

    def grow_one(self, seq: int, wanted: int) -> tuple[object, ...] | None:
        start, held = self.start[seq], self.held[seq]
        if wanted > held:
            if self.policy != "exact":
                return self.refusal(wanted - held, blocked=True)
            if held == 0:
                refusal = self.place(seq, wanted, wanted)
                if refusal is not None:
                    return refusal
            else:
                larger = self.bitmap.extended(start, held, wanted)
                if larger is None:
                    return self.refusal(self.bitmap.rounded(wanted) - held, blocked=True)
                self.bitmap.mark(start + held, larger - held, False)
                self.held[seq] = larger
        self.length[seq] = wanted
        self.room[seq] = max(self.room[seq], wanted)
        return None

    def release(self, seq: int) -> object:
        if self.away.pop(seq, None):
            return None
        if seq not in self.length:
            return KeyError
        self.bitmap.mark(self.start[seq], self.held[seq], True)
        for book in (self.start, self.held, self.room, self.length):
            del book[seq]
        return None

    def fork(self, parent: int, child: int) -> object:
        if error := self.missing(parent):
            return error
        if child in self.length or child in self.away:
            return ValueError
        room = self.room[parent]
        refusal = self.place(child, room, room)
        if refusal is None:
            self.length[child] = self.length[parent]
        return refusal

    def truncate(self, seq: int, tokens: int) -> object:
        if error := self.missing(seq):
            return error
        if tokens > self.length[seq]:
            return ValueError
        self.length[seq] = tokens
        if self.policy == "exact":
            kept = self.bitmap.rounded(tokens)
            self.bitmap.mark(self.start[seq] + kept, self.held[seq] - kept, True)
            self.held[seq], self.room[seq] = kept, tokens
        return None

    def offload(self, seq: int) -> object:
        if error := self.missing(seq):
            return error
        away = self.length[seq], self.room[seq]
        self.release(seq)
        self.away[seq] = away
        return None

    def restore(self, seq: int, headroom: int) -> object:
        if seq not in self.away:
            return ValueError if seq in self.length else KeyError
        length, room = self.away[seq]
        roomy = length + headroom
        if roomy > self.longest or (self.limit is not None and roomy > self.limit):
            return NeverFits
        room = room if self.policy == "exact" else max(room, roomy)
        refusal = self.place(seq, room, max(room, roomy))
        if refusal is None:
            self.length[seq] = length
            del self.away[seq]
        return refusal

    def usage(self) -> Usage:
        live, room, held = (sum(b.values()) for b in (self.length, self.room, self.held))
        free = sum(self.bitmap.free)
        largest = max((size for _, size in self.bitmap.intervals()), default=0)
        slots = (len(self.bitmap.free), live, held, room - live, held - room, free, largest, 0)
        return Usage._make([*(n * TOKEN_BYTES for n in slots), 8 * len(self.length)])


def told(call: Any, *args: Any, **kwargs: Any) -> object:
    """What a call says, in the model's words: a type of error, a refusal, a dict or None."""
    try:
        answer = call(*args, **kwargs)
    except OutOfMemory as refusal:
        return words(refusal)
    except (ValueError, KeyError) as error:
        return type(error)
    return {s: words(r) for s, r in answer.items()} if isinstance(answer, dict) else answer or None


def words(refusal: OutOfMemory) -> tuple[object, ...]:
    assert refusal.unit == "tokens"
    return "refused", refusal.needed, refusal.free, refusal.largest_free, refusal.blocked


SEQ = st.integers(0, 7)
STEP: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(
        st.just("admit"), SEQ, st.integers(0, 12), st.integers(0, 12), st.sampled_from([0, 0, 1, 3])
    ),
    st.tuples(
        st.just("grow"), st.lists(SEQ, max_size=5, unique=True), st.integers(0, 4), st.booleans()
    ),
    st.tuples(st.just("grow all"), st.just([]), st.integers(1, 3), st.booleans()),
    st.tuples(st.just("grow"), st.lists(SEQ, max_size=3), st.just(1), st.booleans()),
    st.tuples(st.just("release"), SEQ),
    st.tuples(st.just("fork"), SEQ, SEQ),
    st.tuples(st.just("truncate"), SEQ, st.integers(0, 9)),
    st.tuples(st.just("offload"), SEQ),
    st.tuples(st.just("restore"), SEQ, st.sampled_from([0, 0, 2])),
)


@pytest.mark.parametrize("rule", PLACEMENTS)
@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=50)
@given(
    slots=st.integers(1, 60),
    limit=st.none() | st.integers(1, 20),
    steps=st.lists(STEP, min_size=8, max_size=50),
)
def test_every_step_does_and_says_what_the_model_does(
    policy: str, rule: str, slots: int, limit: int | None, steps: list[tuple[Any, ...]]
) -> None:
    """Cases 14, 16, 17, 18: refusals change nothing, nothing aliases, a drain frees all."""
    if policy == "limit" and limit is None:
        limit = 7
    model = Model(slots, policy, rule, limit)
    memory = slots * TOKEN_BYTES + 5  # a remainder that no token fits in
    allocator = ContiguousAllocator(GEOMETRY, memory, policy=policy, placement=rule, limit=limit)
    assert allocator.capacity == model.longest
    for verb, *args in steps:
        if verb == "admit":
            seq, tokens, new, headroom = args
            answer = told(
                allocator.admit, seq, tokens, max_new=new, expected_new=new, headroom=headroom
            )
            assert answer == model.admit(seq, tokens, new, headroom)
        elif verb == "restore":
            seq, headroom = args
            answer = told(allocator.restore, seq, headroom=headroom)
            assert answer == model.restore(seq, headroom)
        elif verb in ("release", "fork", "truncate", "offload"):
            assert told(getattr(allocator, verb), *args) == getattr(model, verb)(*args)
        else:
            seqs, tokens, stop = args
            seqs = list(model.length) if verb == "grow all" else seqs
            answer = told(allocator.grow, seqs, tokens, stop_at_refusal=stop)
            wanted = model.grow(seqs, tokens, stop)
            assert answer == wanted
            if isinstance(wanted, dict):
                assert isinstance(answer, dict) and list(answer) == list(wanted), "in order"
        check_books(allocator, model)
    for seq in [*model.length, *model.away]:
        allocator.release(seq)
    assert allocator.usage().free == slots * TOKEN_BYTES
    assert allocator.usage().reserved == allocator.usage().table_bytes == 0


def check_books(allocator: ContiguousAllocator, model: Model) -> None:
    allocator.check_invariants()
    usage = allocator.usage()
    assert usage == model.usage()
    assert usage.reserved + usage.free == usage.capacity
    assert usage.live + usage.reservation + usage.tail == usage.reserved
    for seq, length in model.length.items():
        start, held = model.start[seq], model.held[seq]
        span = (start * TOKEN_BYTES, (start + held) * TOKEN_BYTES)
        assert allocator.spans(seq) == ([span] if held else [])
        assert allocator.length(seq) == length
    for seq, (length, _) in model.away.items():
        assert allocator.length(seq) == length and told(allocator.spans, seq) is ValueError
