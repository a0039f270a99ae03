"""Fork, truncate, offload, restore and prefixes: the same scenarios for every backend's books."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvalloc.contiguous import ContiguousAllocator
from kvalloc.contract import Allocator, NeverFits, OutOfMemory, Prefix
from kvalloc.geometry import SLOTS
from kvalloc.telemetry import MeasuredAllocator
from kvalloc.tests.backends import Backend, every_backend, slots_of


def admit(allocator: Allocator, seq: str, tokens: int, **options: Any) -> int:
    """Admit with the four tokens to generate that the reserving policy needs."""
    cached = allocator.admit(seq, tokens, max_new=4, **options)
    allocator.check_invariants()
    return cached


def drain(allocator: Allocator, *seqs: str) -> None:
    for seq in seqs:
        allocator.release(seq)
        allocator.check_invariants()
    usage = allocator.usage()
    assert usage.free == usage.capacity and usage.live == usage.reserved == 0


def books(allocator: Allocator) -> tuple[int, ...]:
    """What a refusal or a mistake must not change: counts, wherever the tokens are."""
    allocator.check_invariants()
    return tuple(allocator.usage()._replace(warm=0, largest_free=0))


@every_backend
def test_an_empty_batch_does_nothing_even_after_a_release(backend: Backend) -> None:
    allocator = backend.make(64)
    admit(allocator, "a", 5)
    assert not allocator.grow(["a"])
    allocator.release("a")
    assert allocator.grow([]) == {}
    drain(allocator)


# ---------------------------------------------------------------------- fork


@every_backend
@pytest.mark.parametrize("length", [0, 1, 10, 16, 17])
def test_a_fork_lives_on_its_own(backend: Backend, length: int) -> None:
    allocator = backend.make(128)
    admit(allocator, "parent", length)
    allocator.fork("parent", "child")
    allocator.check_invariants()
    assert allocator.length("child") == length
    shared = length // backend.page * backend.page if backend.page else 0
    assert allocator.usage().live == 2 * length - shared, "full pages are stored once"
    common = set(slots_of(allocator, "parent")) & set(slots_of(allocator, "child"))
    assert len(common) == shared, "what may still be written is not shared"
    refused = allocator.grow(["child", "parent"], 3)
    assert all(refusal.blocked for refusal in refused.values()), "only exact growth is refused"
    lengths = {seq: length if seq in refused else length + 3 for seq in ("parent", "child")}
    assert {seq: allocator.length(seq) for seq in lengths} == lengths
    common = set(slots_of(allocator, "parent")) & set(slots_of(allocator, "child"))
    assert len(common) == shared
    allocator.release("parent")
    allocator.check_invariants()
    assert allocator.length("child") == lengths["child"]
    drain(allocator, "child")


@every_backend
def test_a_fork_reserves_what_its_parent_has_left(backend: Backend) -> None:
    allocator = backend.make(128)
    admit(allocator, "parent", 16)
    before = allocator.usage()
    allocator.fork("parent", "child")
    assert allocator.usage().reservation == 2 * before.reservation
    if backend.page is None:
        assert allocator.usage().reserved == 2 * before.reserved
    else:
        assert allocator.usage().reserved == before.reserved, "16 tokens are full pages"


@every_backend
def test_a_fork_without_room_changes_nothing(backend: Backend) -> None:
    allocator = backend.make(32)
    admit(allocator, "parent", 17)
    if free := allocator.usage().free:
        allocator.admit("filler", free, max_new=0)
    before = books(allocator)
    if backend.page == 1:
        allocator.fork("parent", "child")  # all pages are full: nothing to copy
        assert slots_of(allocator, "child") == slots_of(allocator, "parent")
        return
    with pytest.raises(OutOfMemory):
        allocator.fork("parent", "child")
    assert books(allocator) == before
    with pytest.raises(KeyError):
        allocator.length("child")


# ---------------------------------------------------------------------- truncate


@every_backend
@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 20])
def test_truncate_keeps_the_first_tokens(backend: Backend, kept: int) -> None:
    allocator = backend.make(64)
    admit(allocator, "a", 18)
    allocator.grow(["a"], 2)
    before, held = allocator.usage(), slots_of(allocator, "a")
    allocator.truncate("a", kept)
    allocator.check_invariants()
    usage = allocator.usage()
    assert allocator.length("a") == usage.live == kept
    assert slots_of(allocator, "a") == held[: usage.reserved], "nothing moved"
    if backend.page:
        assert usage.reserved == -(-kept // backend.page) * backend.page
    elif before.reservation or before.tail:
        assert kept or usage.reserved in (0, before.reserved)
    assert not allocator.grow(["a"], 2)
    assert allocator.length("a") == kept + 2
    drain(allocator, "a")


def test_only_a_reservation_outlives_a_cut() -> None:
    for policy, placement, reserved in [
        ("max", "first-fit", [24, 24, 24]),
        ("exact", "first-fit", [20, 9, 0]),
        ("exact", "buddy", [32, 16, 0]),
    ]:
        allocator = ContiguousAllocator(SLOTS, 64, policy=policy, placement=placement)
        admit(allocator, "a", 20)
        found = [allocator.usage().reserved]
        for kept in (9, 0):
            allocator.truncate("a", kept)
            allocator.check_invariants()
            found.append(allocator.usage().reserved)
        assert found == reserved, policy


@every_backend
def test_a_cut_through_a_fork_leaves_the_other_whole(backend: Backend) -> None:
    allocator = backend.make(128)
    admit(allocator, "a", 32)
    allocator.fork("a", "b")
    whole = slots_of(allocator, "a")
    allocator.truncate("b", 17)
    assert not allocator.grow(["b"], 3)
    allocator.check_invariants()
    assert slots_of(allocator, "a") == whole and allocator.length("a") == 32
    common = set(whole) & set(slots_of(allocator, "b"))
    assert len(common) == (17 // backend.page * backend.page if backend.page else 0)
    drain(allocator, "a", "b")


# ---------------------------------------------------------------------- offload and restore


@every_backend
@pytest.mark.parametrize("length", [0, 1, 17, 32])
def test_there_and_back(backend: Backend, length: int) -> None:
    allocator = backend.make(64)
    admit(allocator, "a", length)
    before = books(allocator)
    allocator.offload("a")
    allocator.check_invariants()
    usage = allocator.usage()
    assert usage.free == usage.capacity and usage.live == usage.reserved == 0
    assert allocator.length("a") == length
    admit(allocator, "b", 5)
    allocator.restore("a")
    allocator.release("b")
    assert books(allocator) == before and allocator.length("a") == length
    drain(allocator, "a")


@every_backend
def test_a_sequence_in_host_memory_only_waits(backend: Backend) -> None:
    allocator = backend.make(64)
    admit(allocator, "a", 9)
    admit(allocator, "b", 9)
    allocator.offload("a")
    before = books(allocator)
    calls: list[Callable[[], object]] = [
        lambda: allocator.admit("a", 1, max_new=1),
        lambda: allocator.grow(["b", "a"]),
        lambda: allocator.fork("a", "c"),
        lambda: allocator.fork("b", "a"),
        lambda: allocator.truncate("a", 1),
        lambda: allocator.offload("a"),
        lambda: allocator.spans("a"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="'a' is offloaded"):
            call()
        assert books(allocator) == before
    drain(allocator, "a", "b")
    admit(allocator, "a", 1)  # the name is free again


@every_backend
def test_a_refused_restore_leaves_the_sequence_where_it_is(backend: Backend) -> None:
    allocator = backend.make(64)
    admit(allocator, "a", 33)
    allocator.offload("a")
    admit(allocator, "b", 32)
    before = books(allocator)
    with pytest.raises(OutOfMemory):
        allocator.restore("a")
    assert books(allocator) == before and allocator.length("a") == 33
    with pytest.raises(ValueError, match="offloaded"):
        allocator.grow(["a"])
    allocator.release("b")
    allocator.restore("a")
    drain(allocator, "a")


@every_backend
def test_restore_looks_for_headroom(backend: Backend) -> None:
    allocator = backend.make(64)
    admit(allocator, "a", 32)
    allocator.offload("a")
    admit(allocator, "b", 16)
    spare = allocator.usage().largest_free - 32
    before = books(allocator)
    with pytest.raises(OutOfMemory):
        allocator.restore("a", headroom=spare + 1)
    assert books(allocator) == before
    allocator.restore("a", headroom=spare)
    assert allocator.usage().live == 48
    assert not allocator.grow(["a"], spare), "it can grow at once by that much"
    allocator.offload("b")
    with pytest.raises(NeverFits):
        allocator.restore("b", headroom=49)
    drain(allocator, "a", "b")


# ---------------------------------------------------------------------- prefixes


@every_backend
def test_a_prefix_is_shared_in_full_units(backend: Backend) -> None:
    allocator = backend.make(256)
    runs: Prefix = [("article", 20), ("question", 13)]
    assert admit(allocator, "a", 40, prefix=runs) == 0
    again = admit(allocator, "b", 40, prefix=runs)
    assert again == (33 // backend.page * backend.page if backend.page else 0)
    assert allocator.usage().live == 80 - again
    other = admit(allocator, "c", 40, prefix=[("article", 20), ("other", 13)])
    assert other == (20 // backend.page * backend.page if backend.page else 0)
    drain(allocator, "a", "b", "c")


@every_backend
def test_another_salt_shares_nothing(backend: Backend) -> None:
    allocator = backend.make(160)
    runs: Prefix = [(token, 1) for token in range(40)]
    for seq, salt in (("a", None), ("b", "tenant"), ("c", b"tenant"), ("d", 7)):
        assert admit(allocator, seq, 33, prefix=runs[:33], salt=salt) == 0
        allocator.release(seq)
    expected = 33 // backend.page * backend.page if backend.page else 0
    for seq, salt in (("d", 7), ("c", b"tenant"), ("b", "tenant"), ("a", None)):
        assert admit(allocator, seq, 34, prefix=runs[:34], salt=salt) == expected
        allocator.release(seq)


@every_backend
def test_what_was_generated_is_not_entered(backend: Backend) -> None:
    allocator = backend.make(128)
    runs: Prefix = [(token, 1) for token in range(40)]
    admit(allocator, "a", 30, prefix=runs[:30])
    allocator.grow(["a"], 4)
    cached = admit(allocator, "b", 40, prefix=runs)
    assert cached == (30 // backend.page * backend.page if backend.page else 0)


@every_backend
def test_a_prefix_that_nobody_holds_is_free_memory(backend: Backend) -> None:
    allocator = backend.make(64)
    runs: Prefix = [(token, 1) for token in range(48)]
    admit(allocator, "a", 48, prefix=runs)
    drain(allocator, "a")
    warm = allocator.usage().warm
    assert (warm >= 48) == bool(backend.page)
    allocator.admit("hog", 64, max_new=0)
    assert allocator.usage().warm == 0, "nothing is kept from a sequence that needs it"
    drain(allocator, "hog")


def wrong_prefixes() -> dict[str, tuple[type[Exception], dict[str, Any]]]:
    return {
        "longer than the prompt": (ValueError, {"prefix": [("a", 5), ("b", 4)]}),
        "empty run": (ValueError, {"prefix": [("a", 0)]}),
        "negative run": (ValueError, {"prefix": [("a", -1)]}),
        "fraction": (TypeError, {"prefix": [("a", 1.5)]}),
        "truth as a key": (TypeError, {"prefix": [(True, 1)]}),
        "key": (TypeError, {"prefix": [(1.5, 1)]}),
        "salt": (TypeError, {"prefix": [("a", 1)], "salt": 1.5}),
    }


@every_backend
@pytest.mark.parametrize("name", wrong_prefixes())
def test_a_wrong_prefix_raises_and_changes_nothing(backend: Backend, name: str) -> None:
    error, options = wrong_prefixes()[name]
    allocator = backend.make(64)
    before = books(allocator)
    with pytest.raises(error):
        allocator.admit("a", 8, max_new=4, **options)
    assert books(allocator) == before
    admit(allocator, "a", 8)


# ---------------------------------------------------------------------- mistakes, and time


def misuses() -> dict[str, tuple[type[Exception], Callable[[Allocator], object]]]:
    """Each with ``a`` of 9 tokens, ``b`` of 9, and ``away`` in host memory."""
    return {
        "fork unknown": (KeyError, lambda x: x.fork("nobody", "c")),
        "fork onto a live one": (ValueError, lambda x: x.fork("a", "b")),
        "fork onto itself": (ValueError, lambda x: x.fork("a", "a")),
        "truncate unknown": (KeyError, lambda x: x.truncate("nobody", 1)),
        "truncate to more": (ValueError, lambda x: x.truncate("a", 10)),
        "truncate to a fraction": (TypeError, lambda x: x.truncate("a", cast(Any, 1.5))),
        "offload unknown": (KeyError, lambda x: x.offload("nobody")),
        "restore unknown": (KeyError, lambda x: x.restore("nobody")),
        "restore what is here": (ValueError, lambda x: x.restore("a")),
    }


@every_backend
@pytest.mark.parametrize("name", misuses())
def test_misuse_raises_and_changes_nothing(backend: Backend, name: str) -> None:
    error, misuse = misuses()[name]
    allocator = backend.make(64)
    for seq in ("a", "b", "away"):
        admit(allocator, seq, 9)
    allocator.offload("away")
    before = books(allocator)
    with pytest.raises(error):
        misuse(allocator)
    assert books(allocator) == before
    drain(allocator, "a", "b", "away")


@every_backend
def test_the_wrapper_passes_the_verbs_on_and_times_them(backend: Backend) -> None:
    allocator = MeasuredAllocator(backend.make(128))
    runs: Prefix = [("a", 32)]
    admit(allocator, "a", 40, prefix=runs, salt=1)
    cached = admit(allocator, "b", 40, prefix=runs, salt=1)
    assert cached == (32 if backend.page else 0)
    allocator.release("b")
    allocator.fork("a", "b")
    allocator.truncate("b", 3)
    allocator.offload("b")
    allocator.restore("b", headroom=1)
    assert {name: len(times) for name, times in allocator.clock.durations.items()} == {
        **{"admit": 2, "release": 1, "fork": 1, "truncate": 1, "offload": 1, "restore": 1},
    }
    drain(allocator, "a", "b")
