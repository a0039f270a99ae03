# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Paged attention for the CPU: our own kernel, compiled by Numba, in the words of ``numba_simd``.

Online softmax over the pages. Work is cut into *items*: one sequence × one KV head (or all of
them, where a token's heads are neighbours in memory) × a chunk of its queries × a part of its
context. Threads take items from a shared counter; a second pass merges the parts.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange, types

from ..contract import PagedView
from . import numba_simd as simd

TILE = 64
"""Tokens per step: their K and V rows stay in the second-level cache."""
CHUNK_ROWS = 128
"""Most query rows (queries × heads of the group) per KV head and item."""
SMALLEST_PART = 512
"""Fewest tokens worth an item of their own."""
ITEMS_PER_THREAD = 8
"""More items than threads, so that a slow core can fall behind without holding up the others."""

ROWS, TOKENS, LANES, MASKED = simd.ROWS, simd.TOKENS, simd.LANES, simd.MASKED
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# Columns of the work tables.
SEQ, Q_ROW, Q_COUNT, Q_POSITION, HEAD, NUM_HEADS, FIRST_ITEM, NUM_ITEMS = range(8)
TASK, LOW, HIGH, ROW = range(4)


def paged_attention(
    q: torch.Tensor, view: PagedView, *, q_lens: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """Attend through a paged view on the CPU; arguments as checked by ``attention.attend``.

    Raises
    ------
    ValueError
        The block table names a page that does not exist, for a token that must be read.
    """
    num_q_heads, dim = q.shape[1:]
    kv_heads = view.k.shape[2]
    padded = -(-dim // LANES) * LANES
    # Softmax is computed with powers of two: the factor log2(e) goes into the queries.
    queries = torch.zeros(q.shape[0], num_q_heads, padded)
    queries[..., :dim] = q
    queries *= scale * np.log2(np.e)
    out = torch.zeros(q.shape, dtype=torch.float32)
    threads = min(torch.get_num_threads(), numba.get_num_threads())
    heads_per_item = kv_heads if _heads_are_neighbours(view) and len(q) <= 4 * len(q_lens) else 1
    tasks, items, num_rows, wrong = _plan(
        np.array(q_lens, dtype=np.int64),
        view.lengths.numpy(),
        view.first.numpy(),
        view.block_table.numpy(),
        view.k.shape[1],
        view.k.shape[0],
        kv_heads,
        num_q_heads // kv_heads,
        heads_per_item,
        0 if window is None else window,
        threads,
    )
    if wrong >= 0:
        raise ValueError(
            f"sequence {wrong}: its block table names a page outside [0, {view.k.shape[0]}) "
            "for a token that must be read"
        )
    before = numba.get_num_threads()
    numba.set_num_threads(threads)
    try:
        _run(
            threads,
            queries.numpy(),
            out.numpy(),
            view.block_table.numpy(),
            view.first.numpy(),
            _memory(view.k),
            _memory(view.v),
            view.k.shape[1],
            num_q_heads // kv_heads,
            KINDS[view.k.dtype],
            0 if window is None else window,
            tasks,
            items,
            num_rows,
        )
    finally:
        numba.set_num_threads(before)
    return out.to(q.dtype)


def _heads_are_neighbours(view: PagedView) -> bool:
    return view.k.stride(2) < view.k.stride(1)


def _memory(tensor: torch.Tensor) -> Any:
    """Address and strides (page, token, head) in bytes."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()[:3]]
    return np.array([tensor.data_ptr(), *strides], dtype=np.int64)


_INT, _TABLE, _INTS = (
    types.int64,
    types.Array(types.int32, 2, "A"),
    types.Array(types.int32, 1, "A"),
)
_WORK, _LONGS = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")
_FLOATS = types.Array(types.float32, 3, "C")


@njit(
    types.Tuple((_WORK, _WORK, _INT, _INT))(
        _LONGS, _INTS, _INTS, _TABLE, _INT, _INT, _INT, _INT, _INT, _INT, _INT
    ),
    cache=True,
    nogil=True,
)
def _plan(
    q_lens,
    lengths,
    first,
    table,
    page_size,
    num_pages,
    kv_heads,
    group,
    heads_per_item,
    window,
    threads,
):
    """Cut the batch into tasks (rows of the output) and items (parts of their context)."""
    chunk = max(1, CHUNK_ROWS // group)
    num_tasks = 0
    total = 0
    for seq in range(len(q_lens)):
        length = lengths[seq]
        if length == first[seq] or q_lens[seq] == 0:
            continue
        for page in range(first[seq] // page_size, (length - 1) // page_size + 1):
            if not 0 <= table[seq, page] < num_pages:
                return np.empty((0, 8), np.int64), np.empty((0, 4), np.int64), 0, seq
        num_chunks = (q_lens[seq] - 1) // chunk + 1
        num_tasks += num_chunks * (kv_heads // heads_per_item)
        total += num_chunks * (kv_heads // heads_per_item) * (length - first[seq])
    share = max(SMALLEST_PART, total // (threads * ITEMS_PER_THREAD) + 1)
    if threads == 1:
        share = total + 1
    tasks = np.empty((num_tasks, 8), np.int64)
    items = np.empty((num_tasks + total // share + 1, 4), np.int64)
    task = 0
    item = 0
    row = 0
    q_row = 0
    for seq in range(len(q_lens)):
        length = lengths[seq]
        if length == first[seq]:
            q_row += q_lens[seq]
            continue
        for begin in range(0, q_lens[seq], chunk):
            count = min(chunk, q_lens[seq] - begin)
            position = length - q_lens[seq] + begin
            low = first[seq] if window == 0 else max(first[seq], position - window + 1)
            high = position + count
            parts = max(1, (high - low) // share)
            for head in range(0, kv_heads, heads_per_item):
                tasks[task] = (
                    seq,
                    q_row + begin,
                    count,
                    position,
                    head,
                    heads_per_item,
                    item,
                    parts,
                )
                for part in range(parts):
                    items[item, TASK] = task
                    items[item, LOW] = low + (high - low) * part // parts
                    items[item, HIGH] = low + (high - low) * (part + 1) // parts
                    items[item, ROW] = row
                    row += heads_per_item * ((count * group + ROWS - 1) // ROWS) * ROWS
                    item += 1
                task += 1
        q_row += q_lens[seq]
    return tasks, items[:item].copy(), row, -1


@njit
def _tile_rows(rows, memory, table, seq, low, high, page_size):
    """Write the addresses of tokens ``[low, high)``, head 0, repeating the last to a whole step."""
    token = low
    while token < high:
        page = token // page_size
        address = memory[0] + table[seq, page] * memory[1]
        stop = min(high, (page + 1) * page_size)
        for t in range(token, stop):
            rows[t - low] = address + (t - page * page_size) * memory[2]
        token = stop
    for i in range(high - low, (high - low + TOKENS - 1) // TOKENS * TOKENS):
        rows[i] = rows[high - low - 1]


@njit
def _score(kind, q, q_stride, rows, dim, out):
    if kind == 0:
        simd.score_float32(q, q_stride, rows, dim, out)
    elif kind == 1:
        simd.score_bfloat16(q, q_stride, rows, dim, out)
    else:
        simd.score_float16(q, q_stride, rows, dim, out)


@njit
def _accumulate(kind, out, stride, factors, weights, rows, num_tokens, dim):
    if kind == 0:
        simd.accumulate_float32(out, stride, factors, weights, rows, num_tokens, dim)
    elif kind == 1:
        simd.accumulate_bfloat16(out, stride, factors, weights, rows, num_tokens, dim)
    else:
        simd.accumulate_float16(out, stride, factors, weights, rows, num_tokens, dim)


@njit
def _widen(kind, rows, num_tokens, count, copy):
    """Copy rows into float32 scratch, zero-padded to whole vectors, and point the table there."""
    for t in range(num_tokens):
        target = copy[t].ctypes.data
        if kind == 0:
            simd.widen_float32(rows[t], count, target)
        elif kind == 1:
            simd.widen_bfloat16(rows[t], count, target)
        else:
            simd.widen_float16(rows[t], count, target)
        rows[t] = target


@njit
def _attend_item(
    queries,
    out_dim,
    acc,
    maxima,
    sums,
    table,
    k_memory,
    v_memory,
    page_size,
    group,
    kind,
    window,
    task,
    low,
    high,
    acc_row,
):
    dim = queries.shape[2]
    row_bytes = 4 * dim
    seq = task[SEQ]
    num_heads = task[NUM_HEADS]
    num_rows = task[Q_COUNT] * group
    num_blocks = (num_rows + ROWS - 1) // ROWS
    end = acc_row + num_heads * num_blocks * ROWS
    acc[acc_row:end] = 0
    maxima[acc_row:end] = MASKED
    sums[acc_row:end] = 0

    q = np.zeros((num_heads, num_blocks * ROWS, dim), np.float32)
    for h in range(num_heads):
        for row in range(num_rows):
            q[h, row] = queries[task[Q_ROW] + row // group, (task[HEAD] + h) * group + row % group]
    k_base = np.empty(TILE, np.int64)
    v_base = np.empty(TILE, np.int64)
    k_rows = np.empty(TILE, np.int64)
    v_rows = np.empty(TILE, np.int64)
    # Rows that do not fill whole vectors are copied: reading past a row is not allowed.
    padded = out_dim != dim
    k_copy = np.zeros((TILE if padded else 0, dim), np.float32)
    v_copy = np.zeros((TILE if padded else 0, dim), np.float32)
    stored = kind
    if padded:
        kind = 0
    scores = np.empty((TILE, ROWS), np.float32)
    factors = np.empty(ROWS, np.float32)
    for tile in range(low, high, TILE):
        stop = min(tile + TILE, high)
        _tile_rows(k_base, k_memory, table, seq, tile, stop, page_size)
        _tile_rows(v_base, v_memory, table, seq, tile, stop, page_size)
        for h in range(num_heads):
            k_rows[:] = k_base + (task[HEAD] + h) * k_memory[3]
            v_rows[:] = v_base + (task[HEAD] + h) * v_memory[3]
            if padded:
                count = (stop - tile + TOKENS - 1) // TOKENS * TOKENS
                _widen(stored, k_rows, count, out_dim, k_copy)
                _widen(stored, v_rows, count, out_dim, v_copy)
            for block in range(num_blocks):
                earliest = task[Q_POSITION] + block * ROWS // group
                latest = task[Q_POSITION] + min(num_rows - 1, block * ROWS + ROWS - 1) // group
                begin = tile if window == 0 else max(tile, earliest - window + 1)
                until = min(stop, latest + 1)
                if begin >= until:
                    continue
                begin = tile + (begin - tile) // TOKENS * TOKENS
                for token in range(begin, until, TOKENS):
                    _score(
                        kind,
                        q[h, block * ROWS].ctypes.data,
                        row_bytes,
                        k_rows[token - tile :].ctypes.data,
                        dim,
                        scores[token - begin].ctypes.data,
                    )
                rounded = (until - begin + TOKENS - 1) // TOKENS * TOKENS
                if (
                    begin + rounded > earliest + 1
                    or begin + rounded > until
                    or (window and begin <= latest - window)
                ):
                    for row in range(ROWS):
                        position = task[Q_POSITION] + min(num_rows - 1, block * ROWS + row) // group
                        visible = min(until, position + 1)
                        for token in range(begin, begin + rounded):
                            if token >= visible or (window and token <= position - window):
                                scores[token - begin, row] = MASKED
                at = acc_row + (h * num_blocks + block) * ROWS
                simd.soften(
                    scores.ctypes.data,
                    rounded // TOKENS,
                    maxima[at:].ctypes.data,
                    sums[at:].ctypes.data,
                    factors.ctypes.data,
                )
                _accumulate(
                    kind,
                    acc[at].ctypes.data,
                    row_bytes,
                    factors.ctypes.data,
                    scores.ctypes.data,
                    v_rows[begin - tile :].ctypes.data,
                    until - begin,
                    dim,
                )


@njit
def _merge_task(out, acc, maxima, sums, group, task, items):
    """Normalise a task's rows, its parts weighted by their share of the softmax sum."""
    num_rows = task[Q_COUNT] * group
    num_padded = (num_rows + ROWS - 1) // ROWS * ROWS
    dim = out.shape[2]
    for h in range(task[NUM_HEADS]):
        for row in range(num_rows):
            top = MASKED
            for item in range(task[FIRST_ITEM], task[FIRST_ITEM] + task[NUM_ITEMS]):
                top = max(top, maxima[items[item, ROW] + h * num_padded + row])
            total = 0.0
            target = out[task[Q_ROW] + row // group, (task[HEAD] + h) * group + row % group]
            for item in range(task[FIRST_ITEM], task[FIRST_ITEM] + task[NUM_ITEMS]):
                at = items[item, ROW] + h * num_padded + row
                weight = np.exp2(maxima[at] - top)
                total += weight * sums[at]
                for d in range(dim):
                    target[d] += np.float32(weight) * acc[at, d]
            for d in range(dim):
                target[d] /= np.float32(total)


@njit(
    types.void(
        _INT,
        _FLOATS,
        _FLOATS,
        _TABLE,
        _INTS,
        _LONGS,
        _LONGS,
        _INT,
        _INT,
        _INT,
        _INT,
        _WORK,
        _WORK,
        _INT,
    ),
    cache=True,
    nogil=True,
    parallel=True,
)
def _run(
    threads,
    queries,
    out,
    table,
    first,
    k_memory,
    v_memory,
    page_size,
    group,
    kind,
    window,
    tasks,
    items,
    num_rows,
):
    acc = np.empty((num_rows, queries.shape[2]), np.float32)
    maxima = np.empty(num_rows, np.float32)
    sums = np.empty(num_rows, np.float32)
    tickets = np.zeros(1, np.int64)
    for _ in prange(threads):
        item = simd.fetch_add(tickets.ctypes.data)
        while item < len(items):
            _attend_item(
                queries,
                out.shape[2],
                acc,
                maxima,
                sums,
                table,
                k_memory,
                v_memory,
                page_size,
                group,
                kind,
                window,
                tasks[items[item, TASK]],
                items[item, LOW],
                items[item, HIGH],
                items[item, ROW],
            )
            item = simd.fetch_add(tickets.ctypes.data)
    for i in prange(len(tasks)):
        _merge_task(out, acc, maxima, sums, group, tasks[i], items)
