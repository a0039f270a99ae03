# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""How a batch is cut into work for the threads.

A *task* is a set of output rows: one sequence, a chunk of its queries, one KV head or several.
An *item* is a part of a task's context; its result goes to its own *blocks* of ``ROWS`` rows,
and the items of a task are merged afterwards.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .numba_vectors import ROWS

CHUNK_ROWS = 128
"""Most query rows (queries × group) per KV head and task."""
SMALLEST_PART = 64
"""Fewest tokens worth an item of their own."""
ITEMS_PER_THREAD = 8
"""More items than threads, so that a slow core can fall behind without holding up the others."""

SEQ, Q_ROW, Q_COUNT, POSITION, HEAD, NUM_HEADS, FIRST_ITEM, NUM_ITEMS = range(8)
"""Columns of the task table; ``POSITION`` is that of the first query in its sequence."""
TASK, LOW, HIGH, BLOCK = range(4)
"""Columns of the item table: tokens ``[LOW, HIGH)``, and the first of its blocks."""


@njit(
    "Tuple((int64[:,::1], int64[:,::1], int64, int64))"
    "(int64[::1], int32[:], int32[:], int32[:,:], UniTuple(int64, 7))",
    cache=True,
    nogil=True,
)
def plan(q_lens, lengths, first, table, sizes):
    """Return tasks, items, the number of blocks, and a sequence with a broken table or −1.

    ``sizes``: page size, number of pages, KV heads, group, KV heads per task, window (0: none),
    threads.
    """
    page_size, num_pages, kv_heads, group, heads, window, threads = sizes
    chunk = max(1, CHUNK_ROWS // group)
    num_tasks = 0
    work = 0
    for seq in range(len(q_lens)):
        if q_lens[seq] == 0 or first[seq] == lengths[seq]:
            continue
        for page in range(first[seq] // page_size, (lengths[seq] - 1) // page_size + 1):
            if not 0 <= table[seq, page] < num_pages:
                return np.empty((0, 8), np.int64), np.empty((0, 4), np.int64), 0, seq
        tasks_here = ((q_lens[seq] - 1) // chunk + 1) * (kv_heads // heads)
        num_tasks += tasks_here
        work += tasks_here * (lengths[seq] - first[seq])
    share = max(SMALLEST_PART, work // (threads * ITEMS_PER_THREAD) + 1)
    tasks = np.empty((num_tasks, 8), np.int64)
    items = np.empty((num_tasks + work // share, 4), np.int64)
    task = item = block = q_row = 0
    for seq in range(len(q_lens)):
        chunks = range(0, q_lens[seq] if first[seq] < lengths[seq] else 0, chunk)
        for begin in chunks:
            count = min(chunk, q_lens[seq] - begin)
            position = lengths[seq] - q_lens[seq] + begin
            low = max(first[seq], position - window + 1) if window else first[seq]
            tokens = position + count - low
            parts = max(1, tokens // share) if threads > 1 else 1
            for head in range(0, kv_heads, heads):
                tasks[task] = (seq, q_row + begin, count, position, head, heads, item, parts)
                for part in range(parts):
                    until = low + tokens * (part + 1) // parts
                    items[item] = (task, low + tokens * part // parts, until, block)
                    block += heads * ((count * group - 1) // ROWS + 1)
                    item += 1
                task += 1
        q_row += q_lens[seq]
    return tasks, items[:item].copy(), block, -1
