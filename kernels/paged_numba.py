"""Paged attention for the CPU: our own kernel, compiled by Numba once and cached on disk.

Online softmax over the pages; the query heads of a group share each load of K and V; threads
share the work by sequence, head, and parts of long contexts (``numba_plan``, ``numba_items``).
"""

from __future__ import annotations

import math

import numba
import numpy as np
import torch

from ..contract import PagedView

# Loading compiled code makes Numba start its OpenMP threads, and where it shares the runtime
# with torch that changes the number of threads that torch uses.
_torch_threads = torch.get_num_threads()
from .numba_items import BFLOAT16, FLOAT16, FLOAT32, attend_items  # noqa: E402
from .numba_plan import plan  # noqa: E402
from .numba_vectors import LANES  # noqa: E402

if torch.get_num_threads() != _torch_threads:
    torch.set_num_threads(_torch_threads)

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
FEW_ROWS = 256
"""Query rows (times heads) per sequence up to which one item takes all KV heads of its tokens.

A page is then read from end to end. The results of more rows would fall out of the cache."""


def paged_attention(
    q: torch.Tensor, view: PagedView, *, q_lens: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """Attend through a paged view on the CPU; arguments as checked by ``attention.attend``.

    Runs on as many threads as torch does, within Numba's own limit.

    Raises
    ------
    ValueError
        The block table names a page that does not exist, for a token that must be read.
    """
    num_q_heads, dim = q.shape[1:]
    num_pages, page_size, kv_heads = view.k.shape[:3]
    group = num_q_heads // kv_heads
    limit = 0 if window is None else window
    table = view.block_table.numpy()
    available = numba.get_num_threads()
    threads = min(torch.get_num_threads(), available)
    heads_per_task = kv_heads if max(q_lens) * num_q_heads <= FEW_ROWS else 1
    tasks, items, num_blocks, broken = plan(
        np.array(q_lens, dtype=np.int64),
        view.lengths.numpy(),
        view.first.numpy(),
        table,
        (page_size, num_pages, kv_heads, group, heads_per_task, limit, threads),
    )
    if broken >= 0:
        raise ValueError(
            f"sequence {broken}: its block table names a page outside [0, {num_pages}) "
            "for a stored token"
        )
    # Whole vectors; the softmax is computed in powers of two, hence the factor log2(e).
    queries = torch.zeros(len(q), num_q_heads, -(-dim // LANES) * LANES)
    queries[..., :dim] = q.detach()
    queries *= scale / math.log(2.0)
    out = torch.zeros(q.shape)
    numba.set_num_threads(threads)
    try:
        attend_items(
            threads,
            queries.numpy(),
            out.numpy(),
            table,
            np.array([_memory(view.k), _memory(view.v)], dtype=np.int64),
            np.array([page_size, group, KINDS[view.k.dtype], limit], dtype=np.int64),
            tasks,
            items,
            num_blocks,
        )
    finally:
        numba.set_num_threads(available)
    return out.to(q.dtype)


def _memory(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    """Address and strides (page, token, head) in bytes."""
    size = tensor.element_size()
    page, token, head = (stride * size for stride in tensor.stride()[:3])
    return tensor.data_ptr(), page, token, head
