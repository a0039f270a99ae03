"""A driver that fails on demand: what a failure injection test puts under a cache."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from kvalloc.contract import OutOfMemory
from kvalloc.vmm.driver import VERBS, Driver, DriverError
from kvalloc.vmm.host import HostDriver

if TYPE_CHECKING:
    import torch


class FailingDriver:
    """Passes every call on to ``inner``, except one that raises instead and changes nothing.

    Attributes
    ----------
    calls : list[str]
        The verbs asked for so far, the failed one included; ``tensor``, ``fence``, ``wait``
        and ``close`` are no verbs here.
    failed : bool
        The failure has happened; from then on every call passes again.
    """

    def __init__(
        self,
        inner: Driver,
        fail_at: int = 0,
        error: Exception | None = None,
        verbs: Collection[str] = VERBS,
    ) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.failed = False
        self.arm(fail_at, error, verbs)

    def arm(
        self, fail_at: int, error: Exception | None = None, verbs: Collection[str] = VERBS
    ) -> None:
        """Fail the ``fail_at``-th call of ``verbs`` from now on (1 = the next; 0 = never)."""
        unknown = set(verbs) - set(VERBS)
        if unknown:
            raise ValueError(f"no verbs: {sorted(unknown)}")
        self.failed = False
        self._countdown = fail_at
        self._error = error
        self._verbs = verbs

    def _step(self, verb: str) -> None:
        self.calls.append(verb)
        if self._countdown and verb in self._verbs:
            self._countdown -= 1
            if self._countdown == 0:
                self.failed = True
                raise self._error or DriverError(f"{verb}: made to fail by the test")

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    @property
    def reads_zeros(self) -> bool:
        return self.inner.reads_zeros

    @property
    def num_views(self) -> int:
        return self.inner.num_views

    def reserve(self, num_bytes: int) -> int:
        self._step("reserve")
        return self.inner.reserve(num_bytes)

    def free(self, address: int, num_bytes: int) -> None:
        self._step("free")
        self.inner.free(address, num_bytes)

    def create(self, num_bytes: int) -> int:
        self._step("create")
        return self.inner.create(num_bytes)

    def release(self, handle: int) -> None:
        self._step("release")
        self.inner.release(handle)

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self._step("map")
        self.inner.map(address, num_bytes, handle)

    def allow(self, address: int, num_bytes: int, *, write: bool = True) -> None:
        self._step("allow")
        self.inner.allow(address, num_bytes, write=write)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._step("unmap")
        self.inner.unmap(address, num_bytes)

    def tensor(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.inner.tensor(address, shape, dtype)

    def fence(self) -> object:
        return self.inner.fence()

    def wait(self, fence: object) -> None:
        self.inner.wait(fence)

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        # What only one driver has (num_calls, bytes_in_use, …).
        return getattr(self.inner, name)


class ShortDriver(FailingDriver):
    """Has memory for ``num_pages`` pages and no more, as a system that others use too."""

    def __init__(self, inner: HostDriver, num_pages: int) -> None:
        super().__init__(inner)
        self.num_pages = num_pages

    def create(self, num_bytes: int) -> int:
        if self.bytes_in_use + num_bytes > self.num_pages * self.granularity:
            raise OutOfMemory(1, 0, 0, unit="pages")
        return super().create(num_bytes)
