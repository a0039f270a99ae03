"""The memories of the slow simulator: one list entry per slot or page, naming its holder.

Written from docs/design.md and docs/replay.md alone; shares no code with the package and looks at
every entry whenever it has a question.
"""

from __future__ import annotations


class Refused(Exception):
    """No room now. ``stuck``: making room elsewhere does not help this sequence."""

    def __init__(self, needed: int, free: int, *, stuck: bool = False) -> None:
        super().__init__(f"{needed} needed, {free} free")
        self.fragmented = free >= needed
        self.stuck = stuck or self.fragmented


class TooLarge(Exception):
    """No room ever."""


class Intervals:
    """Contiguous: one entry per token slot, naming its holder or None."""

    def __init__(self, capacity: int, policy: str, placement: str, limit: int | None) -> None:
        self.slots: list[int | None] = [None] * capacity
        self.policy, self.placement, self.limit = policy, placement, limit
        self.length: dict[int, int] = {}
        self.largest = max(size for _, size in self.holes())
        self.longest = self.largest if limit is None else min(self.largest, limit)

    def holes(self) -> list[tuple[int, int]]:
        """Usable free intervals (start, size), by address."""
        if self.placement == "buddy":
            return self.free_blocks()
        found: list[tuple[int, int]] = []
        for i, holder in enumerate(self.slots):
            if holder is None and i > 0 and self.slots[i - 1] is None:
                start, size = found.pop()
                found.append((start, size + 1))
            elif holder is None:
                found.append((i, 1))
        return found

    def free_blocks(self) -> list[tuple[int, int]]:
        """Largest wholly free power-of-two blocks at multiples of their own size.

        A capacity that is no power of two is cut into falling powers of two (80 = 64 + 16).
        """
        found: list[tuple[int, int]] = []
        start, end = 0, len(self.slots)
        while start < end:
            size = 1
            while (
                start % (2 * size) == 0
                and start + 2 * size <= end
                and all(holder is None for holder in self.slots[start : start + 2 * size])
            ):
                size *= 2
            if self.slots[start] is None:
                found.append((start, size))
            start += size
        return found

    def held(self, seq: int) -> int:
        return self.slots.count(seq)

    def reservation(self, tokens: int, max_new: int, remaining: int) -> int:
        """Slots that the policy sets aside for a prompt."""
        if self.policy == "limit":
            assert self.limit is not None, "contiguous:limit needs a limit"
            return self.limit
        new = {
            "max": max_new,
            "pow2": next_power_of_two(remaining) if remaining else 0,
            "oracle": remaining,
            "exact": 0,
        }[self.policy]
        return tokens + new if self.limit is None else min(tokens + new, self.limit)

    def admit(self, seq: int, tokens: int, max_new: int, remaining: int, room: int) -> None:
        """Hold an interval for the prompt, where it could grow by ``room`` tokens at once."""
        hold = self.reservation(tokens, max_new, remaining)
        find = max(hold, tokens + room)
        if self.policy != "exact":
            hold = find
        if self.placement == "buddy":
            hold, find = next_power_of_two(hold), next_power_of_two(find)
        if tokens + room > self.longest or find > self.largest:
            raise TooLarge
        fitting = [hole for hole in self.holes() if hole[1] >= find]
        if not fitting:
            raise Refused(find, self.free())
        if self.placement != "first-fit":
            fitting.sort(key=lambda hole: (hole[1], hole[0]))
        start = fitting[0][0]
        self.slots[start : start + hold] = [seq] * hold
        self.length[seq] = tokens

    def grow(self, seq: int) -> None:
        """One token more: inside what is held, else (exact) into the free slots behind it."""
        held = self.held(seq)
        if self.length[seq] == held:
            start = self.slots.index(seq)
            more = held if self.placement == "buddy" else 1
            behind = self.slots[start + held : start + held + more]
            paired = self.placement != "buddy" or start % (2 * held) == 0
            if self.policy != "exact" or not paired or behind != [None] * more:
                needed = more if self.policy == "exact" else 1
                raise Refused(needed, self.free(), stuck=True)
            self.slots[start + held : start + held + more] = [seq] * more
        self.length[seq] += 1

    def release(self, seq: int) -> None:
        self.slots = [None if holder == seq else holder for holder in self.slots]
        del self.length[seq]

    def free(self) -> int:
        return self.slots.count(None)

    def reserved_tokens(self) -> int:
        return len(self.slots) - self.free()

    def free_tokens(self) -> int:
        return self.free()

    def largest_free(self) -> int:
        return max((size for _, size in self.holes()), default=0)


class Pages:
    """Paged and vmm: one entry per page, naming its holder or None; any page will do."""

    def __init__(self, capacity: int, page: int, limit: int | None) -> None:
        self.page = page
        self.pages: list[int | None] = [None] * (capacity // page)
        self.length: dict[int, int] = {}
        held = len(self.pages) * page
        self.longest = held if limit is None else min(held, limit)

    def take(self, seq: int, count: int) -> None:
        for _ in range(count):
            self.pages[self.pages.index(None)] = seq

    def admit(self, seq: int, tokens: int, max_new: int, remaining: int, room: int) -> None:
        if tokens + room > self.longest:
            raise TooLarge
        needed = -(-(tokens + room) // self.page)
        if needed > self.free():
            raise Refused(needed, self.free())
        self.take(seq, -(-tokens // self.page))
        self.length[seq] = tokens

    def grow(self, seq: int) -> None:
        if self.length[seq] == self.pages.count(seq) * self.page:
            if self.free() == 0:
                raise Refused(1, 0)
            self.take(seq, 1)
        self.length[seq] += 1

    def release(self, seq: int) -> None:
        self.pages = [None if holder == seq else holder for holder in self.pages]
        del self.length[seq]

    def free(self) -> int:
        return self.pages.count(None)

    def reserved_tokens(self) -> int:
        return (len(self.pages) - self.free()) * self.page

    def free_tokens(self) -> int:
        return self.free() * self.page

    def largest_free(self) -> int:
        return self.free_tokens()


def next_power_of_two(n: int) -> int:
    power = 1
    while power < n:
        power *= 2
    return power
