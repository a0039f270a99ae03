"""The same calls give the same layout, so that the GPUs of a replica can decide each for itself."""

from __future__ import annotations

import pytest

from kvalloc.experiments.built_in_traces import burst
from kvalloc.experiments.replay import Owners, replay
from kvalloc.experiments.specs import parse_spec
from kvalloc.geometry import SLOTS

SPECS = ("contiguous:max", "contiguous:exact", "contiguous:oracle:buddy", "paged:16", "vmm:16")


def owners(spec: str, slots: int) -> Owners:
    """Who held what in a replay with preemptions, and what was refused."""
    allocator = parse_spec(spec, slots=True).allocator(SLOTS, slots)
    owned = replay(burst(), allocator, owners=True).owners
    assert owned is not None
    return owned


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_calls_give_the_same_layout(spec: str) -> None:
    first, second = owners(spec, 1024), owners(spec, 1024)
    assert first.rows == second.rows and first.refusals == second.refusals
    assert len(first.rows) > 50 and first.refusals
    assert first.rows != owners(spec, 700).rows, "another memory is another layout"
