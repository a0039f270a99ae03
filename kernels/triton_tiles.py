"""What the paged kernel is compiled for: tile sizes without a driver, so without autotuning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes per element of the dtypes that the kernel reads; torch's names."""
MAX_HEAD_DIM = 256
MAX_SPLITS = 128
"""Most shares that the context of one query tile is cut into."""
COMBINE_CHUNK = 16
"""Splits that the combine step holds in registers at once."""
MIN_SPLIT_TOKENS = 256
"""A share smaller than this costs more to combine than it gains."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs per streaming multiprocessor up to which contexts are cut."""


class Tiles(NamedTuple):
    """Sizes of one step of ``attend_pages``."""

    block_m: int
    """Query rows: (token, head of the group) pairs."""
    block_n: int
    """Keys."""
    block_d: int
    """Head dim, padded to a power of two."""
    num_warps: int


@dataclass(frozen=True)
class Variant:
    """One specialisation of ``attend_pages``: all that is fixed when it is compiled.

    Attributes
    ----------
    arch : int
        Compute capability, 10 × major + minor: 80, 90, 100…
    dtype : str
        A key of ``ITEMSIZE``.
    head_dim, page_size : int
        Elements per head, tokens per page.
    group : int
        Query heads per KV head.
    longest_q : int
        Query tokens of the longest query: 1 for decoding.
    ragged, windowed, split : bool
        Queries of unequal lengths; a sliding window; contexts cut into shares.
    """

    arch: int
    dtype: str
    head_dim: int
    page_size: int
    group: int
    longest_q: int
    ragged: bool = False
    windowed: bool = False
    split: bool = False

    @cached_property
    def tiles(self) -> Tiles:
        """Tile sizes, chosen so that neither registers nor 99 KiB of shared memory run out."""
        block_d = max(16, power_of_two(self.head_dim))
        rows = power_of_two(self.longest_q * self.group)
        if ITEMSIZE[self.dtype] == 4:
            # Exact float32 products use no tensor cores and hold their operands in registers.
            block_m = min(max(16, rows), 32)
            return Tiles(block_m, 16 if block_m * block_d > 2048 else 32, block_d, 8)
        # From Hopper on, the wide tensor instructions read operands from shared memory; the
        # others (Ampere, Ada, consumer Blackwell) need registers for them.
        wide = 90 <= self.arch < 120
        largest_m = 128 if block_d <= 128 else 64
        if block_d == 128 and self.ragged and not wide:
            largest_m = 64
        block_m = min(max(16, rows), largest_m)
        tight = block_d == 128 and block_m > 16 and not wide
        block_n = 32 if block_d == 256 or tight else 64
        num_warps = 8 if block_d == 256 or block_m == 128 else 4
        return Tiles(block_m, block_n, block_d, num_warps)

    def constants(self, *, upcast: bool) -> dict[str, bool | int]:
        """The ``constexpr`` arguments of ``attend_pages``."""
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "PAGE_SIZE": self.page_size,
            "RAGGED": self.ragged,
            "WINDOWED": self.windowed,
            "SPLIT": self.split,
            # A second loop without masks pays where arithmetic, not memory, is the limit.
            "INTERIOR": self.longest_q * self.group > 16,
            "UPCAST": upcast,
            "BLOCK_M": self.tiles.block_m,
            "BLOCK_N": self.tiles.block_n,
            "BLOCK_D": self.tiles.block_d,
        }

    def combine_constants(self) -> dict[str, bool | int]:
        """The ``constexpr`` arguments of ``combine_splits``."""
        return {
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": self.tiles.block_d,
            "MAX_SPLITS": MAX_SPLITS,
            "CHUNK": COMBINE_CHUNK,
        }

    def options(self) -> dict[str, bool | int]:
        """Launch options of ``attend_pages``."""
        # A page is looked up one step before its rows are loaded: fewer stages load nothing
        # ahead (Triton gives each of the two dependent loads (num_stages − 1) // 2 steps).
        return {"num_warps": self.tiles.num_warps, "num_stages": 3, "enable_fp_fusion": True}

    def combine_options(self) -> dict[str, bool | int]:
        """Launch options of ``combine_splits``."""
        return {"num_warps": 4, "enable_fp_fusion": True}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def ceil_div(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)


def choose_splits(num_programs: int, longest: int, num_processors: int) -> int:
    """Into how many shares each context is cut, so that a small batch fills the device.

    Parameters
    ----------
    num_programs
        Query tiles × KV heads.
    longest
        Most keys that a query tile may read, in tokens.
    num_processors
        Streaming multiprocessors of the device.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // max(num_programs, 1)
    return max(1, min(wanted, ceil_div(longest, MIN_SPLIT_TOKENS), MAX_SPLITS))
