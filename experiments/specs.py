"""Backends (``contiguous:max``, ``paged:16``, ``vmm:64KiB``, …) and models by their names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import models
from ..contiguous.allocator import ContiguousAllocator
from ..contiguous.placement import PLACEMENTS
from ..contiguous.policies import POLICIES
from ..contract import Allocator, KVCache
from ..geometry import SLOTS, KVGeometry
from ..paged import PagedAllocator
from ..vmm import VmmAllocator
from .errors import BadInput
from .output import MOST_BYTES, parse_bytes

KINDS = ("contiguous", "paged", "vmm")
DEFAULT_PAGE_SIZE = 16
DEFAULT_PAGE_BYTES = 2 << 20
LEAST_PAGE_BYTES = 4 << 10
"""No system maps less."""
GRAMMAR = (
    "contiguous:max|limit|pow2|oracle|exact[:first-fit|best-fit|buddy], paged:BLOCK, "
    "vmm[:PAGE][:interleaved]"
)


@dataclass(frozen=True)
class Spec:
    """One backend as the command line names it.

    Attributes
    ----------
    text : str
        As it was written; results echo it.
    kind : str
        ``contiguous``, ``paged`` or ``vmm``.
    options : dict
        Arguments of the allocator beyond geometry, memory and limit.
    """

    text: str
    kind: str
    options: dict[str, Any]

    def allocator(
        self,
        geometry: KVGeometry,
        memory_bytes: int,
        limit: int | None = None,
        *,
        layout: str | None = None,
    ) -> Allocator:
        """The books alone; those of ``vmm`` depend on the memory's order, as its buffers do."""
        options: dict[str, Any] = {"limit": limit, **self.options}
        if layout is not None and self.kind == "vmm":
            options.setdefault("layout", layout)
        maker = {"contiguous": ContiguousAllocator, "paged": PagedAllocator, "vmm": VmmAllocator}
        made = self._made(maker[self.kind], geometry, memory_bytes, **options)
        assert isinstance(made, Allocator)
        return made

    def cache(
        self, geometry: KVGeometry, memory_bytes: int, *, device: str, layout: str | None = None
    ) -> KVCache:
        """Books and tensors."""
        from ..contiguous import ContiguousKVCache
        from ..paged import PagedKVCache
        from ..vmm import VmmKVCache

        options: dict[str, Any] = {"device": device, **self.options}
        if layout is not None:
            options.setdefault("layout", layout)
        maker = {"contiguous": ContiguousKVCache, "paged": PagedKVCache, "vmm": VmmKVCache}
        made = self._made(maker[self.kind], geometry, memory_bytes, **options)
        assert isinstance(made, KVCache)
        return made

    def _made(self, maker: Any, geometry: KVGeometry, memory_bytes: int, **options: Any) -> Any:
        if self.kind == "contiguous" and options["policy"] == "limit":
            if geometry.max_context is None and options.get("limit") is None:
                raise BadInput(
                    f"{self.text} reserves the model's context limit, and there is no model: "
                    "use --model NAME --memory SIZE"
                )
        try:
            return maker(geometry, memory_bytes, **options)
        except (ValueError, MemoryError) as error:
            raise BadInput(f"{self.text}: {error}") from error


def parse_specs(
    texts: Sequence[str], *, slots: bool, notify: Callable[[str], None]
) -> tuple[Spec, ...]:
    """Read SPECs; what is the same backend under two names runs once, and is told."""
    specs: list[Spec] = []
    for text in texts:
        spec = parse_spec(text, slots=slots)
        alike = [one.text for one in specs if (one.kind, one.options) == (spec.kind, spec.options)]
        if alike:
            notify(f"{spec.text} is named twice (as {alike[0]}) and runs once")
        else:
            specs.append(spec)
    return tuple(specs)


def parse_spec(text: str, *, slots: bool) -> Spec:
    """Read a SPEC; with ``slots`` a vmm page counts tokens, otherwise bytes.

    Raises
    ------
    BadInput
        Unknown backend, policy, placement or page size.
    """
    kind, *parts = text.strip().split(":")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise BadInput(f"unknown backend {text!r}; {hint}write {GRAMMAR}")
    reader = {"contiguous": _contiguous, "paged": _paged, "vmm": _vmm}[kind]
    return Spec(text, kind, reader(text, parts, slots))


def _contiguous(text: str, parts: list[str], slots: bool) -> dict[str, Any]:
    if not parts or len(parts) > 2 or parts[0] not in POLICIES:
        wrong = "names no policy" if not parts else f"has no policy {parts[0]!r}"
        wrong = "has too many parts" if len(parts) > 2 else wrong
        raise BadInput(f"{text!r} {wrong}: write contiguous:{'|'.join(POLICIES)}[:PLACEMENT]")
    placement = parts[1] if len(parts) == 2 else "first-fit"
    if placement not in PLACEMENTS:
        raise BadInput(f"unknown placement in {text!r}: write one of {', '.join(PLACEMENTS)}")
    return {"policy": parts[0], "placement": placement}


def _paged(text: str, parts: list[str], slots: bool) -> dict[str, Any]:
    if len(parts) != 1:
        wrong = "has too many parts" if parts else "names no block size"
        raise BadInput(f"{text!r} {wrong}: write paged:BLOCK, as in paged:16")
    return {"page_size": _whole(text, parts[0], "paged:16")}


def _vmm(text: str, parts: list[str], slots: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if parts and parts[-1] == "interleaved":
        options["layout"] = parts.pop()
    if len(parts) > 1:
        raise BadInput(f"{text!r} is not a vmm backend: write vmm[:PAGE][:interleaved]")
    if slots:
        return {
            "page_bytes": _whole(text, parts[0], "vmm:16") if parts else DEFAULT_PAGE_SIZE,
            **options,
        }
    page_bytes = parse_bytes(parts[0]) if parts else DEFAULT_PAGE_BYTES
    if page_bytes < LEAST_PAGE_BYTES:
        raise BadInput(
            f"{text!r}: a page is a size here, at least 4KiB, as in vmm:64KiB (with --slots it "
            "counts tokens)"
        )
    return {"page_bytes": page_bytes, **options}


def _whole(text: str, number: str, example: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", number, re.ASCII) or int(number) < 1:
        raise BadInput(
            f"{text!r}: a page is a whole number of tokens here, at least 1, as in {example}"
        )
    return int(number)


def token_geometry(num_slots: int) -> tuple[KVGeometry, int]:
    """Geometry and memory of ``--slots N``."""
    if num_slots < 1:
        raise BadInput("--slots must be at least 1")
    if num_slots > MOST_BYTES:
        raise BadInput(f"--slots {num_slots} is more than any memory holds; give at most 2^60")
    return SLOTS, num_slots


def chosen_model(name: str, dtype: str | None = None, tp: int = 1) -> KVGeometry:
    """The geometry that ``--model``, ``--dtype`` and ``--tp`` ask for.

    Raises
    ------
    BadInput
        Unknown model or dtype, or heads that do not divide.
    """
    try:
        model = models.geometry(name)
        return (model.with_dtype(dtype) if dtype else model).shard(tp)
    except ValueError as error:
        raise BadInput(str(error)) from error
