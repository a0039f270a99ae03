"""The mapped cache over the cuda driver: the same walks, verbs and refusals as over the host's.

Against the conformance library; each function whose name starts with ``_`` runs in a process of
its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvalloc.tests.conformance.conformance import run_in_subprocess

PAGE = 4096
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "token-major": ("PLAIN", 60, {}),
    "fit-prompt, scrubbed": ("PLAIN", 60, {"adoption": "fit-prompt", "scrub": True}),
    "head-major": ("PLAIN", 90, {"layout": "head-major"}),
    "interleaved": ("PLAIN", 40, {"layout": "interleaved"}),
    "straddling": ("STRADDLING", 60, {}),
    "windowed": ("WINDOWED", 60, {"scrub": True}),
    "windowed interleaved": ("WINDOWED", 60, {"layout": "interleaved"}),
    "unequal head-major": ("UNEQUAL", 90, {"layout": "head-major"}),
}


def _walks(layouts: list[tuple[str, int, dict[str, Any]]]) -> None:

    from kvalloc.tests import state_machine_backends
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.tests.failing_driver import FailingDriver
    from kvalloc.tests.state_machine import Walk
    from kvalloc.vmm import VmmKVCache
    from kvalloc.vmm.host import HostDriver

    page = state_machine_backends.PAGE
    driver: Any
    for name, num_pages, options in layouts:
        geometry, verbs = getattr(state_machine_backends, name), []
        for inner in (HostDriver(page), ConformanceDriver()):
            driver = FailingDriver(inner)  # which never fails, but keeps a list
            with VmmKVCache(geometry, num_pages * page, page, driver=driver, **options) as cache:
                walk = Walk(cache, 1)
                walk.run(160)
                for verb in ("admit", "grow", "fork", "offload", "restore", "release"):
                    assert walk.done[verb], verb
            verbs.append(driver.calls)
            assert inner.num_views == inner.bytes_in_use == 0
            driver.close()
        assert verbs[0] == verbs[1], (name, options)
        assert not any(Library().alive().values())
        print(len(verbs[0]))


@pytest.mark.parametrize("part", range(4))
def test_walks_make_the_same_calls_on_both_drivers(part: int) -> None:
    """Every verb over several layouts; what is stored is read back after each."""
    layouts = list(LAYOUTS.values())[2 * part : 2 * part + 2]
    counts = run_in_subprocess(_walks, layouts, granularity=PAGE, memory=1 << 20)
    assert all(int(count) > 100 for count in counts.split())


def _made_for_the_device() -> None:
    from unittest.mock import patch

    import torch

    from kvalloc.geometry import KVGeometry
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm import VmmKVCache, cuda
    from kvalloc.vmm.driver import DriverError

    geometry = KVGeometry.uniform("g", layers=1, q_heads=1, kv_heads=1, head_dim=64)

    def refusal(**options: Any) -> str:
        try:
            VmmKVCache(geometry, 1 << 20, **{"device": "cuda", **options})
        except (DriverError, ValueError) as error:
            assert not any(Library().alive().values())
            return f"{type(error).__name__}: {error}"
        raise AssertionError

    print(refusal())
    print(refusal(device="meta"))
    with patch.object(cuda, "CudaDriver", ConformanceDriver):
        with patch.object(torch.cuda, "is_available", lambda: True):
            print(refusal(device="cuda:0", page_bytes=4096))
            cache = VmmKVCache(geometry, 1 << 20, 1 << 16, device="cuda:0")
            assert isinstance(cache.physical.driver, ConformanceDriver)
            cache.admit("a", 1)
            cache.close()
            cache = VmmKVCache(geometry, 1 << 20, 1 << 16, device="cuda:0", guard="zero")
            cache.admit("a", 1)
            assert not cache.view(0, ["a"]).k[512:768].any()
            cache.close()
    assert not any(Library().alive().values()), "its own driver is closed with it"


def test_a_driver_is_made_for_the_device_or_refused_in_one_sentence() -> None:
    assert run_in_subprocess(_made_for_the_device, granularity=1 << 16).splitlines() == [
        "DriverError: torch finds no GPU here: use device='cpu'",
        "ValueError: no driver for meta: use cpu or cuda",
        "ValueError: pages of 4096 bytes are no multiple of the driver's granularity, 65536; "
        "choose a page size that is",
    ]


def _closing(with_library: bool) -> None:
    import gc

    import torch

    from kvalloc.geometry import KVGeometry
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm import VmmKVCache
    from kvalloc.vmm.driver import DriverError
    from kvalloc.vmm.host import HostDriver

    geometry = KVGeometry.uniform("g", layers=2, q_heads=1, kv_heads=1, head_dim=64)

    def make() -> VmmKVCache:
        driver = ConformanceDriver() if with_library else HostDriver(1 << 16)
        cache = VmmKVCache(geometry, 1 << 20, 1 << 16, driver=driver)
        cache.admit("a", 2)
        ones = torch.ones(2, 1, 64, dtype=torch.bfloat16)
        for layer in range(2):
            cache.write(layer, ["a"], ones, ones, lens=[2])
        return cache

    cache: Any = make()
    driver: Any = cache.physical.driver
    view: Any = cache.view(0, ["a"])
    piece = view.k[:1]
    for expected in (2, 1):
        try:
            cache.close()
        except DriverError as error:
            assert f"close: {expected} tensors over" in str(error), error
        else:
            raise AssertionError
        cache.check_invariants()
        assert int(piece.sum()) == 64, "nothing was closed"
        assert int(cache.view(1, ["a"]).v[:2].sum()) == 128
        view = None
    del piece
    cache.close()
    cache.close()
    assert driver.num_views == driver.bytes_in_use == 0
    assert driver.num_calls["reserve"] == driver.num_calls["free"] == 4
    driver.close()

    try:
        with make() as cache:
            view = cache.view(0, ["a"])
            raise KeyError("the error that counts")
    except KeyError as error:
        assert error.args == ("the error that counts",)
    view = None
    driver, cache = cache.physical.driver, None  # dropped without close
    gc.collect()
    assert driver.num_views == 0
    driver = None
    gc.collect()
    if with_library:
        assert not any(Library().alive().values()), Library().alive()


@pytest.mark.parametrize("with_library", [True, False], ids=["cuda", "host"])
def test_closing_under_living_views_is_refused_and_changes_nothing(with_library: bool) -> None:
    run_in_subprocess(_closing, with_library, granularity=1 << 16)


def test_exit_with_living_caches_is_silent() -> None:
    code = """
        from kvalloc.geometry import KVGeometry
        from kvalloc.tests.conformance.conformance import ConformanceDriver
        from kvalloc.vmm import VmmKVCache
        from kvalloc.vmm.host import HostDriver
        geometry = KVGeometry.uniform("g", layers=2, q_heads=1, kv_heads=1, head_dim=64)
        caches = [
            VmmKVCache(geometry, 1 << 20, 1 << 16, driver=driver)
            for driver in (ConformanceDriver(), HostDriver(1 << 16))
        ]
        for cache in caches:
            cache.admit("a", 1)
        views = [cache.view(0, ["a"]) for cache in caches]
        print("end", end="")
    """
    assert run_in_subprocess(code, granularity=1 << 16) == "end"


def _created_pages_are_cleaned() -> None:
    import torch

    from kvalloc.geometry import KVGeometry
    from kvalloc.tests.conformance.conformance import ConformanceDriver
    from kvalloc.vmm import VmmKVCache

    geometry = KVGeometry.uniform("g", layers=1, q_heads=1, kv_heads=1, head_dim=64)
    for scrub in (False, True):
        with VmmKVCache(
            geometry, 1 << 20, 1 << 16, driver=ConformanceDriver(), scrub=scrub
        ) as cache:
            cache.admit("a", 1)
            page = cache.view(0, ["a"]).k[:512]
            assert bool(torch.isnan(page).all()) is not scrub, "fresh memory there is NaN"
            assert bool((page == 0).all()) is scrub
            del page


def test_scrub_covers_pages_that_the_driver_created() -> None:
    run_in_subprocess(_created_pages_are_cleaned, granularity=1 << 16)
