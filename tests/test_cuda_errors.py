"""What the cuda driver says when something is missing or has run out."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys

import pytest

from kvalloc.tests.conformance.conformance import run_in_subprocess
from kvalloc.vmm.cuda import CudaDriver
from kvalloc.vmm.cuda_library import CudaError
from kvalloc.vmm.driver import DriverError

G = 65536


def test_import_needs_and_loads_nothing() -> None:
    """Importing the driver loads neither torch nor the bindings."""
    code = "import sys, kvalloc.vmm.cuda; print('torch' in sys.modules, 'cuda' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_missing_driver_is_one_clear_sentence() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.importorskip("cuda.bindings")
        with pytest.raises(DriverError, match="No NVIDIA driver library") as caught:
            CudaDriver()
        assert str(caught.value).count(".") == 3, "libcuda.so.1 and the full stop"
    else:
        pytest.skip("this machine has the driver")


def test_missing_bindings_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverError, match="pip install 'cuda-python>=13'"):
        CudaDriver()


def _refused() -> None:
    from kvalloc.vmm.cuda import CudaDriver
    from kvalloc.vmm.driver import DriverError

    try:
        CudaDriver().create(1 << 21)
    except DriverError as error:
        print(f"{type(error).__name__}: {error}", end="")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"missing": "cuInit"}, "DriverError: No NVIDIA driver library (libcuda.so.1) was found"),
        ({"missing": "cuMemCreate"}, "DriverError: The NVIDIA driver does not offer cuMemCreate"),
        ({"vmm": 0}, "DriverError: Device 0 does not offer virtual memory management"),
        ({"devices": 0}, "CudaError: cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
        ({"fail_call": "cuDevicePr", "fail_at": 1}, "CudaError: cuDevicePrimaryCtxRetain: CUDA_ER"),
        ({"fail_at": 1, "fail_code": 54321}, "CudaError: cuInit: 54321 is not a valid CUresult"),
    ],
)
def test_what_is_missing_is_said(setting: dict[str, object], sentence: str) -> None:
    said = run_in_subprocess(_refused, **setting)
    assert said.startswith(sentence)
    assert "\n" not in said


def test_errors_name_call_and_code_and_travel() -> None:
    error = CudaError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)
    assert str(error) == "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.call, again.code) == (str(error), "cuMemCreate", 2)


def _exhaustion() -> None:
    from collections.abc import Callable

    from kvalloc.contract import OutOfMemory
    from kvalloc.tests.conformance.conformance import ConformanceDriver, Library
    from kvalloc.vmm.cuda_library import CudaError

    library, driver = Library(), ConformanceDriver()
    g = driver.granularity
    address = driver.reserve(8 * g)
    page = driver.create(3 * g)
    before = library.alive()

    def refusal(call: Callable[..., object], *args: int) -> Exception:
        try:
            call(*args)
        except (OutOfMemory, CudaError) as error:
            return error
        raise AssertionError

    physical = refusal(driver.create, 2 * g)
    assert isinstance(physical, OutOfMemory)
    assert (physical.needed, physical.free, physical.unit) == (2, 1, "pages")
    assert not physical.fragmented
    assert str(physical.__cause__) == "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"
    addresses = refusal(driver.reserve, 9 * g)
    assert isinstance(addresses, CudaError)
    print(addresses)
    library.fail("cuMemMap", 1, 2)  # no room for the page tables
    assert isinstance(refusal(driver.map, address, 3 * g, page), OutOfMemory)
    library.fail("cuMemCreate", 1, 2)
    claimed = refusal(driver.create, g)
    assert isinstance(claimed, OutOfMemory) and not claimed.fragmented, "free, but out of reach"
    assert library.alive() == before
    driver.map(address, 3 * g, page)  # a retry works
    driver.create(g)


def test_out_of_memory_and_out_of_addresses_are_told_apart() -> None:
    """Case 36: different, clear, nothing leaked, a retry works."""
    said = run_in_subprocess(_exhaustion, granularity=G, memory=4 * G, addresses=16 * G)
    assert said == (
        "cuMemAddressReserve: CUDA_ERROR_OUT_OF_MEMORY: no such range of addresses is left: "
        "reserve less\n"
    )
