"""Random verbs over every allocator and every cache: contents and books never differ.

``make soak`` makes a million of the same operations (soak.py, docs/reliability.md).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvalloc.contiguous.placement import Intervals
from kvalloc.paged import PagedKVCache
from kvalloc.paged import cache as paged_cache
from kvalloc.pages import allocator as pages_allocator
from kvalloc.pages.pool import PagePool
from kvalloc.pages.prefix import unit_keys
from kvalloc.tensors import check_lens
from kvalloc.tests.state_machine import Walk
from kvalloc.tests.state_machine_backends import FAILING, NAMES, walking
from kvalloc.tests.state_machine_misuse import MISUSES


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of tiny copies: on a busy machine, threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Chance = st.randoms(use_true_random=False)
LIVE = precondition(lambda self: bool(self.walk.tokens))
AWAY = precondition(lambda self: bool(self.walk.away))
ANY = precondition(lambda self: bool(self.walk.tokens or self.walk.away))


class Machine(RuleBasedStateMachine):
    """The verbs of a walk as rules, with chance in hypothesis's hands."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.end = ExitStack()
        self.walk: Walk = self.end.enter_context(walking(self.name, 0, max_prompt=60))

    def call(self, verb: str, chance: random.Random) -> None:
        self.walk.random = chance
        getattr(self.walk, verb)()

    @rule(chance=Chance)
    def admit(self, chance: random.Random) -> None:
        self.call("admit", chance)

    @LIVE
    @rule(chance=Chance)
    def grow(self, chance: random.Random) -> None:
        self.call("grow", chance)

    @LIVE
    @rule(chance=Chance, verb=st.sampled_from(["fork", "truncate", "offload", "rewrite"]))
    def change(self, chance: random.Random, verb: str) -> None:
        self.call(verb, chance)

    @ANY
    @rule(chance=Chance)
    def release(self, chance: random.Random) -> None:
        self.call("release", chance)

    @AWAY
    @rule(chance=Chance)
    def restore(self, chance: random.Random) -> None:
        self.call("restore", chance)

    @rule(chance=Chance, verb=st.sampled_from(["misuse", "reclaim"]))
    def other(self, chance: random.Random, verb: str) -> None:
        self.call(verb, chance)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.walk.random = random.Random(0)
        self.walk.check()

    def teardown(self) -> None:
        with self.end:
            self.walk.drain()


def explore(name: str, num_examples: int, num_steps: int = 25) -> None:
    of_name = type("MachineOf", (Machine,), {"name": name})
    run_state_machine_as_test(
        of_name,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.parametrize(
    "name",
    [
        "books contiguous:exact:buddy",
        "books paged:4 window",
        "books vmm:7",
        "contiguous exact windowed",
        "paged 8 windowed",
        "vmm straddling",
        "failing vmm",
    ],
)
def test_any_order_of_verbs(name: str) -> None:
    explore(name, 6)


@pytest.mark.parametrize("name", NAMES)
def test_a_walk_over_every_backend(name: str) -> None:
    with walking(name, 1) as walk:
        walk.run(90)
        for verb in ("admit", "grow", "misuse", "release"):
            assert walk.done[verb], f"the walk never came to {verb}"


@pytest.mark.parametrize("name", ["paged 8", "vmm", "books vmm:4", "contiguous exact"])
def test_walks_come_to_every_verb_and_refusal(name: str) -> None:
    with walking(name, 5, max_prompt=150) as walk:
        walk.run(500)
        done = walk.done
        assert walk.num_hits == 0 if name.startswith("contiguous") else walk.num_hits > 0
    verbs = ("admit", "grow", "fork", "restore")
    for verb in (*verbs, "truncate", "offload", "release", *(f"{verb} refused" for verb in verbs)):
        assert done[verb], f"the walk never came to {verb}"
    assert done["reclaim"] or "contiguous" in name or "paged" in name
    assert "books" in name or (done["rewrite"] and done["rewrite beyond reach"])


def test_failing_drivers_fail_in_every_verb() -> None:
    done, num_faults = Counter[str](), 0
    for name in FAILING:
        with walking(name, 2) as walk:
            walk.run(200)
            done, num_faults = done + walk.done, num_faults + walk.num_faults
    assert num_faults > 40
    assert {name.split()[0] for name in done if name.endswith("failed")} >= {"admit", "grow"}


@pytest.mark.parametrize(
    "name", ["paged 8", "vmm", "contiguous exact windowed", "books contiguous:max:first-fit"]
)
def test_every_misuse_is_refused(name: str) -> None:
    """Cases 14, 17, 18 and 19: each wrong call at least once; books and contents are intact."""
    with walking(name, 3) as walk:
        walk.run(60)
    with walking(name, 3) as walk:
        while not (len(walk.tokens) > 1 and walk.away and any(walk.tokens.values())):
            walk.step()
        for wrong in sorted(MISUSES):
            walk.random = random.Random(0)
            walk.random.choice = lambda names, wrong=wrong: (  # type: ignore[method-assign,misc]
                wrong if wrong in names else names[0]
            )
            walk.misuse()
            walk.check()
        walk.random = random.Random(0)
        only_tensors = sum(name.startswith(("write", "view")) for name in MISUSES)
        expected = len(MISUSES) - (
            only_tensors if walk.cache is not None and "books" in name else 0
        )
        assert walk.done["misuse"] >= expected
        walk.drain()


def no_salt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pages_allocator, "unit_keys", lambda p, n, unit, salt: unit_keys(p, n, unit))


def a_page_too_many_is_kept(patch: pytest.MonkeyPatch) -> None:
    put = PagePool.put
    patch.setattr(PagePool, "put", lambda self, pages: put(self, pages[: len(pages) - 1]))


def an_interval_comes_back_short(patch: pytest.MonkeyPatch) -> None:
    give_back = Intervals.give_back
    patch.setattr(
        Intervals, "give_back", lambda self, at, size: give_back(self, at, max(size - 1, 1))
    )


def writes_are_one_slot_late(patch: pytest.MonkeyPatch) -> None:
    slots_of = PagedKVCache._slots_of

    def late(self: PagedKVCache, *arguments: Any) -> Any:
        pages, offsets = slots_of(self, *arguments)
        return pages, (offsets + 1) % self.page_size

    patch.setattr(PagedKVCache, "_slots_of", late)


def sharers_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        paged_cache,
        "check_lens",
        lambda seqs, lengths, lens, sealed, first: check_lens(seqs, lengths, lens, first),
    )


def writes_reach_behind_a_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(paged_cache, "check_lens", lambda *arguments: check_lens(*arguments[:-1]))


BREAKS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "salts are ignored": ("paged 8", no_salt),
    "a page is not given back": ("books paged:4", a_page_too_many_is_kept),
    "a slot is not given back": ("books contiguous:max:first-fit", an_interval_comes_back_short),
    "a write goes one slot too far": ("paged 8", writes_are_one_slot_late),
    "a sharer writes what it shares": ("paged 8", sharers_write),
    "a write reaches behind a window": ("paged 8 windowed", writes_reach_behind_a_window),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_backend_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, break_it = BREAKS[fault]
    break_it(monkeypatch)
    with pytest.raises(AssertionError), walking(name, 0) as walk:
        walk.run(300)
