"""One GPU as the cuda driver sees it: its context, what its pages are, and its events."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from .cuda_library import CudaLibrary
from .driver import DriverError

_LEGACY_STREAM = 1  # CUDA's name for the default stream, the one that waits for blocking streams


class CudaDevice:
    """The device's context and properties; holds a primary context it retained until ``close``.

    Raises
    ------
    DriverError
        No driver, no such device, or one without virtual memory management.
    """

    def __init__(self, ordinal: int) -> None:
        self.call = CudaLibrary()
        self.ordinal = int(self.call("cuDeviceGet", ordinal))
        self._events: list[Any] = []
        self._idle_events: list[Any] = []
        if not self._offers("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise DriverError(
                f"Device {ordinal} does not offer virtual memory management: use the host driver."
            )
        self._retained = False
        current = int(self.call("cuCtxGetCurrent"))
        if current and int(self.call("cuCtxGetDevice")) == self.ordinal:
            self._context = current
        else:
            self._context = int(self.call("cuDevicePrimaryCtxRetain", self.ordinal))
            self._retained = True

    def _offers(self, attribute: str) -> bool:
        names = self.call.names.CUdevice_attribute
        number = getattr(names, f"CU_DEVICE_ATTRIBUTE_{attribute}")
        return bool(self.call("cuDeviceGetAttribute", number, self.ordinal))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in this thread, and restore the caller's after.

        Threads start without one, and in a thread that works on another GPU a context left
        behind would change torch's current device.
        """
        if int(self.call("cuCtxGetCurrent")) == self._context:
            yield
            return
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        except BaseException:
            with suppress(DriverError):  # after a fault every call fails; the first one tells
                self.call("cuCtxPopCurrent")
            raise
        self.call("cuCtxPopCurrent")

    def page_properties(self, shareable: bool) -> Any:
        """``CUmemAllocationProp`` of pinned memory on this device."""
        names = self.call.names
        properties = names.CUmemAllocationProp()
        properties.type = names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = self._location(self.ordinal)
        if shareable:
            if not self._offers("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
                raise DriverError(
                    f"Device {self.ordinal} cannot share pages as file descriptors: leave "
                    "shareable off."
                )
            kinds = names.CUmemAllocationHandleType
            properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return properties

    def access(self, peers: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """``CUmemAccessDesc`` of this device and its peers: to read, and to read and write."""
        flags = self.call.names.CUmemAccess_flags
        devices = self._reachable(peers)
        return (
            self._grants(devices, flags.CU_MEM_ACCESS_FLAGS_PROT_READ),
            self._grants(devices, flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE),
        )

    def _reachable(self, peers: Sequence[int]) -> list[int]:
        """This device and its peers, which must be able to reach it."""
        for device in (self.ordinal, *peers):
            if device != self.ordinal and not self.call(
                "cuDeviceCanAccessPeer", device, self.ordinal
            ):
                raise DriverError(
                    f"Device {device} cannot reach the memory of device {self.ordinal}: leave it "
                    "out of peers."
                )
        return [self.ordinal, *peers]

    def _grants(self, devices: Sequence[int], flags: Any) -> list[Any]:
        grants = []
        for device in devices:
            grant = self.call.names.CUmemAccessDesc()
            grant.location = self._location(device)
            grant.flags = flags
            grants.append(grant)
        return grants

    def granularity(self, properties: Any, kind: Literal["minimum", "recommended"]) -> int:
        """What sizes and addresses of such pages must be multiples of, in bytes."""
        kinds = self.call.names.CUmemAllocationGranularity_flags
        flag = getattr(kinds, f"CU_MEM_ALLOC_GRANULARITY_{kind.upper()}")
        return int(self.call("cuMemGetAllocationGranularity", properties, flag))

    def _location(self, device: int) -> Any:
        location = self.call.names.CUmemLocation()
        location.type = self.call.names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = device
        return location

    def record(self) -> Fence:
        """Put an event on torch's current stream of this thread, or on the default stream."""
        try:
            event = self._idle_events.pop()
        except IndexError:
            flags = self.call.names.CUevent_flags.CU_EVENT_DISABLE_TIMING
            event = self.call("cuEventCreate", int(flags))
            self._events.append(event)
        fence = Fence(event, self._idle_events)
        self.call("cuEventRecord", event, self._stream())
        return fence

    def _stream(self) -> int:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return _LEGACY_STREAM
        return int(torch.cuda.current_stream(self.ordinal).cuda_stream) or _LEGACY_STREAM

    def destroy_events(self) -> None:
        """Forget all fences; needs the context to be current."""
        while self._events:
            self.call("cuEventDestroy", self._events[-1])
            self._events.pop()

    def close(self) -> None:
        """Release the primary context, if it was retained here."""
        if self._retained:
            self.call("cuDevicePrimaryCtxRelease", self.ordinal)
            self._retained = False


class Fence:
    """A recorded event, which goes back to where it came from with the last reference."""

    __slots__ = ("_home", "event")

    def __init__(self, event: Any, home: list[Any]) -> None:
        self.event = event
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.event)
