"""Every driver call of every verb fails once: nothing leaks, nothing changes, a retry works.

Over the host driver here, and over the cuda driver in processes of their own, against the
conformance library: there every call of CUDA fails as well.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvalloc.contract import OutOfMemory
from kvalloc.tests.conformance.conformance import run_in_subprocess
from kvalloc.tests.failing_driver import FailingDriver
from kvalloc.tests.failure_scenes import GUARD, GUARDED, PAGE, SCENARIOS
from kvalloc.tests.failure_script import closing_fails_at, fails_at, making_fails_at
from kvalloc.vmm.driver import VERBS
from kvalloc.vmm.host import HostDriver

FULL = OutOfMemory(1, 0, 0, unit="pages")


class HostFaults:
    """Faults of a verb as a whole."""

    def __init__(self, error: Exception | None = None) -> None:
        self.inner = HostDriver(PAGE)
        self.driver = FailingDriver(self.inner)
        self._error = error

    def arm(self, n: int) -> None:
        self.driver.arm(n, self._error, ("create", "map", "allow") if self._error else VERBS)

    def has_failed(self) -> bool:
        return self.driver.failed

    def num_mapped(self) -> int:
        return sum(area.num_mapped for area in self.inner._space._ranges.values())

    def bytes_in_use(self) -> int:
        return self.inner.bytes_in_use


@pytest.mark.parametrize("error", [None, FULL], ids=["broken", "full"])
@pytest.mark.parametrize("name", [*SCENARIOS, *GUARDED])
def test_a_failing_verb_of_the_host_driver_leaves_no_trace(
    name: str, error: Exception | None
) -> None:
    """Cases 9 and 36."""
    if error is not None and name.startswith(("offload", "release", "reclaim")):
        pytest.skip("takes no memory")
    scenarios = SCENARIOS | GUARDED
    n, failed, num_refused = 0, True, 0
    while failed:
        n += 1
        faults = HostFaults(error)
        failed, refused = fails_at(scenarios[name], faults.driver, faults, n)
        num_refused += refused
        faults.driver.close()
    assert n > 1, "the scenario makes driver calls"
    assert num_refused or error, "and tells when they fail"


@pytest.mark.parametrize("options", [{}, GUARD], ids=["fault", "zero"])
@pytest.mark.parametrize("play", [closing_fails_at, making_fails_at])
def test_failing_to_make_or_close_leaves_nothing(
    play: Callable[..., tuple[bool, bool]], options: dict[str, str]
) -> None:
    n, failed, num_refused = 0, True, 0
    while failed:
        n += 1
        faults = HostFaults()
        failed, refused = play(faults.driver, faults, n, **options)
        num_refused += refused
        assert not faults.inner._space._ranges
        assert faults.num_mapped() == faults.bytes_in_use() == faults.inner.num_views == 0
        faults.driver.close()
    assert n - 1 == num_refused >= 4


def _every_call(names: list[str], code: int) -> None:
    import logging

    from kvalloc.tests import failure_scenes, failure_script
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    class LibraryFaults:
        def arm(self, n: int) -> None:
            self._at = library.count() + n
            library.fail("", n, code)

        def has_failed(self) -> bool:
            return library.count() >= self._at

        def num_mapped(self) -> int:
            return library.count("mappings")

        def bytes_in_use(self) -> int:
            return library.count("bytes")

    logging.disable()  # a window that cannot let go of pages warns
    scenarios = failure_scenes.SCENARIOS | failure_scenes.GUARDED
    library = Library()
    library.call("cuInit", 0)
    # Current already, so that no verb has to switch: a switch back that fails would come after
    # the deed.
    library.call("cuCtxPushCurrent", library.call("cuDevicePrimaryCtxRetain", 0))
    others = {"close": failure_script.closing_fails_at, "make": failure_script.making_fails_at}
    for name in names:
        n, failed, num_refused = 0, True, 0
        while failed:
            n += 1
            faults, driver = LibraryFaults(), ConformanceDriver()
            verb, _, guard = name.partition(", ")
            if verb in others:
                options = failure_scenes.GUARD if guard else {}
                failed, refused = others[verb](driver, faults, n, **options)
            else:
                scenario = scenarios[name]
                failed, refused = failure_script.fails_at(scenario, driver, faults, n)
            num_refused += refused
            faults.arm(0)
            driver.close()
            alive = library.alive()
            assert alive.pop("contexts") == 1 and not any(alive.values()), (name, n, alive)
        assert n > 1 and num_refused, name
        print(name, n, num_refused)


NAMES = [*SCENARIOS, "close", "make"]
GUARDED_NAMES = [*GUARDED, "close, zeros behind", "make, zeros behind"]


@pytest.mark.parametrize("code", [2, 999], ids=["memory", "unknown"])
@pytest.mark.parametrize("part", range(4))
def test_a_failing_call_of_cuda_leaves_no_trace(part: int, code: int) -> None:
    """Cases 9, 31 and 36: counted by the library."""
    run_in_subprocess(_every_call, NAMES[part::4], code, granularity=PAGE, memory=1 << 20)


@pytest.mark.parametrize("part", range(10))
def test_a_failing_call_of_cuda_leaves_no_trace_with_zeros_behind(part: int) -> None:
    names = GUARDED_NAMES[part::10]
    run_in_subprocess(_every_call, names, 999, granularity=PAGE, memory=1 << 20)
