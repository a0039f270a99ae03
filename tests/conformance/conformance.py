"""Runs Python against the conformance library, in processes of their own.

The library (``*.c`` here) is loaded in place of NVIDIA's driver by the real cuda-python. It
shows that the calls are right, not how a GPU behaves: "device memory" is host memory, so the
one thing to replace is the device that tensors claim to be on.

Settings are environment variables, described in ``fake.h`` and ``control.c``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.vmm import dlpack
from kvalloc.vmm.cuda import CudaDriver

if TYPE_CHECKING:
    import torch

SONAME = "libcuda.so.1"
TIMEOUT_SECONDS = 300
"""Ends what hangs; a busy machine may take its time."""
HERE = Path(__file__).resolve().parent


def compiler() -> str | None:
    """The system's C compiler: ``$CC``, ``cc``, ``gcc`` or ``clang``; None if there is none."""
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def build() -> Path:
    """Compile the library, once per process; skips the calling test if that cannot be done.

    Returns
    -------
    Path
        The folder to put in front of ``LD_LIBRARY_PATH``.
    """
    import pytest

    try:
        return compiled()
    except CannotBuild as error:
        pytest.skip(str(error))


class CannotBuild(Exception):
    """What this machine lacks, in one sentence."""


@functools.cache
def compiled() -> Path:
    """``build`` without a test to skip: raises ``CannotBuild``."""
    if not sys.platform.startswith("linux"):
        raise CannotBuild("the conformance library needs Linux (memfd)")
    if (cc := compiler()) is None:
        raise CannotBuild("no C compiler: set CC, or install gcc, to build the conformance library")
    if not _has("cuda.bindings"):
        raise CannotBuild("cuda-python is not installed, whose bindings load the library")
    folder = tempfile.TemporaryDirectory(prefix="kvalloc-conformance-")
    _folders.append(folder)
    target = Path(folder.name, SONAME)
    options = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread"]
    sources = sorted(map(str, HERE.glob("*.c")))
    command = [cc, *options, f"-Wl,-soname,{SONAME}", "-o", str(target), *sources]
    subprocess.run(command, check=True)
    return target.parent


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def run_in_subprocess(code: str | Callable[..., None], *args: object, **settings: object) -> str:
    """Run Python with the library in NVIDIA's place.

    Parameters
    ----------
    code
        Source, or a function of a module's top level that imports what it needs.
    args
        For the function, as ``repr`` writes them.
    settings
        ``granularity=65536`` sets ``KVALLOC_FAKE_GRANULARITY``, and so on.

    Returns
    -------
    str
        What the process wrote to standard output.

    Raises
    ------
    AssertionError
        The process failed, or wrote to standard error; with what it wrote.
    """
    if not isinstance(code, str):
        call = f"{code.__name__}({', '.join(map(repr, args))})"
        code = f"{textwrap.dedent(inspect.getsource(code))}\n\n{call}\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVALLOC_FAKE_")}
    environment |= {f"KVALLOC_FAKE_{k.upper()}": str(v) for k, v in settings.items()}
    environment["LD_LIBRARY_PATH"] = search_path(build())
    done = subprocess.run(
        [sys.executable, "-c", "from __future__ import annotations\n" + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    if done.returncode or done.stderr:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def search_path(folder: Path) -> str:
    """``LD_LIBRARY_PATH`` of a process that shall find the library there before NVIDIA's."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))


class ConformanceDriver(CudaDriver):
    """The cuda driver, all but where its tensors are said to lie: in host memory."""

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As ``CudaDriver.tensor``; torch without CUDA cannot take a capsule that says so."""
        return self._tensor(address, shape, dtype, (dlpack.CPU, 0))


class Library:
    """The library's own door, and ``cuda.bindings.driver``; inside such a process."""

    ALIVE = ("handles", "bytes", "mappings", "ranges", "events", "contexts")

    def __init__(self) -> None:
        self.cuda: Any = importlib.import_module("cuda.bindings.driver")
        self._library: Any = ctypes.CDLL(SONAME)
        self._library.kvalloc_fake_count.restype = ctypes.c_long

    def count(self, what: str = "") -> int:
        """One of ``ALIVE``: how many now. A call's name: how often called. Empty: all calls."""
        return int(self._library.kvalloc_fake_count(what.encode()))

    def alive(self) -> dict[str, int]:
        """What was made and not returned yet; all zero after everything is closed."""
        return {what: self.count(what) for what in self.ALIVE}

    def fail(self, call: str = "", countdown: int = 1, code: int = 999) -> None:
        """Let the countdown-th call from now fail, of those whose names start with ``call``."""
        self._library.kvalloc_fake_fail(call.encode(), ctypes.c_long(countdown), code)

    def launch(self, address: int, num_bytes: int, stream: int = 0) -> None:
        """Queue a kernel that reads some addresses; it ends when something waits for it.

        Unmapping what it reads is a fault: the call fails with CUDA_ERROR_ILLEGAL_ADDRESS, and
        so does every later one.
        """
        arguments = (ctypes.c_uint64(value) for value in (stream, address, num_bytes))
        self._library.kvalloc_fake_launch(*arguments)

    def call(self, call: str, *args: Any, gives: str = "CUDA_SUCCESS") -> int:
        """Call CUDA without the driver, expect a status; returns what it handed out, or 0."""
        status, *results = getattr(self.cuda, call)(*args)
        assert status.name == gives, (call, args, status.name, gives)
        return int(results[0]) if status == 0 and results else 0

    def page_properties(self) -> Any:
        """Of an ordinary page on device 0."""
        properties = self.cuda.CUmemAllocationProp()
        properties.type = self.cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        return properties

    def access(self, rights: str = "READWRITE") -> Any:
        """To read and write, or to ``READ``, for device 0."""
        access = self.cuda.CUmemAccessDesc()
        access.location.type = self.cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.flags = getattr(self.cuda.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{rights}")
        return access
