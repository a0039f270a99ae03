"""What a replay leaves behind: exact peaks, and a series that is thinned evenly."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from kvalloc.contract import Usage
from kvalloc.experiments.recorder import MAX_POINTS, Recorder, in_tokens


def usage(live: int, reserved: int, free: int, largest: int) -> Usage:
    waste = reserved - live
    return Usage(reserved + free, live, reserved, 0, waste, free, largest, 0, live)


def evenly_spaced(steps: Sequence[int]) -> bool:
    return len({b - a for a, b in pairwise(steps)}) <= 1


@pytest.mark.parametrize("num", [1, MAX_POINTS, MAX_POINTS + 1, 2 * MAX_POINTS + 1, 17_000])
def test_series_are_thinned_and_peaks_are_not(num: int) -> None:
    recorder = Recorder()
    for step in range(num):
        peak = step == num - 1 and num > 1  # at an odd place, which thinning leaves out
        recorder.sample(step, usage(90 if peak else 5, 95 if peak else 20, 5, 1 if peak else 5))
    steps = recorder.series["step"]
    assert recorder.num_steps == num
    assert len(steps) <= MAX_POINTS and len(steps) >= min(num, MAX_POINTS // 2)
    assert steps[0] == 0 and evenly_spaced(steps)
    assert {len(values) for values in recorder.series.values()} == {len(steps)}
    if num > 1:
        assert (recorder.peak_live, recorder.peak_reserved, recorder.peak_waste) == (90, 95, 15)
        assert recorder.peak_fragmentation == 1 - 1 / 5
        assert recorder.peak_table_bytes == 90


def test_tokens_are_whole_where_they_come_out_even() -> None:
    assert in_tokens(6144, 2048) == 3 and isinstance(in_tokens(6144, 2048), int)
    assert in_tokens(1, 8) == 0.125
