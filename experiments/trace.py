"""A trace: when requests arrive and how long they are, in plain numpy columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from ..sequences import number
from .errors import BadInput
from .output import counted

Unit = Literal["s", "step"]
Ints = npt.NDArray[np.int64]
Key = int | str
Runs = tuple[tuple[Key, int], ...]
"""Leading runs ``(key, num_tokens)`` of a prompt: equal leading runs, equal leading tokens."""

TICKS = 10_000_000
"""Ticks per second: 100 ns, the finest stamp of any public trace."""
MAX_TOKENS = 2**40
"""Most tokens of one prompt or one output; more is a damaged file."""
MAX_STEP = 2**53 - 1
"""Largest arrival step: what a float64 still tells from its neighbours."""
MAX_SECONDS = 10**11
"""Latest time stamp: three thousand years; milliseconds since 1970 exceed it, and int64 holds its
ticks."""
MISSING = -1
"""Stands in ``max_new`` where the trace does not say."""


def whole_numbers(name: str, values: npt.ArrayLike) -> Ints:
    """A column as int64, copied; refuses numbers that are not whole, and what is no number."""
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iuf":
        raise ValueError(f"{name} must be whole numbers that int64 holds, not {given.dtype}")
    if given.dtype.kind == "f" and (wrong := given[given != np.trunc(given)]).size:
        raise ValueError(f"{name} must be whole numbers, not {wrong[0]}: round them")
    if (wrong := given[~((given >= -(2.0**63)) & (given < 2.0**63))]).size:
        raise ValueError(f"{name} must be whole numbers that int64 holds, not {wrong[0]}")
    return given.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival. All columns have one entry per request, read-only.

    Attributes
    ----------
    name : str
        Built-in name or file name, for titles.
    unit : {"s", "step"}
        What ``arrival`` counts.
    arrival : numpy.ndarray
        ``"s"``: float64 seconds from the first arrival, whole multiples of 100 ns.
        ``"step"``: int64 steps, as they stand. Never decreasing.
    prompt, output, max_new : numpy.ndarray
        int64 tokens: prompt (at least 1), true output (at least 0), and the most that the
        request may generate (−1: the trace does not say; see `with_max_new`).
    prefix : tuple of runs, or None
        For each request its leading runs ``(key, num_tokens)``; tokens after the last run
        are nobody else's. None: the trace says nothing about shared prefixes.
    notices : tuple of str
        What was done to the data on the way in, e.g. ``"12 rows sorted by time"``.
    failed, skipped : int
        Requests that failed when they were recorded (kept, output 0), and rows left out.

    Raises
    ------
    ValueError
        If the columns do not describe a trace.
    """

    name: str
    unit: Unit
    arrival: npt.NDArray[np.float64] | Ints
    prompt: Ints
    output: Ints
    max_new: Ints
    prefix: tuple[Runs, ...] | None = None
    notices: tuple[str, ...] = ()
    failed: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.unit not in ("s", "step"):
            raise ValueError(f"the unit of arrivals is 's' or 'step', not {self.unit!r}")
        for column in ("prompt", "output", "max_new"):
            self._store(column, whole_numbers(column, getattr(self, column)))
        if self.unit == "step":
            self._store("arrival", whole_numbers("arrival", self.arrival))
        else:
            ticks = np.rint(np.asarray(self.arrival, dtype=np.float64) * TICKS)
            self._store("arrival", (ticks - (ticks[0] if len(ticks) else 0)) / TICKS)
        self._check()

    def _store(self, column: str, values: npt.NDArray[np.float64] | Ints) -> None:
        values.flags.writeable = False
        object.__setattr__(self, column, values)

    def _check(self) -> None:
        columns = (self.arrival, self.prompt, self.output, self.max_new)
        if any(c.shape != (len(self.prompt),) for c in columns):
            raise ValueError("arrival, prompt, output and max_new must be columns of one length")
        if not np.isfinite(self.arrival).all() or (np.diff(self.arrival) < 0).any():
            raise ValueError("arrivals must be finite and sorted")
        if self.unit == "s" and (self.arrival > MAX_SECONDS).any():
            raise ValueError(f"arrivals must lie within {MAX_SECONDS:,} seconds of the first")
        if self.unit == "step" and ((self.arrival < 0) | (self.arrival > MAX_STEP)).any():
            raise ValueError(f"arrival steps must lie between 0 and {MAX_STEP}")
        for what, low in (("prompt", 1), ("output", 0), ("max_new", MISSING)):
            tokens = getattr(self, what)
            if ((tokens < low) | (tokens > MAX_TOKENS)).any():
                raise ValueError(f"{what} tokens must lie between {low} and {MAX_TOKENS}")
        if self.prefix is None:
            return
        if len(self.prefix) != len(self.prompt):
            raise ValueError("prefix needs one tuple of runs per request (an empty one is fine)")
        for runs, prompt in zip(self.prefix, self.prompt.tolist(), strict=True):
            if sum(size for _, size in runs) > prompt or any(size < 1 for _, size in runs):
                raise ValueError(
                    "runs of a prefix hold at least one token each and no more than the prompt"
                )

    @classmethod
    def from_rows(
        cls,
        name: str,
        unit: Unit,
        rows: Iterable[tuple[float, int, int, int | None]],
        *,
        prefix: Iterable[Runs] | None = None,
        notices: tuple[str, ...] = (),
    ) -> Trace:
        """Build a trace from ``(arrival, prompt, output, max_new or None)`` rows."""
        table = [(a, p, o, MISSING if m is None else m) for a, p, o, m in rows]
        columns = zip(*table, strict=True) if table else ((), (), (), ())
        arrival, prompt, output, max_new = map(np.array, columns)
        return cls(
            name,
            unit,
            arrival,
            prompt,
            output,
            max_new,
            None if prefix is None else tuple(prefix),
            notices,
        )

    def __len__(self) -> int:
        return len(self.prompt)

    def steps(self, step_ms: float) -> Ints:
        """Arrival step of each request: int64 ``[N]``.

        ``⌊(arrival − first arrival) / step⌋`` for seconds; steps as they stand, whatever
        ``step_ms``. Both the times and the step are whole ticks of 100 ns before they are
        divided, so that 0.3 s is step 3 of 100 ms (0.3 // 0.1 would say 2). Exact for
        traces of up to eight years.

        Raises
        ------
        BadInput
            If ``step_ms`` is not a positive number of at least 0.0001 ms.
        """
        step = number("step_ms", step_ms) * (TICKS // 1000)
        if not 1 <= step <= 2**53:
            raise BadInput(f"a step of {step_ms} ms is out of range: give 0.0001 ms or more")
        if self.unit == "step":
            return cast(Ints, self.arrival)
        ticks: Ints = np.rint(self.arrival * TICKS).astype(np.int64)
        return ticks // round(step)

    def head(self, n: int) -> Trace:
        """The first ``n`` requests (all of them if there are fewer)."""
        if n < 1:
            raise BadInput(f"cannot keep {n} requests of a trace: give 1 or more")
        if n >= len(self):
            return self
        return replace(
            self,
            arrival=self.arrival[:n],
            prompt=self.prompt[:n],
            output=self.output[:n],
            max_new=self.max_new[:n],
            prefix=None if self.prefix is None else self.prefix[:n],
            failed=int((self.output[:n] == 0).sum()) if self.failed else 0,
        )

    def with_max_new(self, rule: int | str | None = None, *, limit: int | None = None) -> Trace:
        """Fill in the missing ``max_new``; a notice records how. Given ones stay.

        Parameters
        ----------
        rule
            None: the largest output of the trace. A number (or its digits): that many.
            ``"limit"``: what the context limit leaves after the prompt. ``"output"``: the
            request's own true output.
        limit
            The model's context limit in tokens, needed by ``"limit"``.

        Raises
        ------
        BadInput
            If the rule is none of these, or ``"limit"`` meets a model without one.
        """
        values, reason = self._max_new_by(rule, limit)  # a bad rule is told in any case
        missing = self.max_new == MISSING
        max_new = np.where(missing, values, self.max_new)
        told: list[str] = []
        if missing.any():
            told.append(f"max_new is missing in {counted(int(missing.sum()), 'request')}: {reason}")
        if num_longer := int((self.output > max_new).sum()):
            told.append(
                f"{counted(num_longer, 'request')} got more tokens than max_new: reservations for "
                "it will not do"
            )
        told = [notice for notice in told if notice not in self.notices]
        return replace(self, max_new=max_new, notices=(*self.notices, *told)) if told else self

    def _max_new_by(self, rule: int | str | None, limit: int | None) -> tuple[Ints | int, str]:
        if rule is None:
            largest = int(self.output.max(initial=0))
            return largest, f"the largest output of the trace, {largest:,}, is taken"
        if rule == "output":
            return self.output, "their true output is taken"
        if rule == "limit":
            if limit is None:
                raise BadInput("--max-new limit needs a model with a context limit: name one")
            left = np.maximum(limit - self.prompt, 0)
            return left, f"what the limit of {limit:,} leaves after the prompt is taken"
        if isinstance(rule, str) and rule.isascii() and rule.isdecimal() and len(rule) <= 15:
            rule = int(rule)
        if isinstance(rule, str) or not 0 <= rule <= MAX_TOKENS:
            raise BadInput(f"--max-new takes a number of tokens, 'limit' or 'output', not {rule!r}")
        return rule, f"{rule:,} is taken"


def check_trace(trace: object) -> None:
    """Refuse what is no trace, such as the name of one."""
    if not isinstance(trace, Trace):
        raise TypeError(
            f"a trace is needed, not {trace!r}: kvalloc.experiments.readers.read_trace reads one"
        )
