"""What a cache must be like after any of its driver calls has failed: as before, and usable."""

from __future__ import annotations

from typing import Any, Protocol

from kvalloc.contract import OutOfMemory
from kvalloc.tests.failure_scenes import PAGE, SCRUB, WINDOWED, Scenario, Scene
from kvalloc.tests.remains import check_no_remains
from kvalloc.vmm import VmmKVCache
from kvalloc.vmm.driver import Driver, DriverError
from kvalloc.vmm.guard import GUARD_TOKENS


class Faults(Protocol):
    """Makes a driver call fail, and counts what the driver has."""

    def arm(self, n: int) -> None:
        """Fail the n-th call from now on, once; 0: none."""
        ...

    def has_failed(self) -> bool:
        """Whether the call came."""
        ...

    def num_mapped(self) -> int:
        """Mappings that there are."""
        ...

    def bytes_in_use(self) -> int:
        """Physical memory that is taken."""
        ...


def zeros_of(cache: VmmKVCache) -> int:
    """Mappings of the page of zeros that the books ask for, its own address included."""
    if cache._space._zero is None:
        return 0
    plan, num = cache._space._plan, 1
    for g, group in enumerate(cache.groups):
        run = plan.run_bytes[plan.columns[g][0].reservation] // PAGE
        reach = -(-GUARD_TOKENS * group.token_bytes // PAGE)
        for ready, gone in zip(cache._ready[g].tolist(), cache._gone[g].tolist(), strict=True):
            num += min(reach, run - ready) * group.columns * (ready > gone)
    return num


def fails_at(scenario: Scenario, driver: Driver, faults: Faults, n: int) -> tuple[bool, bool]:
    """Play a scenario while its n-th call fails.

    Returns
    -------
    failed, refused
        Whether there was an n-th call, and whether the verb told of its failure.
    """
    scene = Scene(scenario.make(driver))
    cache, walk = scene.cache, scene.walk
    for verb, *arguments in scenario.prepare:
        getattr(scene, verb)(*arguments)

    def check() -> None:
        cache.check_invariants()
        walk.read_back()
        if cache.scrub:
            check_no_remains(cache)
        expected, num_created = zeros_of(cache), cache.physical.num_created
        num_created += expected > 0
        for ready, gone, group in zip(cache._ready, cache._gone, cache.groups, strict=True):
            expected += int((ready - gone).sum()) * group.columns
        assert faults.num_mapped() == expected, "mappings differ from the books"
        assert faults.bytes_in_use() == num_created * PAGE, "memory without a page"

    check()
    before = cache.usage()._replace(warm=0)
    verb, *arguments = scenario.act
    refused = False
    faults.arm(n)
    try:
        getattr(scene, verb)(*arguments)
    except (DriverError, OutOfMemory):
        refused = True
        assert cache.usage()._replace(warm=0) == before, "a refusal changed the books"
        check()
        getattr(scene, verb)(*arguments)
    failed = faults.has_failed()
    faults.arm(0)
    check()
    for seq in [*walk.tokens, *walk.away]:
        cache.release(seq)
    usage = cache.usage()
    assert usage.free == usage.capacity and not usage.live
    cache.close()
    assert faults.num_mapped() == faults.bytes_in_use() == 0
    return failed, refused


def closing_fails_at(driver: Driver, faults: Faults, n: int, **options: Any) -> tuple[bool, bool]:
    """Close a cache that holds all there is while a call fails; closing again ends it."""
    scene = Scene(Scenario([], (), geometry=WINDOWED, options=SCRUB | options).make(driver))
    scene.admit(1, 70, topic=7)
    scene.fork(1, 2)
    scene.grow(1, 2)
    scene.admit(3, 95)
    scene.offload(3)
    scene.admit(4, 20)
    scene.release(4)
    refused = False
    faults.arm(n)
    try:
        scene.cache.close()
    except DriverError:
        refused = True
        scene.cache.close()
    return faults.has_failed(), refused


def making_fails_at(driver: Driver, faults: Faults, n: int, **options: Any) -> tuple[bool, bool]:
    """Make a cache while a call fails; nothing is left of it, and the next try works."""
    scenario = Scenario([], (), options=options)
    refused = False
    faults.arm(n)
    try:
        cache = scenario.make(driver)
    except DriverError:
        refused = True
        cache = scenario.make(driver)
    failed = faults.has_failed()
    faults.arm(0)
    cache.close()
    return failed, refused
