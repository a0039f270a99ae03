"""Mapping ahead: the next pages of sequences near their boundary, while the caller computes.

Driver calls release the interpreter lock, so a page that is mapped here costs the next ``grow``
nothing. What is mapped ahead is warm: free for whoever needs it, and taken back when the pool
is dry. A failure here loses nothing: ``grow`` will map, or refuse, by itself.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from ..contract import OutOfMemory
from .driver import DriverError

if TYPE_CHECKING:
    from .cache import VmmKVCache

log = logging.getLogger(__name__)


class Mapper:
    """A thread that keeps ``depth`` pages ready for sequences within ``distance`` of a boundary.

    Parameters
    ----------
    cache
        Whose rows; held weakly, so that dropping a cache ends its thread.
    distance
        Tokens before the boundary at which mapping begins.
    depth
        Pages per buffer to have ready.

    Attributes
    ----------
    num_pages, num_failures : int
        Pages mapped ahead so far, and attempts that the driver refused.
    """

    def __init__(self, cache: VmmKVCache, distance: int, depth: int) -> None:
        self.distance = distance
        self.depth = depth
        self.num_pages = 0
        self.num_failures = 0
        self._cache = weakref.ref(cache, lambda _: self._stop())
        self._wanted = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvalloc-mapper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for work; returns at once."""
        self._idle.clear()
        self._wanted.set()

    def wait(self) -> None:
        """Return when everything asked for so far has been mapped, or has failed."""
        self._idle.wait()

    def close(self) -> None:
        """Finish the page in hand and end the thread."""
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _stop(self) -> None:
        self._closed = True
        self._wanted.set()

    def _run(self) -> None:
        try:
            while True:
                self._wanted.wait()
                self._wanted.clear()
                if self._closed:
                    return
                self._map_some()
                if not self._wanted.is_set():
                    self._idle.set()
        finally:
            self._idle.set()

    def _map_some(self) -> None:
        """One row at a time under the lock, so that the caller never waits for more than that."""
        cache = self._cache()
        rows = [] if cache is None else cache.rows_near_boundary(self.distance, self.depth)
        for row in rows:
            if self._closed or cache is None:
                return
            try:
                self.num_pages += cache.map_ahead(row, self.distance, self.depth)
            except (OutOfMemory, DriverError) as error:
                self.num_failures += 1
                log.debug("mapping ahead of row %d failed: %s", row, error)
