"""The two ways of saying no: not now, and never."""

from __future__ import annotations

BLOCKED = {
    "reservation": "its reservation is used up: admit it with a larger max_new (pow2 and oracle: "
    "expected_new)",
    "neighbour": "the slots beside it are not free to join: offload it and restore it with the "
    "tokens that it is to grow by as headroom, which places it anew",
    "end": "the arena ends behind it: offload it and restore it with the tokens that it is to grow "
    "by as headroom, which places it anew",
}
"""Why a sequence cannot grow where it is, and what helps it."""


class OutOfMemory(Exception):
    """A refusal: nothing was changed, a later attempt may succeed.

    Attributes
    ----------
    needed, free, largest_free : int
        What would be taken, what is free, and the largest free interval, in ``unit``.
    unit : str
        ``"tokens"`` (contiguous), ``"pages"`` (paged, vmm) or ``"rows"`` (a mapped cache that
        has addresses for no further sequence).
    reason : str | None
        Why the sequence cannot grow where it is, which is the only place where it grows
        (contiguous): ``"reservation"`` (used up), ``"neighbour"`` (occupied) or ``"end"`` (of the
        arena), keys of ``BLOCKED``. None: there is no room for now.
    blocked : bool
        There is a ``reason``, so that waiting for room does not help this sequence.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        largest_free: int,
        *,
        unit: str = "tokens",
        reason: str | None = None,
    ) -> None:
        self.needed = needed
        self.free = free
        self.largest_free = largest_free
        self.unit = unit
        assert reason is None or reason in BLOCKED, reason
        self.reason = reason
        self.blocked = reason is not None

    def __str__(self) -> str:  # a scheduler refuses by the thousand and reads none of them
        why = f"the largest free run is {self.largest_free}"
        if self.reason is not None:
            why = f"but the sequence cannot grow where it is: {BLOCKED[self.reason]}"
        unit = self.unit.removesuffix("s") if self.needed == 1 else self.unit
        return f"{self.needed} {unit} needed, {self.free} free, {why}"

    def __repr__(self) -> str:  # as it stands in the dict that a batched grow returns
        return f"OutOfMemory({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_refusal, (
            self.needed,
            self.free,
            self.largest_free,
            self.unit,
            self.reason,
        )

    @property
    def fragmented(self) -> bool:
        """Enough is free, but not where it is needed."""
        return self.free >= self.needed


def _rebuild_refusal(
    needed: int, free: int, largest_free: int, unit: str, reason: str | None
) -> OutOfMemory:
    return OutOfMemory(needed, free, largest_free, unit=unit, reason=reason)


class NeverFits(ValueError):
    """The request is larger than the whole memory or beyond the model's limit.

    Told at once, so that it cannot wait at the head of a queue for ever.
    """
