"""What a replay leaves behind: peaks of every step, and a thinned series of some."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..contract import Usage

MAX_POINTS = 2_000
Number = int | float


def in_tokens(num_bytes: int, token_bytes: int) -> Number:
    """Bytes as tokens: an int where it comes out even."""
    tokens, rest = divmod(num_bytes, token_bytes)
    return num_bytes / token_bytes if rest else tokens


@dataclass
class Recorder:
    """Samples the books at the end of each step, in bytes; O(1) memory for any number of steps."""

    num_steps: int = 0
    peak_live: int = 0
    peak_reserved: int = 0
    peak_waste: int = 0
    peak_fragmentation: float = 0.0
    peak_table_bytes: int = 0
    series: dict[str, list[int]] = field(
        default_factory=lambda: {
            name: [] for name in ("step", "live", "reserved", "free", "largest_free")
        },
        repr=False,
    )
    _stride: int = 1

    def sample(self, step: int, usage: Usage) -> None:
        """Book one step."""
        if usage.live > self.peak_live:
            self.peak_live = usage.live
        if usage.reserved > self.peak_reserved:
            self.peak_reserved = usage.reserved
        if usage.reserved - usage.live > self.peak_waste:
            self.peak_waste = usage.reserved - usage.live
        if usage.table_bytes > self.peak_table_bytes:
            self.peak_table_bytes = usage.table_bytes
        if usage.largest_free < usage.free:
            self.peak_fragmentation = max(self.peak_fragmentation, usage.external_fragmentation)
        if self.num_steps % self._stride == 0:
            self._append(step, usage)
        self.num_steps += 1

    def _append(self, step: int, usage: Usage) -> None:
        series = self.series
        if len(series["step"]) == MAX_POINTS:
            # Keep every other point and halve the rate from here on.
            self._stride *= 2
            for name in series:
                del series[name][1::2]
            if self.num_steps % self._stride:
                return
        series["step"].append(step)
        series["live"].append(usage.live)
        series["reserved"].append(usage.reserved)
        series["free"].append(usage.free)
        series["largest_free"].append(usage.largest_free)
