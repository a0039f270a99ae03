"""What a stage of gpu-check gets: where to run, and a report that is on disk at any moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ...vmm.driver import Driver
from ..environment import environment
from ..output import emit_json

if TYPE_CHECKING:
    import torch

LABELS = {
    "cuda": "GPU",
    "conformance": "conformance library (no GPU: calls are checked, not a device)",
    "cpu": "host driver (no GPU)",
}
HOST_PAGE_BYTES = 64 << 10
CONFORMANCE = "kvalloc.tests.conformance.conformance"
"""In the source tree only: whoever installed the package has no tests."""


class CheckFailed(Exception):
    """What a check found wrong."""


class NotHere(Exception):
    """Why a check has nothing to check on this target; not a failure."""


def require(condition: object, otherwise: str) -> None:
    """Raise ``CheckFailed`` unless the condition holds."""
    if not condition:
        raise CheckFailed(otherwise)


@dataclass(frozen=True)
class Target:
    """Where a stage runs.

    Attributes
    ----------
    kind : str
        ``cuda``; ``conformance``, where CUDA's calls go to a library that checks them; or
        ``cpu``, the form that the tests run.
    """

    kind: str

    @property
    def is_gpu(self) -> bool:
        """A device with a time and streams of its own."""
        return self.kind == "cuda"

    @property
    def device(self) -> torch.device:
        """Where tensors lie."""
        import torch

        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    def driver(self, **options: Any) -> Driver:
        """A driver of its own for the caller; the options are ``CudaDriver``'s."""
        if self.kind == "cpu":
            from ...vmm.host import HostDriver

            return HostDriver(HOST_PAGE_BYTES)
        if self.kind == "conformance":
            made = import_module(CONFORMANCE).ConformanceDriver(**options)
        else:
            from ...vmm.cuda import CudaDriver

            made = CudaDriver(0, **options)
        driver: Driver = made
        return driver

    def synchronize(self) -> None:
        """Wait for the device, if it works on its own."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize()


@dataclass
class StageReport:
    """Rows and checks of one stage, written after each, so that a killed stage leaves them.

    Attributes
    ----------
    seconds : float
        What the stage may take; it should look at ``seconds_left``.
    headline : str
        The one thing to say about the stage in a table.
    """

    stage: str
    target: Target
    path: Path
    seconds: float = 60.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    headline: str = ""

    def __post_init__(self) -> None:
        self._start = monotonic()
        self._environment: dict[str, Any] = {}

    @property
    def seconds_left(self) -> float:
        """Of ``seconds``."""
        return self.seconds - (monotonic() - self._start)

    def add(self, **row: Any) -> None:
        """Keep a row of numbers."""
        self.rows.append(row)
        self.save()

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """What happens inside decides; the stage goes on whatever it is."""
        entry: dict[str, Any] = {"check": name, "ok": True, "detail": ""}
        try:
            yield
            self.target.synchronize()
        except NotHere as reason:
            entry |= {"ok": None, "detail": str(reason)}
        except Exception as error:  # anything that goes wrong on a device is the finding
            entry |= {"ok": False, "detail": f"{type(error).__name__}: {error}"}
        self.checks.append(entry)
        self.save()

    @property
    def is_right(self) -> bool:
        """No check failed, and something was looked at."""
        found = [entry["ok"] for entry in self.checks]
        return False not in found and bool(self.rows or found)

    def save(self, *, complete: bool = False) -> None:
        """Write the file as it stands."""
        self._environment = self._environment or environment()
        emit_json(
            {
                "schema": 1,
                "experiment": f"gpu_check_{self.stage}",
                "target": LABELS[self.target.kind],
                "complete": complete,
                "seconds": monotonic() - self._start,
                "environment": self._environment,
                "settings": self.settings,
                "headline": self.headline,
                "checks": self.checks,
                "rows": self.rows,
            },
            self.path,
        )
