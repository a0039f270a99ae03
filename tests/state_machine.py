"""Random verbs of an allocator or a cache beside a dictionary model; all that is stored is read.

The one home of the operations: hypothesis draws them and shrinks what fails
(test_state_machines.py), and ``make soak`` draws a million from a seed (soak.py).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvalloc.contract import Allocator, KVCache, NeverFits, OutOfMemory, Usage
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.state_machine_contents import POSITIONS, Lost, Shadow, Tensors
from kvalloc.tests.state_machine_misuse import MISUSES, WRONG
from kvalloc.vmm.driver import DriverError

TOPICS = 3  # prompts begin with one of so many common beginnings
SALTS: tuple[int | str | None, ...] = (None, "a", 7)


class Leaked(AssertionError):
    """Memory that nobody holds is not free, or the books do not balance."""


class Walk:
    """One allocator or cache, one model, one source of chance.

    Parameters
    ----------
    seed
        Of the choices, or where they come from; it may be replaced between the verbs.
    faults
        The driver beneath: one call in some verbs is made to fail.

    Attributes
    ----------
    tokens, away : dict[int, list[int]]
        Every token of every sequence, in memory and offloaded.
    sealed, keyed : dict[int, int]
        Leading tokens of a sequence that others may read, and those that a prefix has named.
    done : Counter[str]
        Outcomes of verbs by name: ``grow``, ``grow refused``, ``grow failed``, …
    """

    def __init__(
        self,
        cache: Allocator,
        seed: int | random.Random,
        *,
        max_prompt: int = 90,
        faults: FailingDriver | None = None,
    ) -> None:
        self.cache = cache
        self.random = random.Random(seed) if isinstance(seed, int) else seed
        self.max_prompt = max_prompt
        self.faults = faults
        self.store = Tensors(cache) if isinstance(cache, KVCache) else Shadow(cache)
        self.tokens: dict[int, list[int]] = {}
        self.away: dict[int, list[int]] = {}
        self.sealed: dict[int, int] = {}
        self.keyed: dict[int, int] = {}
        self.cut = set[int]()  # nothing was written since they were truncated
        self.next_seq = 0
        self.next_writer = TOPICS * len(SALTS)
        self.done = Counter[str]()
        self.num_hits = self.num_faults = self.num_read = self.num_checks = 0

    def fresh(self) -> int:
        self.next_seq += 1
        return self.next_seq

    def contents(self, begin: int, end: int) -> list[int]:
        """New tokens at these positions, of a writer of their own."""
        self.next_writer += 1
        return [self.next_writer * POSITIONS + position for position in range(begin, end)]

    def write(self, seqs: list[int], lens: list[int] | None) -> None:
        self.store.write(seqs, lens or [1] * len(seqs), self.tokens)

    def attempt(self, verb: str, call: Callable[[], Any]) -> tuple[bool, Any]:
        """Call, perhaps while a driver call fails; a refusal changes nothing."""
        before, lengths = self.books(), self.lengths()
        self.arm()
        try:
            result = call()
        except (OutOfMemory, NeverFits, DriverError) as error:
            known = {OutOfMemory: "refused", NeverFits: "never fits"}
            self.done[f"{verb} {known.get(type(error), 'failed')}"] += 1
            if isinstance(error, DriverError) and self.faults is None:
                raise
            if self.books() != before or self.lengths() != lengths:
                raise Leaked(f"{verb} was refused and changed the books: {error}") from error
            return False, None
        finally:
            self.disarm()
        self.done[verb] += 1
        return True, result

    def arm(self) -> None:
        """Make one of the next driver calls fail, now and then."""
        if self.faults is not None and self.random.random() < 0.15:
            full = OutOfMemory(1, 0, 0, unit="pages")
            if self.random.random() < 0.3:
                self.faults.arm(self.random.randint(1, 6), full, ("create", "map", "allow"))
            else:
                self.faults.arm(self.random.randint(1, 12))

    def disarm(self) -> None:
        if self.faults is not None:
            self.num_faults += self.faults.failed
            self.faults.arm(0)

    # ------------------------------------------------------------------ verbs

    def admit(self) -> None:
        n, seq = self.random.randint(0, self.max_prompt), self.fresh()
        topic, salt = self.random.randrange(TOPICS), None
        if self.random.random() < 0.2:
            salt = self.random.choice(SALTS[1:])
        common = max(self.random.randint(0, n), self.random.randint(0, n))
        writer = topic + TOPICS * SALTS.index(salt)  # salts that leak show other tokens
        contents = [writer * POSITIONS + i for i in range(common)] + self.contents(common, n)
        options: dict[str, Any] = {"max_new": 20, "expected_new": self.random.choice([0, 10])}
        headroom = options["headroom"] = self.random.choice([0, 0, 1, 20])
        if self.random.random() < 0.6:
            options |= {"prefix": self.prefix(topic, contents[:n], common), "salt": salt}
        served, cached = self.attempt("admit", lambda: self.cache.admit(seq, n, **options))
        if not served:
            return
        assert cached == 0 or ("prefix" in options and cached < n)
        self.num_hits += cached
        self.tokens[seq] = contents
        self.sealed[seq], self.keyed[seq] = cached, n if "prefix" in options else 0
        self.write([seq], [n - cached])
        if headroom and self.random.random() < 0.3:  # it was promised
            assert not self.cache.grow([seq], headroom), "no room for the headroom admitted with"
            self.tokens[seq] += self.contents(n, n + headroom)
            self.write([seq], [headroom])

    def prefix(self, topic: int, contents: list[int], common: int) -> list[tuple[int | str, int]]:
        """The prompt as runs; what is common has the same name under any salt."""
        size = 5 if topic == 2 else 1
        runs: list[tuple[int | str, int]] = []
        for at in range(0, len(contents), size):
            held = min(size, len(contents) - at)
            alike = at + held <= common
            runs.append((f"{topic}+{at}" if alike else contents[at + held - 1], held))
        return runs

    def grow(self) -> None:
        seqs = self.random.sample(sorted(self.tokens), self.random.randint(1, len(self.tokens)))
        n, stop = self.random.choice([1, 1, 1, 2, 17]), self.random.random() < 0.3
        before, books = self.lengths(), self.books()
        self.arm()
        try:
            refused = self.cache.grow(seqs, n, stop_at_refusal=stop)
        except NeverFits:
            self.done["grow never fits"] += 1
            if self.books() != books or self.lengths() != before:
                raise Leaked("a growth beyond the limit changed the books") from None
            return
        except DriverError:
            if self.faults is None:
                raise
            self.done["grow failed"] += 1  # a batch is booked as far as it came
            grown = [seq for seq in seqs if self.cache.length(seq) != before[seq]]
        else:
            self.done["grow"] += 1
            self.done["grow refused"] += len(refused)
            assert all(isinstance(reason, OutOfMemory) for reason in refused.values())
            assert list(refused) == [seq for seq in seqs if seq in refused]
            last = next((i for i, seq in enumerate(seqs) if stop and seq in refused), len(seqs))
            assert not (stop and len(refused) > 1)
            grown = [seq for seq in seqs[:last] if seq not in refused]
        finally:
            self.disarm()
        for seq in grown:
            self.tokens[seq] += self.contents(before[seq], before[seq] + n)
        self.cut.difference_update(grown)
        self.check_lengths()
        self.write(grown, [n] * len(grown))

    def release(self) -> None:
        seq = self.random.choice(sorted([*self.tokens, *self.away]))
        if self.attempt("release", lambda: self.cache.release(seq))[0]:
            self.tokens.pop(seq, None)
            self.away.pop(seq, None)

    def fork(self) -> None:
        parent, child = self.random.choice(sorted(self.tokens)), self.fresh()
        if self.attempt("fork", lambda: self.cache.fork(parent, child))[0]:
            self.tokens[child] = list(self.tokens[parent])
            self.sealed[parent] = self.sealed[child] = len(self.tokens[parent])
            self.keyed[child] = 0
            self.cut |= {child} if parent in self.cut else set()
            self.store.settle([child], self.tokens)

    def truncate(self) -> None:
        seq = self.random.choice(sorted(self.tokens))
        n = self.random.randint(0, len(self.tokens[seq]))
        try:
            served, _ = self.attempt("truncate", lambda: self.cache.truncate(seq, n))
        except ValueError as error:
            assert "window" in str(error)
            self.done["truncate beyond window"] += 1
        else:
            if served:
                del self.tokens[seq][n:]
                self.sealed[seq] = min(self.sealed[seq], n)
                self.keyed[seq] = min(self.keyed[seq], n)
                self.cut.add(seq)
                self.store.settle([seq], self.tokens)

    def rewrite(self) -> None:
        """Write more than what is newest anew: where others read it or it is gone, a refusal."""
        if not isinstance(self.store, Tensors):
            return  # books alone have no write
        seq = self.random.choice(sorted(self.tokens))
        length = len(self.tokens[seq])
        begin = min(self.random.randint(0, length), self.random.randint(0, length))
        floors = [max(first, self.sealed[seq]) for first in self.store.first_stored(seq)]
        refusing = [layer for layer, floor in enumerate(floors) if floor > begin]
        if refusing:
            layer, n = self.random.choice(refusing), length - begin
            try:
                self.store.write_layer(layer, [seq], [n], self.contents(begin, length))
            except ValueError as error:
                assert "cannot be written: the first" in str(error)
                self.done["rewrite beyond reach"] += 1
                return
            raise Lost(f"layer {layer} took {n} tokens of {length}, the first {floors[layer]} too")
        # Who brought a prefix may write it: the tokens that its keys say.
        new = max(begin, self.keyed[seq])
        self.tokens[seq][new:] = self.contents(new, length)
        self.write([seq], [length - begin])
        self.done["rewrite"] += 1

    def offload(self) -> None:
        seq = self.random.choice(sorted(self.tokens))
        if self.attempt("offload", lambda: self.cache.offload(seq))[0]:
            self.away[seq] = self.tokens.pop(seq)

    def restore(self) -> None:
        seq, headroom = self.random.choice(sorted(self.away)), self.random.randint(0, 1)
        call = lambda: self.cache.restore(seq, headroom=headroom)  # noqa: E731
        if self.attempt("restore", call)[0]:
            self.tokens[seq] = self.away.pop(seq)
            self.store.settle([seq], self.tokens)

    def reclaim(self) -> None:
        reclaim = getattr(self.cache, "reclaim", None)
        if reclaim is not None and self.attempt("reclaim", reclaim)[0]:
            mapper = getattr(self.cache, "mapper", None)  # maps the next pages at once
            assert mapper is not None or self.cache.usage().warm == 0

    def misuse(self) -> None:
        """One wrong call: an error at once, and nothing has changed."""
        name = self.random.choice(sorted(MISUSES))
        call = MISUSES[name](self)
        if call is None:
            return
        before, lengths = self.cache.usage(), self.lengths()
        try:
            call()
        except WRONG:
            self.done["misuse"] += 1
        else:
            raise AssertionError(f"{name} was not refused")
        if self.cache.usage()._replace(warm=0) != before._replace(warm=0) or (
            self.lengths() != lengths
        ):
            raise Leaked(f"{name} was refused and changed the books")

    # ------------------------------------------------------------------ checking

    def books(self) -> Usage:
        """What a refusal must not change; which free pages are still mapped it may."""
        return self.cache.usage()._replace(warm=0)

    def lengths(self) -> dict[int, int]:
        return {seq: self.cache.length(seq) for seq in [*self.tokens, *self.away]}

    def check_lengths(self) -> None:
        model = {seq: len(content) for seq, content in {**self.tokens, **self.away}.items()}
        if self.lengths() != model:
            raise Lost(f"lengths {self.lengths()}, not {model}")

    def read_back(self) -> None:
        seqs = sorted(self.tokens)
        self.random.shuffle(seqs)
        self.num_read += self.store.read_back(seqs, self.tokens, self.cut)

    def check(self) -> None:
        """Books, lengths and contents."""
        self.cache.check_invariants()
        usage = self.cache.usage()
        if usage.reserved + usage.free != usage.capacity or usage.waste < 0:
            raise Leaked(f"the books do not balance: {usage}")
        self.check_lengths()
        self.read_back()
        self.num_checks += 1

    def possible(self) -> list[str]:
        """Verbs by weight that can be called now."""
        verbs = ["admit"] * 3 + ["misuse", "reclaim"]
        if self.tokens:
            verbs += ["grow"] * 6 + ["fork", "truncate", "offload", "rewrite", "rewrite"]
        if self.tokens or self.away:
            verbs += ["release"] * 2
        if self.away:
            verbs += ["restore"] * 2
        return verbs

    def step(self) -> None:
        """One random verb; everything is checked after it."""
        getattr(self, self.random.choice(self.possible()))()
        self.check()
        seqs = [seq for seq in sorted(self.tokens) if self.tokens[seq] and seq not in self.cut]
        if seqs and self.num_checks % 64 == 0:
            self.store.attend(seqs, self.tokens)

    def run(self, num_steps: int) -> None:
        """Random verbs, then a drain: everything is free again."""
        for _ in range(num_steps):
            self.step()
        self.drain()

    def drain(self) -> None:
        for seq in [*self.tokens, *self.away]:
            self.cache.release(seq)
        self.tokens, self.away = {}, {}
        self.check()
        usage = self.cache.usage()
        if usage.free != usage.capacity or usage.live or usage.reserved:
            raise Leaked(f"not everything is free after a drain: {usage}")
