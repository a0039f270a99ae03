"""Where a token lies: the shape of the address rows under each layout.

A row is a multiple of ``lcm(token bytes, page bytes)`` long, so that every row starts at a whole
token and no two rows share a page by accident, even where a token straddles pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..geometry import KVGeometry
from .buffers import Buffer


@dataclass(frozen=True)
class Column:
    """One buffer's place: byte ``row · row_bytes + offset`` of a reservation."""

    reservation: int
    row_bytes: int
    offset: int


@dataclass(frozen=True)
class Place:
    """Where K or V of one layer is, in bytes within a reservation.

    Head ``h`` of token ``t`` in row ``r`` is at ``r · row_bytes + t · token_stride +
    h · head_stride + offset``.
    """

    reservation: int
    row_bytes: int
    token_stride: int
    head_stride: int
    offset: int

    @property
    def row_tokens(self) -> int:
        """Distance between rows in steps of the token stride."""
        return self.row_bytes // self.token_stride


@dataclass
class RowPlan:
    """All reservations of a cache, what lies in them, and how each layer looks at them."""

    row_bytes: list[int] = field(default_factory=list)
    """Bytes per row of each reservation."""
    run_bytes: list[int] = field(default_factory=list)
    """Bytes of consecutive tokens within a row of each: the row, or one head's part of it."""
    token_bytes: list[int] = field(default_factory=list)
    """Distance of tokens in such a run."""
    columns: list[list[Column]] = field(default_factory=list)
    """By group and column, in the order of the allocator's buffers."""
    places: dict[tuple[int, int], Place] = field(default_factory=dict)
    """By layer and tensor (0: K, 1: V)."""


def plan_rows(
    geometry: KVGeometry, buffers: list[list[Buffer]], page_bytes: int, tokens: int
) -> RowPlan:
    """Lay out rows for sequences of up to ``tokens`` tokens.

    Parameters
    ----------
    buffers
        The allocator's buffers, by group.
    """
    plan = RowPlan()
    for group in buffers:
        whole = math.lcm(group[0].token_bytes, page_bytes)
        run = max(-(-tokens * group[0].token_bytes // whole), 1) * whole
        plan.columns.append([_add(plan, geometry, buffer, run) for buffer in group])
    return plan


def _add(plan: RowPlan, geometry: KVGeometry, buffer: Buffer, run: int) -> Column:
    """Give a buffer its run of addresses per row, in a reservation of its own or its layer's."""
    if buffer.head > 0:  # its layer's other heads came first
        place = plan.places[buffer.layers[0], buffer.tensor]
        return Column(place.reservation, place.row_bytes, buffer.head * run)
    reservation = len(plan.row_bytes)
    heads = geometry.layers[buffer.layers[0]].kv_heads if buffer.head == 0 else 1
    plan.row_bytes.append(heads * run)
    plan.run_bytes.append(run)
    plan.token_bytes.append(buffer.token_bytes)
    offset = 0
    for layer in buffer.layers:
        shape = geometry.layers[layer]
        head_stride = run if buffer.head == 0 else shape.head_dim * geometry.itemsize
        for tensor in range(shape.tensors) if buffer.tensor < 0 else (buffer.tensor,):
            plan.places[layer, tensor] = Place(
                reservation, heads * run, buffer.token_bytes, head_stride, offset
            )
            offset += geometry.tensor_bytes(layer)
    return Column(reservation, heads * run, 0)
