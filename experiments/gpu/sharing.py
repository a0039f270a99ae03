"""gpu-check, stage sharing: pages that another process or another GPU reads and writes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from .mapped import give_back, mapped
from .stage import NotHere, StageReport, Target, require

if TYPE_CHECKING:
    import torch

    from ...vmm.cuda_library import CudaLibrary

MODULE = "kvalloc.experiments.gpu.sharing"
FIRST, SECOND = 65, 66  # what this side writes, and the other


def run(report: StageReport, target: Target) -> None:
    """One check for ``shareable``, one for ``peers``."""
    checks = {
        "shareable: another process reads and writes a page": _shareable,
        "peers: another GPU reads and writes a page": _peers,
    }
    for name, check in checks.items():
        with report.check(name):
            if target.kind == "cpu":
                raise NotHere("main memory has neither handles to export nor peers")
            check(target)
    right = [entry["check"].partition(":")[0] for entry in report.checks if entry["ok"]]
    report.headline = f"right: {', '.join(right)}" if right else "nothing to share here"


def _shareable(target: Target) -> None:
    from ...vmm.cuda_device import CudaDevice

    driver = target.driver(shareable=True)
    address, pages = mapped(driver, 1)
    tensor = driver.tensor(address, (driver.granularity,), _uint8())
    tensor.fill_(FIRST)
    target.synchronize()
    device = CudaDevice(0)
    with device.current():
        export = "cuMemExportToShareableHandle"
        descriptor = int(device.call(export, pages[0], _descriptor_kind(device.call), 0))
    device.close()
    try:
        done = subprocess.run(
            [sys.executable, "-m", MODULE, target.kind, str(descriptor), str(driver.granularity)],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(descriptor)
    words = (done.stdout + done.stderr).strip().splitlines()[-1:]
    require(words == ["done"], f"the other process ended with {done.returncode}: {words}")
    require(bool((tensor == SECOND).all()), "what the other process wrote is not here")
    del tensor
    give_back(driver, address, pages)
    driver.close()


def adopt(kind: str, descriptor: int, num_bytes: int) -> None:
    """Map the page behind a descriptor, read it and write it; ends the process."""
    from ...vmm.cuda_device import CudaDevice

    target, device = Target(kind), CudaDevice(0)
    with device.current():
        call = device.call
        page = int(call("cuMemImportFromShareableHandle", descriptor, _descriptor_kind(call)))
        address = int(call("cuMemAddressReserve", num_bytes, 0, 0, 0))
        call("cuMemMap", address, num_bytes, 0, page, 0)
        _, access = device.access(())
        call("cuMemSetAccess", address, num_bytes, access, len(access))
        tensor = _seen_by(target, 0, address, num_bytes)
        require(bool((tensor == FIRST).all()), "the page does not hold what was written")
        tensor.fill_(SECOND)
        target.synchronize()
    print("done", flush=True)
    os._exit(0)  # the system takes the mapping back


def _peers(target: Target) -> None:
    from ...vmm.cuda_library import CudaLibrary

    call = CudaLibrary()
    if int(call("cuDeviceGetCount")) < 2:
        raise NotHere("there is one GPU alone")
    if not call("cuDeviceCanAccessPeer", 1, 0):
        raise NotHere("GPU 1 cannot reach the memory of GPU 0")
    driver = target.driver(peers=[1])
    address, pages = mapped(driver, 1)
    tensor = driver.tensor(address, (driver.granularity,), _uint8())
    tensor.fill_(FIRST)
    target.synchronize()
    # The capsule says which GPU runs the kernels: here it is the one that does not own the page.
    other = _seen_by(target, 1, address, driver.granularity)
    require(bool((other == FIRST).all()), "GPU 1 does not read what GPU 0 wrote")
    other.fill_(SECOND)
    if target.is_gpu:
        import torch

        torch.cuda.synchronize(1)
    require(bool((tensor == SECOND).all()), "GPU 0 does not read what GPU 1 wrote")
    del tensor, other
    give_back(driver, address, pages)
    driver.close()


def _seen_by(target: Target, device: int, address: int, num_bytes: int) -> torch.Tensor:
    from ...vmm import dlpack

    where = (dlpack.CUDA, device) if target.is_gpu else (dlpack.CPU, 0)
    return dlpack.tensor_at(address, (num_bytes,), _uint8(), device=where)


def _uint8() -> torch.dtype:
    import torch

    return torch.uint8


def _descriptor_kind(call: CudaLibrary) -> Any:
    return call.names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


if __name__ == "__main__":
    adopt(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
