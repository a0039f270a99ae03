"""The contiguous allocator: what it reserves, what it refuses, what it will not be told."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contiguous.placement import PLACEMENTS
from kvalloc.contiguous.policies import POLICIES
from kvalloc.contract import NeverFits, OutOfMemory
from kvalloc.geometry import SLOTS, KVGeometry, LayerShape

LLAMA_3_8B = KVGeometry("llama-3-8b", (LayerShape(8, 128),) * 32, 32, "bfloat16", 8192)
KIB, GIB = 2**10, 2**30


def slots(capacity: int, policy: str = "max", **options: Any) -> ContiguousAllocator:
    return ContiguousAllocator(SLOTS, capacity, policy=policy, **options)


@pytest.mark.parametrize(
    "policy, expected_new, reserved",
    [
        ("max", 5, 40),
        ("limit", 5, 64),
        ("pow2", 0, 10),
        ("pow2", 1, 11),
        ("pow2", 5, 18),
        ("pow2", 8, 18),
        ("oracle", 5, 15),
        ("exact", 5, 10),
    ],
)
def test_what_each_policy_reserves(policy: str, expected_new: int, reserved: int) -> None:
    allocator = slots(100, policy, limit=64)
    assert allocator.admit("a", 10, max_new=30, expected_new=expected_new) == 0
    usage = allocator.usage()
    assert (usage.live, usage.reserved, usage.reservation) == (10, reserved, reserved - 10)
    assert allocator.spans("a") == [(0, reserved)]


def test_reservations_stop_at_the_limit() -> None:
    for policy in ("max", "pow2", "oracle"):
        allocator = slots(100, policy, limit=20)
        allocator.admit("a", 15, max_new=30, expected_new=30)
        assert allocator.usage().reserved == 20
    assert ContiguousAllocator(LLAMA_3_8B, GIB).limit == 8192
    assert slots(100).limit is None


def test_buddy_holds_and_reports_its_rounding() -> None:
    allocator = slots(80, placement="buddy")
    assert (allocator.capacity, allocator.usage().capacity) == (64, 80)
    allocator.admit("a", 10, max_new=9)
    usage = allocator.usage()
    assert (usage.live, usage.reserved, usage.reservation, usage.tail) == (10, 32, 9, 13)
    assert allocator.grow(["a"], 22) == {}, "the rounding may be grown into"
    usage = allocator.usage()
    assert (usage.live, usage.reserved, usage.reservation, usage.tail) == (32, 32, 0, 0)
    refusal = allocator.grow(["a"])["a"]
    assert (refusal.needed, refusal.free, refusal.blocked) == (1, 48, True)
    with pytest.raises(NeverFits):
        allocator.admit("b", 60, max_new=5)


def test_growth_past_a_reservation_is_refused() -> None:
    allocator = slots(80)
    for name in "abc":
        allocator.admit(name, 4, max_new=2)
    allocator.grow(["b"], 2)
    before = allocator.usage()
    refused = allocator.grow(["a", "b", "c"])
    assert list(refused) == ["b"] and refused["b"].blocked and refused["b"].fragmented
    assert (refused["b"].needed, refused["b"].free) == (1, 62)
    assert str(refused["b"]).endswith(
        "62 free, but the sequence cannot grow where it is: its reservation is used up: admit it "
        "with a larger max_new (pow2 and oracle: expected_new)"
    )
    assert [allocator.length(name) for name in "abc"] == [5, 6, 5]
    assert allocator.usage().live == before.live + 2
    assert list(allocator.grow(["a", "b", "c"], 3)) == ["a", "b", "c"]
    assert list(allocator.grow(["a", "b", "c"], stop_at_refusal=True)) == ["b"]
    assert [allocator.length(name) for name in "abc"] == [6, 6, 5], "c comes after the refusal"


def test_exact_growth_needs_its_own_neighbour() -> None:
    allocator = slots(30, "exact")
    for name in "abc":
        allocator.admit(name, 8)
    refused = allocator.grow(["a", "c", "b"], 4)
    assert list(refused) == ["a", "b"]
    assert (refused["a"].needed, refused["a"].free, refused["a"].largest_free) == (4, 6, 6)
    assert refused["a"].blocked and refused["a"].fragmented
    assert not refused["b"].fragmented, "c has taken what was free in the meantime"
    assert (refused["b"].free, refused["b"].blocked) == (2, True)
    refused |= allocator.grow(["c"], 3)
    assert {seq: refusal.reason for seq, refusal in refused.items()} == {
        "a": "neighbour",
        "b": "neighbour",
        "c": "end",
    }
    assert "the slots beside it are not free to join: offload it" in str(refused["a"])
    assert "the arena ends behind it: offload it" in str(refused["c"])
    allocator.release("b")
    assert allocator.grow(["a"], 8) == {}
    allocator.check_invariants()


@pytest.mark.parametrize("placement", ["first-fit", "buddy"])
@pytest.mark.parametrize("reason", ["neighbour", "end"])
def test_the_remedy_that_a_blocked_growth_names(reason: str, placement: str) -> None:
    allocator = slots(32, "exact", placement=placement)
    for name in "abcd":
        allocator.admit(name, 8)
    seq, *gone = list("acd" if reason == "neighbour" else "dab")
    for name in gone:
        allocator.release(name)
    refusal = allocator.grow([seq], 3)[seq]
    told = str(refusal)
    assert refusal.blocked and refusal.reason == reason and "to grow by as headroom" in told
    again = pickle.loads(pickle.dumps(refusal))
    assert (again.blocked, again.reason, str(again)) == (True, reason, told)
    allocator.offload(seq)
    allocator.restore(seq, headroom=3)
    assert not allocator.grow([seq])
    allocator.check_invariants()


def test_an_empty_sequence_is_placed_by_its_first_growth() -> None:
    allocator = slots(10, "exact")
    allocator.admit("empty", 0)
    allocator.admit("a", 6)
    assert allocator.spans("empty") == [] and allocator.spans("a") == [(0, 6)]
    assert allocator.grow(["empty"], 0) == {}
    refusal = allocator.grow(["empty"], 5)["empty"]
    assert (refusal.needed, refusal.free, refusal.blocked) == (5, 4, False)
    assert allocator.grow(["empty"], 4) == {}
    assert allocator.spans("empty") == [(6, 10)]


def test_headroom_is_found_and_not_taken() -> None:
    """A prompt that could not grow by its first token would be preempted at once."""
    allocator = slots(30, "exact")
    for name, size in (("a", 8), ("b", 2), ("c", 18)):
        allocator.admit(name, size)
    allocator.release("a")  # free: 8 slots at 0 and 2 at 28
    with pytest.raises(OutOfMemory) as refusal:
        allocator.admit("d", 8, headroom=1)
    assert (refusal.value.needed, refusal.value.largest_free) == (9, 8)
    with pytest.raises(NeverFits):
        allocator.admit("d", 30, headroom=1)
    allocator.admit("d", 2)
    allocator.admit("e", 2, headroom=2)
    assert allocator.usage().waste == 0, "not taken"
    assert allocator.grow(["e"], 2) == {}
    allocator.check_invariants()


def test_headroom_is_part_of_a_reservation() -> None:
    allocator = slots(30)
    allocator.admit("a", 8, max_new=0, headroom=1)
    allocator.admit("b", 8, max_new=4, headroom=1)
    assert allocator.usage().reserved == 9 + 12
    assert allocator.grow(["a"]) == {}


def test_what_can_never_fit_is_told_at_once() -> None:
    """Case 11: it would wait at the head of the queue for ever. Case 12: a full one can wait."""
    allocator = slots(80, limit=70)
    allocator.admit("a", 60, max_new=5)
    with pytest.raises(OutOfMemory):
        allocator.admit("later", 10, max_new=10)
    for prompt, max_new in ((81, 0), (71, 0)):
        with pytest.raises(NeverFits):
            allocator.admit("never", prompt, max_new=max_new)
    with pytest.raises(NeverFits, match="81 tokens can never fit"):
        slots(80).admit("never", 40, max_new=41)
    with pytest.raises(NeverFits):
        slots(80, "limit", limit=81).admit("never", 1)
    before = allocator.usage()
    for tokens in (11, 81, 2**63 - 1, 2**70):
        with pytest.raises(NeverFits):
            allocator.grow(["a"], tokens)
    assert allocator.usage() == before and allocator.length("a") == 60
    with pytest.raises(NeverFits):
        slots(80, "exact").admit("huge", 2**70)


def misuses() -> dict[str, tuple[type[Exception], Callable[[ContiguousAllocator], object]]]:
    return {
        "duplicate": (ValueError, lambda a: a.admit("a", 1, max_new=1)),
        "negative prompt": (ValueError, lambda a: a.admit("b", -1, max_new=1)),
        "negative max_new": (ValueError, lambda a: a.admit("b", 1, max_new=-1)),
        "negative expected_new": (
            ValueError,
            lambda a: a.admit("b", 1, max_new=1, expected_new=-1),
        ),
        "no max_new": (ValueError, lambda a: a.admit("b", 1)),
        "fraction": (TypeError, lambda a: a.admit("b", cast(Any, 1.5), max_new=1)),
        "truth": (TypeError, lambda a: a.admit("b", True, max_new=1)),
        "unhashable": (TypeError, lambda a: a.admit(cast(Any, ["b"]), 1, max_new=1)),
        "unknown growth": (KeyError, lambda a: a.grow(["a", "b"])),
        "repeated growth": (ValueError, lambda a: a.grow(["a", "a"])),
        "negative growth": (ValueError, lambda a: a.grow(["a"], -1)),
        "unknown release": (KeyError, lambda a: a.release("b")),
        "unknown length": (KeyError, lambda a: a.length("b")),
        "unknown spans": (KeyError, lambda a: a.spans("b")),
    }


@pytest.mark.parametrize("name", misuses())
def test_misuse_raises_and_changes_nothing(name: str) -> None:
    """Case 19 among them: a negative number of slots must not add to the free ones."""
    error, misuse = misuses()[name]
    allocator = slots(80)
    allocator.admit("a", 4, max_new=4)
    before = allocator.usage()
    with pytest.raises(error):
        misuse(allocator)
    assert allocator.usage() == before and allocator.length("a") == 4
    allocator.check_invariants()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_releasing_twice_raises(policy: str, placement: str) -> None:
    """Case 18."""
    allocator = slots(32, policy, placement=placement, limit=16)
    allocator.admit("a", 4, max_new=4, expected_new=4)
    allocator.release("a")
    with pytest.raises(KeyError, match="'a'"):
        allocator.release("a")
    usage = allocator.usage()
    assert usage.free == usage.largest_free == 32
    allocator.admit("a", 4, max_new=4, expected_new=4)  # the name may be used again


def test_constructor_names_the_remedy() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"policy": "maximum"}, "use one of max, limit"),
        ({"placement": "worst-fit"}, "use one of first-fit"),
        ({"policy": "limit"}, "pass limit="),
        ({"limit": -1}, "must not be negative"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            slots(80, **options)
    with pytest.raises(ValueError, match="smaller than one token"):
        ContiguousAllocator(LLAMA_3_8B, 128 * KIB - 1)
    with pytest.raises(ValueError, match="expected_new="):
        slots(80, "oracle").admit("a", 1, max_new=1)


def test_books_that_do_not_balance_are_noticed() -> None:
    allocator = slots(80, "exact")
    allocator.admit("a", 4)
    allocator.admit("b", 4)
    allocator._start[1] = 3  # b now overlaps a
    with pytest.raises(AssertionError, match="held twice"):
        allocator.check_invariants()


def test_the_allocator_needs_no_torch() -> None:
    script = (
        "import sys; from kvalloc.contiguous import ContiguousAllocator; assert 'torch' not in "
        "sys.modules; from kvalloc.contiguous import ContiguousKVCache; assert 'torch' in "
        "sys.modules; import kvalloc.contiguous as c; assert not hasattr(c, 'ContiguousCache')"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
