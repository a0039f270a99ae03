"""Tensors over the host driver's ranges: what they see, and what outlives what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

from kvalloc.tests.host_memory import G, is_reserved, mapped, peek, shared_bytes
from kvalloc.vmm.host import HostDriver


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver(G)
    yield driver
    driver.close()


@pytest.mark.parametrize("guard", ["fault", "zero"])
def test_a_tensor_lies_over_mapped_and_unmapped_addresses(guard: str) -> None:
    driver = HostDriver(G, guard)  # type: ignore[arg-type]
    address, _ = mapped(driver, 2, num_free=100)
    whole = driver.tensor(address, (102 * G // 8, 2), torch.float32)
    assert whole.data_ptr() == address and whole.is_contiguous()
    whole[: 2 * G // 8] = 7.0
    assert peek(address + 2 * G - 4, 4) == peek(address, 4) != bytes(4)
    inner = driver.tensor(address + 4, (3,), torch.bfloat16)
    assert inner.dtype == torch.bfloat16 and inner.data_ptr() == address + 4
    assert driver.bytes_in_use == 2 * G, "making tensors takes no memory"
    driver.close()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_and_of_nothing(driver: HostDriver, dtype: torch.dtype) -> None:
    address, _ = mapped(driver, 1)
    tensor = driver.tensor(address, (2, 8), dtype)
    tensor.view(torch.uint8).fill_(1)
    assert peek(address, 16 * dtype.itemsize + 1) == b"\x01" * 16 * dtype.itemsize + b"\0"
    assert driver.tensor(address, (0, 8), dtype).shape == (0, 8)


def test_views_are_counted_and_keep_their_addresses(driver: HostDriver) -> None:
    address, _ = mapped(driver, 1)
    part = driver.tensor(address, (G,), torch.uint8)[5:]
    assert driver.num_views == 1, "a part of a tensor holds the whole"
    driver.unmap(address, G)
    driver.free(address, G)
    assert is_reserved(address), "the addresses must not pass to somebody else"
    del part
    assert not is_reserved(address)
    assert driver.num_views == 0


def test_close_under_a_living_tensor_returns_memory_but_not_addresses() -> None:
    gc.collect()  # what earlier tests forgot must not go in between
    before = shared_bytes()
    driver = HostDriver(G)
    address, _ = mapped(driver, 64)
    tensor = driver.tensor(address, (64 * G,), torch.uint8)
    driver.close()
    assert shared_bytes() == before
    assert is_reserved(address)
    del tensor
    assert not is_reserved(address)


def test_a_tensor_keeps_a_forgotten_driver_open() -> None:
    driver = HostDriver(G)
    address, _ = mapped(driver, 1)
    tensor = driver.tensor(address, (4,), torch.uint8)
    gone = weakref.ref(driver)
    del driver
    gc.collect()
    tensor.fill_(9)
    assert tensor.tolist() == [9] * 4
    del tensor
    gc.collect()
    assert gone() is None
