"""The two ways of saying no: not now, and never."""

from __future__ import annotations


class OutOfMemory(Exception):
    """A refusal: nothing was changed, a later attempt may succeed.

    Attributes
    ----------
    needed, free, largest_free : int
        What would be taken, what is free, and the largest free interval, in ``unit``.
    unit : str
        ``"tokens"`` (contiguous), ``"pages"`` (paged, vmm) or ``"rows"`` (a mapped cache that
        has addresses for no further sequence).
    blocked : bool
        Waiting for room does not help this sequence: it grows only where it is (contiguous), and
        the neighbour is occupied, the arena ends, or its reservation is used up.
    """

    def __init__(
        self,
        needed: int,
        free: int,
        largest_free: int,
        *,
        unit: str = "tokens",
        blocked: bool = False,
    ) -> None:
        self.needed = needed
        self.free = free
        self.largest_free = largest_free
        self.unit = unit
        self.blocked = blocked

    def __str__(self) -> str:  # a scheduler refuses by the thousand and reads none of them
        reason = f"the largest free run is {self.largest_free}"
        if self.blocked:
            reason = "the sequence cannot grow where it is"
        unit = self.unit.removesuffix("s") if self.needed == 1 else self.unit
        return f"{self.needed} {unit} needed, {self.free} free, {reason}"

    def __repr__(self) -> str:  # as it stands in the dict that a batched grow returns
        return f"OutOfMemory({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_refusal, (
            self.needed,
            self.free,
            self.largest_free,
            self.unit,
            self.blocked,
        )

    @property
    def fragmented(self) -> bool:
        """Enough is free, but not where it is needed."""
        return self.free >= self.needed


def _rebuild_refusal(
    needed: int, free: int, largest_free: int, unit: str, blocked: bool
) -> OutOfMemory:
    return OutOfMemory(needed, free, largest_free, unit=unit, blocked=blocked)


class NeverFits(ValueError):
    """The request is larger than the whole memory or beyond the model's limit.

    Told at once, so that it cannot wait at the head of a queue for ever.
    """
