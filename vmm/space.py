"""The addresses of a cache's rows: reserved once, seen as tensors, with pages put under parts."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from ..geometry import KVGeometry
from ..pages.table import RowPages
from ..tensors import torch_dtype
from .dlpack import Views
from .driver import DriverError
from .guard import GUARD_TOKENS, GuardedReservation, ZeroPage
from .physical import PhysicalPool
from .reservation import Reservation
from .rows import RowPlan

MOST_ADDRESS_BYTES = 1 << 44
"""16 of the 128 TiB of addresses that a process has: what the rows of one cache may take."""
MOST_ROW_TOKENS = (1 << 31) - 1
"""Tokens over all rows of a buffer: the dense kernels of GPUs count them in int32."""


def most_rows(plan: RowPlan) -> int:
    """Rows that the addresses of one cache can hold, at least 1."""
    row_tokens = max(place.row_tokens for place in plan.places.values())
    return max(1, min(MOST_ADDRESS_BYTES // sum(plan.row_bytes), MOST_ROW_TOKENS // row_tokens))


class RowSpace:
    """Rows of addresses under one base per buffer, since a view has one base.

    Parameters
    ----------
    geometry, plan
        What lies where in a row.
    num_rows
        How many of them.
    pool
        Where the pages and the driver come from.
    scrub
        Have the pool zero what is taken from it from now on.
    guarded
        Lay zeros behind what is mapped, as far as a tile of ``GUARD_TOKENS`` tokens reaches.

    Attributes
    ----------
    k, v : list of torch.Tensor
        Per layer ``[T, H_kv, D]`` over all rows, mostly unmapped.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        plan: RowPlan,
        num_rows: int,
        pool: PhysicalPool,
        *,
        scrub: bool = False,
        guarded: bool = False,
    ) -> None:
        # First of all attributes: who is dropped without ``close`` loses its tensors before its
        # driver, which returns its memory only if nobody looks at it.
        self.k: list[torch.Tensor] = []
        self.v: list[torch.Tensor] = []
        self._bytes: list[torch.Tensor] = []
        self._geometry = geometry
        self._plan = plan
        self._pool = pool
        if scrub:
            pool.begin_to_scrub()
        self._views = Views()
        self._reservations: list[Reservation] = []
        self._zero: ZeroPage | None = None
        with ExitStack() as undo:
            if guarded:
                self._zero = ZeroPage(pool.driver, pool.page_bytes)
                undo.callback(self._zero.close)
            for i in range(len(plan.row_bytes)):
                made = self._reserve(i, num_rows)
                self._reservations.append(made)
                undo.callback(made.free)
            self._columns = [
                [(self._reservations[c.reservation], c.row_bytes, c.offset) for c in columns]
                for columns in plan.columns
            ]
            undo.callback(self._drop_tensors)
            self._make_tensors()
            undo.pop_all()

    def _reserve(self, i: int, num_rows: int) -> Reservation:
        """The i-th reservation, for all rows."""
        plan, driver, size = self._plan, self._pool.driver, self._pool.page_bytes
        num_bytes = plan.row_bytes[i] * num_rows
        if self._zero is None:
            return Reservation(driver, num_bytes, size)
        return GuardedReservation(
            driver,
            num_bytes,
            size,
            zero=self._zero,
            run_pages=plan.run_bytes[i] // size,
            reach=-(-GUARD_TOKENS * plan.token_bytes[i] // size),
        )

    def _make_tensors(self) -> None:
        """One storage per reservation, seen as bytes and as K and V of layers."""
        tensor, add = self._pool.driver.tensor, self._views.add
        self._bytes = [
            add(tensor(made.address, (made.num_bytes,), torch.uint8), made.address)
            for made in self._reservations
        ]
        layers = range(len(self._geometry.layers))
        self.k, self.v = ([self._tensor(layer, i) for layer in layers] for i in range(2))

    def _tensor(self, layer: int, tensor: int) -> torch.Tensor:
        """K (0) or V (1) of a layer over all rows."""
        place, shape = self._plan.places[layer, tensor], self._geometry.layers[layer]
        dtype = torch_dtype(self._geometry)
        used = place.offset + (shape.kv_heads - 1) * place.head_stride
        used += shape.head_dim * dtype.itemsize
        num_bytes = self._reservations[place.reservation].num_bytes
        num_tokens = (num_bytes - used) // place.token_stride + 1
        strides = (place.token_stride // dtype.itemsize, place.head_stride // dtype.itemsize, 1)
        size = (num_tokens, shape.kv_heads, shape.head_dim)
        flat = self._bytes[place.reservation].view(dtype)
        return flat.as_strided(size, strides, place.offset // dtype.itemsize)

    def _drop_tensors(self) -> None:
        self.k, self.v, self._bytes = [], [], []

    # ------------------------------------------------------------------ pages

    def map(self, row: int, g: int, begin: int, pages: RowPages) -> None:
        """Put pages under a row, from the ``begin``-th of each column on; all or nothing.

        Parameters
        ----------
        g
            The group of buffers.
        pages
            ``[columns of the group, n]``. One access grant per column.
        """
        done: list[tuple[Reservation, int, list[int]]] = []
        try:
            for reservation, at, handles in self._runs(row, g, begin, pages):
                reservation.map(at, handles)
                done.append((reservation, at, handles))
            if self._pool.scrubs and self._pool.unclean[pages].any():
                self._clean(row, g, begin, pages)
        except BaseException:
            for reservation, at, handles in reversed(done):
                reservation.unmap(at, handles)
            raise

    def unmap(self, row: int, g: int, begin: int, pages: RowPages) -> None:
        """Undo ``map``; all or nothing. Nothing queued may still read the pages."""
        done: list[tuple[Reservation, int, list[int]]] = []
        try:
            for reservation, at, handles in self._runs(row, g, begin, pages):
                reservation.unmap(at, handles)
                done.append((reservation, at, handles))
        except BaseException:
            for reservation, at, handles in reversed(done):
                reservation.map(at, handles)
            raise

    def is_guarded(self, row: int, g: int, begin: int, end: int) -> bool:
        """Whether zeros lie where pages are to go; nothing queued may still read them then."""
        if self._zero is None:
            return False
        at = begin * self._pool.page_bytes
        return any(
            isinstance(reservation, GuardedReservation)
            and reservation.is_guarded(row * row_bytes + offset + at, end - begin)
            for reservation, row_bytes, offset in self._columns[g]
        )

    def _runs(
        self, row: int, g: int, begin: int, pages: RowPages
    ) -> list[tuple[Reservation, int, list[int]]]:
        """Per column of a group: where the pages go, and their handles."""
        handles, at = self._pool.handles(pages), begin * self._pool.page_bytes
        return [
            (reservation, row * row_bytes + offset + at, of_column)
            for (reservation, row_bytes, offset), of_column in zip(
                self._columns[g], handles, strict=True
            )
        ]

    # ------------------------------------------------------------------ contents

    def spots(self, row: int, g: int, begin: int, end: int) -> list[torch.Tensor]:
        """The bytes of pages ``begin … end − 1`` of a row, one tensor per column."""
        size, spots = self._pool.page_bytes, []
        for column in self._plan.columns[g]:
            at = row * column.row_bytes + column.offset
            flat = self._bytes[column.reservation]
            spots.append(flat[at + begin * size : at + end * size])
        return spots

    def _clean(self, row: int, g: int, begin: int, pages: RowPages) -> None:
        """Overwrite pages just put in place whose remains are nobody's business."""
        size = self._pool.page_bytes
        for spot, unclean in zip(
            self.spots(row, g, begin, begin + pages.shape[1]),
            self._pool.unclean[pages],
            strict=True,
        ):
            for n in unclean.nonzero()[0].tolist():
                spot[n * size : (n + 1) * size].zero_()
        # Whoever uses the pages next may be on another stream.
        self._pool.driver.wait(self._pool.driver.fence())
        self._pool.unclean[pages] = False

    # ------------------------------------------------------------------ giving back

    def require_unseen(self) -> None:
        """Refuse if a tensor that was handed out lives on: it would look at foreign memory.

        Raises
        ------
        DriverError
            Nothing was changed.
        """
        num_own = len(self._bytes)
        self._drop_tensors()
        num_living = self._views.living()
        if num_own:
            self._make_tensors()
        if num_living:
            raise DriverError(
                f"close: {num_living} tensors over the memory of this cache are alive (views, or "
                "slices of them): `del` them, then close again"
            )

    def close(self) -> None:
        """Free the addresses; nothing may be mapped. After an error it goes on from there."""
        self._drop_tensors()
        while self._reservations:
            self._reservations[-1].free()
            self._reservations.pop()
        if self._zero is not None:
            self._zero.close()
