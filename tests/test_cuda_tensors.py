"""Tensors over addresses that torch did not allocate: capsules, living views, exit."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from kvalloc.tests.conformance.conformance import run_in_subprocess
from kvalloc.vmm import dlpack

G = 65536


def test_capsule_carries_the_device_and_no_deleter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch with CUDA would be told; torch without it refuses such a capsule."""
    seen: list[dlpack._Tensor] = []

    def read(capsule: Any) -> torch.Tensor:
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        seen.append(dlpack._Tensor.from_address(get(capsule, b"dltensor")))
        return torch.empty(0, dtype=torch.bfloat16)

    monkeypatch.setattr("torch.utils.dlpack.from_dlpack", read)
    dlpack.tensor_at(1 << 40, (3, 5, 7), torch.bfloat16, device=(dlpack.CUDA, 2))
    (told,) = seen
    assert (told.data, told.device_type, told.device_id) == (1 << 40, 2, 2)
    assert (told.code, told.bits, told.lanes) == (4, 16, 1)
    assert told.deleter is None and told.byte_offset == 0
    assert (ctypes.c_int64 * told.ndim).from_address(told.shape)[:] == [3, 5, 7]
    assert (ctypes.c_int64 * told.ndim).from_address(told.strides)[:] == [35, 7, 1]


def test_views_count_storages_that_live() -> None:
    buffer = (ctypes.c_float * 12)(*range(12))
    address = ctypes.addressof(buffer)
    views = dlpack.Views()
    whole = dlpack.tensor_at(address, (3, 4), torch.float32, device=(dlpack.CPU, 0))
    row = views.add(whole, address)[1]
    del whole
    tail = views.add(
        dlpack.tensor_at(address + 32, (4,), torch.float32, device=(dlpack.CPU, 0)), address + 32
    )
    assert row.tolist() == [4, 5, 6, 7] and tail.tolist() == [8, 9, 10, 11]
    assert (views.living(), views.living(address, 32), views.living(address + 48, 9)) == (2, 1, 0)
    del row
    assert (views.living(), views.living(address, 32)) == (1, 0)
    del tail
    assert views.living() == 0


def _tensors() -> None:
    import torch

    from kvalloc.tests.conformance.conformance import ConformanceDriver
    from kvalloc.vmm.driver import DriverError

    def refusal(call: str, *args: object) -> str:
        try:
            getattr(driver, call)(*args)
        except (DriverError, ValueError) as error:
            return str(error)
        raise AssertionError(call)

    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(4 * g)
    driver.map(address + g, g, driver.create(g))
    driver.allow(address + g, g)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn):
        whole = driver.tensor(address, (4, g // 8 // dtype.itemsize, 8), dtype)
        assert whole.dtype == dtype and whole.is_contiguous() and whole.data_ptr() == address
        assert torch.all(whole[1].float().isnan()), "fresh memory is not zero"
        whole[1] = torch.arange(8.0).to(dtype)
        assert whole[1].float().sum() == 28 * g // 8 // dtype.itemsize
        del whole
        driver.tensor(address + g, (g,), torch.uint8).fill_(255)
    assert driver.num_views == 0
    part = driver.tensor(address, (4, g), torch.uint8)[1, :100]
    assert "1 tensors are still in use" in refusal("free", address, 4 * g)
    assert "1 tensors are still in use" in refusal("close")
    part[:] = 7
    assert part.sum() == 700, "refusing changed nothing"
    assert "is not reserved" in refusal("tensor", address + g, (4 * g,), torch.uint8)
    assert "cannot lie over mapped memory" in refusal("tensor", address, (1,), torch.complex64)
    assert "give sizes of at least 0" in refusal("tensor", address, (-1,), torch.uint8)
    other = driver.reserve(g)
    driver.free(other, g)
    assert driver.tensor(address, (0, 8), torch.float32).numel() == 0
    del part
    driver.close()


def test_tensors_over_a_partly_mapped_range() -> None:
    run_in_subprocess(_tensors, granularity=G)


def _outlives() -> None:
    import gc

    import torch

    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library

    driver = ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(g)
    driver.map(address, g, driver.create(g))
    driver.allow(address, g)
    view = driver.tensor(address, (g,), torch.uint8)[3:]
    view[:] = 1
    del driver
    gc.collect()
    assert int(view.sum()) == g - 3
    assert Library().count("bytes") == g
    globals()["kept"] = view  # to the end of the process, and so is the next one with its driver
    other = ConformanceDriver()
    globals()["cache"] = other, other.tensor(other.reserve(g), (g // 2,), torch.bfloat16)


def test_memory_outlives_every_view_and_exit_is_silent() -> None:
    assert run_in_subprocess(_outlives, granularity=G) == ""
