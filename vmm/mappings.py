"""The host driver's books: which handles exist and what is mapped where. No system calls."""

from __future__ import annotations

from .driver import DriverError


class Page:
    """A range of the memory file, its mappings counted; the memory goes with the last of all."""

    __slots__ = ("is_held", "num_bytes", "num_mappings", "offset")

    def __init__(self, offset: int, num_bytes: int) -> None:
        self.offset = offset
        self.num_bytes = num_bytes
        self.num_mappings = 0
        self.is_held = True

    @property
    def is_gone(self) -> bool:
        """Neither a handle nor a mapping is left."""
        return not self.is_held and self.num_mappings == 0


class Mappings:
    """Handles and mappings of one driver, with the rules for them. The driver's lock guards it.

    The checks come apart from the entries, so that the system can be asked in between and its
    refusal leaves nothing to undo.
    """

    def __init__(self, granularity: int) -> None:
        self._granularity = granularity
        self._handles: dict[int, Page] = {}
        # Address -> page, for the first granule of each mapping; None for its other granules.
        self._mapped: dict[int, Page | None] = {}
        self._next_handle = 1

    def add(self, page: Page) -> int:
        """A handle for a page. Never one that was used before: a stale handle must not fit."""
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = page
        return handle

    def drop(self, handle: int) -> Page:
        """Forget a handle; returns its page."""
        page = self._handles.pop(handle, None)
        if page is None:
            raise DriverError(f"release: no page has handle {handle}: release each one once")
        page.is_held = False
        return page

    def hold(self, handle: int, page: Page) -> None:
        """Undo ``drop``."""
        page.is_held = True
        self._handles[handle] = page

    def check_map(self, address: int, num_bytes: int, handle: int) -> Page:
        """The page of a handle, if it may be mapped there."""
        page = self._handles.get(handle)
        if page is None:
            raise DriverError(f"map: no page has handle {handle}: map before the release")
        if page.num_bytes != num_bytes:
            raise DriverError(
                f"map: page {handle} has {page.num_bytes} bytes, not {num_bytes}: map it whole"
            )
        for granule in range(address, address + num_bytes, self._granularity):
            if granule in self._mapped:
                raise DriverError(f"map: {granule:#x} is mapped already: unmap it first")
        return page

    def enter(self, address: int, page: Page) -> None:
        """Book a mapping."""
        if page.num_bytes != self._granularity:
            granules = range(address, address + page.num_bytes, self._granularity)
            self._mapped.update(dict.fromkeys(granules))
        self._mapped[address] = page
        page.num_mappings += 1

    def run(self, call: str, address: int, num_bytes: int) -> list[Page]:
        """The pages of a run of addresses, if whole mappings fill it without a gap."""
        pages, stop = [], address + num_bytes
        while address < stop:
            page = self._mapped.get(address)
            if page is None:
                raise DriverError(
                    f"{call}: no mapping starts at {address:#x}: give a run of whole mappings"
                )
            pages.append(page)
            address += page.num_bytes
        if address > stop:
            raise DriverError(f"{call}: the run ends inside a mapping: end it at {address:#x}")
        return pages

    def remove(self, address: int, num_bytes: int, pages: list[Page]) -> list[Page]:
        """Unbook a run; returns the pages that nothing holds any more, each once."""
        for granule in range(address, address + num_bytes, self._granularity):
            del self._mapped[granule]
        for page in pages:
            page.num_mappings -= 1
        return [page for page in dict.fromkeys(pages) if page.is_gone]

    def clear(self) -> None:
        """Forget everything."""
        self._handles.clear()
        self._mapped.clear()
