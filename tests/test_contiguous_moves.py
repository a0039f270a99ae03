"""Moving contents over a contiguous arena: what is given up, what is kept, what fails half-way."""

from __future__ import annotations

import pytest

from kvalloc.contiguous import ContiguousKVCache
from kvalloc.geometry import KVGeometry, LayerShape
from kvalloc.tests.state_machine import Walk

WALKED = KVGeometry("walked", (LayerShape(1, 4),), 1, "float32", 200)


@pytest.mark.parametrize("policy, placement", [("max", "first-fit"), ("exact", "buddy")])
def test_scrub_leaves_zeros_wherever_no_token_is(policy: str, placement: str) -> None:
    cache = ContiguousKVCache(
        WALKED, 300 * WALKED.bytes_per_token, policy=policy, placement=placement, scrub=True
    )
    walk = Walk(cache, 3, max_prompt=60)
    for _ in range(60):
        walk.step()
        live = sum(map(len, walk.tokens.values()))
        written = cache.view(0, []).v.any(-1).any(-1)  # no value of a walk is zero
        assert int(written.sum()) == live, "remains of a sequence that gave its tokens up"
    assert min(walk.done[verb] for verb in ("truncate", "release", "offload")) > 0


def test_a_window_frees_nothing() -> None:
    """Contiguous intervals cannot let go of leading tokens: views show all of them."""
    geometry = KVGeometry("window", (LayerShape(2, 4, window=8),), 2, "float32", 200)
    cache = ContiguousKVCache(geometry, 64 * geometry.bytes_per_token, policy="exact")
    cache.admit("a", 20)
    cache.fork("a", "b")
    cache.grow(["b"], 20)
    view = cache.view(0, ["a", "b"])
    assert view.starts.tolist() == [0, 20] and view.lengths.tolist() == [20, 40]
    cache.truncate("b", 1)
    assert cache.view(0, ["b"]).lengths.tolist() == [1], "so a cut is never refused"


@pytest.mark.parametrize("policy", ["max", "exact"])
def test_a_copy_that_fails_takes_nothing(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may be out of memory for the copy itself."""
    cache = ContiguousKVCache(WALKED, 64 * WALKED.bytes_per_token, policy=policy)
    cache.admit("a", 5, max_new=3)
    cache.admit("b", 5, max_new=3)
    cache.offload("b")

    def fail(*_: object) -> None:
        raise RuntimeError("device out of memory")

    before = cache.usage()
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_copy", fail)
        patch.setattr(cache, "_write_back", fail)
        for verb, seqs in ((cache.fork, ("a", "c")), (cache.restore, ("b",))):
            with pytest.raises(RuntimeError, match="device out of memory"):
                verb(*seqs)
            cache.check_invariants()
            assert cache.usage() == before
    cache.restore("b", headroom=1)
    cache.fork("a", "c")
    cache.check_invariants()
