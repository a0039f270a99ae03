"""Mapping ahead: the next pages of sequences near their boundary, while the caller computes.

Driver calls release the interpreter lock, so a page that is mapped here costs the next ``grow``
nothing. What is mapped ahead is warm: free for whoever needs it, and taken back when
memory is short. A failure here loses nothing: ``grow`` will map, or refuse, by itself.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

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
        self._state = threading.Condition()
        self._num_asked = 0
        self._num_answered = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvalloc-mapper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for work; returns at once."""
        with self._state:
            self._num_asked += 1
            self._state.notify_all()

    def wait(self) -> None:
        """Return when everything asked for so far has been mapped, or has failed."""
        with self._state:
            asked = self._num_asked
            self._state.wait_for(lambda: self._closed or self._num_answered >= asked)

    def close(self) -> None:
        """Finish the page in hand and end the thread."""
        self._stop()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _stop(self) -> None:
        with self._state:
            self._closed = True
            self._state.notify_all()

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or self._num_asked > self._num_answered)
                if self._closed:
                    return
                asked = self._num_asked
            self._map_some()
            with self._state:
                self._num_answered = asked
                self._state.notify_all()

    def _map_some(self) -> None:
        """One row at a time under the lock, so that the caller never waits for more than that."""
        cache = self._cache()
        if cache is None:
            return
        for row in cache.rows_near_boundary(self.distance, self.depth):
            if self._closed:
                return
            try:
                self.num_pages += cache.map_ahead(row, self.distance, self.depth)
            except Exception as error:  # the caller meets it in `grow`, if it lasts
                self.num_failures += 1
                log.debug("mapping ahead of row %d failed: %s", row, error)
