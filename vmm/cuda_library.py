"""The one door to NVIDIA's driver library: here every status is looked at and gets its name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .driver import DriverError

INVALID_VALUE, OUT_OF_MEMORY = 1, 2

# What to do about it: CUDA itself says no more than the code.
_REMEDIES = {
    ("cuMemAddressReserve", OUT_OF_MEMORY): "no such range of addresses is left: reserve less",
    ("cuMemAddressFree", INVALID_VALUE): "free a range once, whole, with nothing mapped in it",
    ("cuMemMap", INVALID_VALUE): "map onto unmapped addresses of one reservation",
    ("cuMemSetAccess", INVALID_VALUE): "give a run of whole mappings",
    ("cuMemUnmap", INVALID_VALUE): "give a run of whole mappings",
}


class CudaError(DriverError):
    """The driver refused a call, told by the call and its code.

    Attributes
    ----------
    call : str
        ``"cuMemMap"``
    name : str
        ``"CUDA_ERROR_INVALID_VALUE"``
    code : int
        The same as a number; -1 if the bindings do not know it.
    """

    def __init__(self, call: str, name: str, code: int, remedy: str = "") -> None:
        super().__init__(call, name, code, remedy)  # as given: so it survives pickling
        self.call, self.name, self.code, self.remedy = call, name, code, remedy

    def __str__(self) -> str:
        return f"{self.call}: {self.name}" + (f": {self.remedy}" if self.remedy else "")


class CudaLibrary:
    """``cuda.bindings.driver``, with statuses turned into exceptions.

    Loads the bindings when made and the driver library with it (``cuInit``), never at import.
    ``names`` are the bindings themselves: their types and constants.

    Raises
    ------
    DriverError
        cuda-python, the driver library or one of its functions is missing.
    """

    def __init__(self) -> None:
        try:
            # By name, since it is compiled and tells type checkers nothing.
            self.names: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverError(
                "The cuda driver needs cuda-python: pip install 'cuda-python>=13', or use the "
                "host driver."
            ) from error
        self("cuInit", 0)

    def __call__(self, call: str, *args: Any) -> Any:
        """Call a function by its name; returns what it hands out besides its status."""
        function = getattr(self.names, call, None)  # None: bindings older than the call
        try:
            if function is None:
                raise RuntimeError(f"cuda.bindings.driver has no {call}")
            status, *results = function(*args)
        except RuntimeError as error:  # how the bindings say that something is not found
            raise _missing(call) from error
        except ValueError as error:  # the driver is newer than the bindings' list of codes
            raise CudaError(call, str(error), -1) from error
        if status != 0:
            remedy = _REMEDIES.get((call, int(status)), "")
            raise CudaError(call, status.name, int(status), remedy)
        return results[0] if len(results) == 1 else results


def _missing(call: str) -> DriverError:
    if call == "cuInit":
        return DriverError(
            "No NVIDIA driver library (libcuda.so.1) was found: install the display driver, or "
            "use the host driver."
        )
    return DriverError(f"The NVIDIA driver does not offer {call}: update it, or use the host one.")
