# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
"""Online softmax over pages: what one thread does with an item, and the merge of the parts."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numba import njit, prange

from . import numba_simd as simd
from .numba_plan import (
    BLOCK,
    FIRST_ITEM,
    HEAD,
    HIGH,
    LOW,
    NUM_HEADS,
    NUM_ITEMS,
    POSITION,
    Q_COUNT,
    Q_ROW,
    SEQ,
    TASK,
)
from .numba_vectors import MASKED, ROWS, TOKENS

TILE = 32
"""Tokens per step: their rows, and those of the step ahead, fit the second-level cache."""

FLOAT32, BFLOAT16, FLOAT16 = range(3)
"""Kinds of stored elements."""


@njit
def _score(kind, q, q_stride, rows, dim, scores):
    if kind == FLOAT32:
        simd.score_float32(q, q_stride, rows, dim, scores)
    elif kind == BFLOAT16:
        simd.score_bfloat16(q, q_stride, rows, dim, scores)
    else:
        simd.score_float16(q, q_stride, rows, dim, scores)


@njit
def _accumulate(kind, out, factors, weights, rows, num_tokens, dim):
    if kind == FLOAT32:
        simd.accumulate_float32(out, factors, weights, rows, num_tokens, dim)
    elif kind == BFLOAT16:
        simd.accumulate_bfloat16(out, factors, weights, rows, num_tokens, dim)
    else:
        simd.accumulate_float16(out, factors, weights, rows, num_tokens, dim)


@njit
def _widen(kind, rows, num_tokens, dim, copy):
    """Copy rows to float32 scratch, whose columns past ``dim`` are 0, and point the table there."""
    for t in range(num_tokens):
        target = copy[t].ctypes.data
        if kind == FLOAT32:
            simd.widen_float32(rows[t], dim, target)
        elif kind == BFLOAT16:
            simd.widen_bfloat16(rows[t], dim, target)
        else:
            simd.widen_float16(rows[t], dim, target)
        rows[t] = target


@njit
def _find_rows(rows, memory, pages, page_size, head, low, high):
    """Write the addresses of tokens ``[low, high)``, the last one repeated to a whole vector.

    Looks up exactly the pages that hold these tokens.
    """
    page_stride, token_stride = memory[1], memory[2]
    base = memory[0] + head * memory[3]
    page = low // page_size
    offset = low - page * page_size
    done = 0
    while done < high - low:
        address = base + pages[page] * page_stride + offset * token_stride
        count = min(high - low - done, page_size - offset)
        for t in range(count):
            rows[done + t] = address + t * token_stride
        done += count
        page += 1
        offset = 0
    for t in range(high - low, _round_up(high - low)):
        rows[t] = rows[high - low - 1]


@njit
def _round_up(num_tokens):
    return (num_tokens + TOKENS - 1) // TOKENS * TOKENS


@njit
def _mask(scores, begin, until, first_row, num_rows, group, position, window):
    """Hide from each row of a block the tokens outside its own window."""
    for row in range(ROWS):
        own = position + min(first_row + row, num_rows - 1) // group
        visible = min(until, own + 1)
        oldest = own - window + 1 if window else begin
        for token in range(begin, begin + _round_up(until - begin)):
            if not oldest <= token < visible:
                scores[token - begin, row] = MASKED


@njit
def _gather_queries(queries, task, group):
    """Query rows of a task as ``[heads, rows, dim]``, zero rows up to whole blocks."""
    num_rows = task[Q_COUNT] * group
    padded = (num_rows - 1) // ROWS * ROWS + ROWS
    q = np.zeros((task[NUM_HEADS], padded, queries.shape[2]), np.float32)
    for h in range(task[NUM_HEADS]):
        for row in range(num_rows):
            q[h, row] = queries[task[Q_ROW] + row // group, (task[HEAD] + h) * group + row % group]
    return q


@njit
def _attend_block(kind, q, rows, ahead, row_bytes, scratch, block, span):
    """One block of queries over the tokens ``[begin, until)`` of one step.

    ``rows`` and ``ahead`` are the tables (K, V) of these tokens and of the next step's; the
    latter are asked for a few rows at a time between the computations, so that memory and
    arithmetic are busy together: all at once they would only queue up.
    """
    dim = q.shape[1]
    begin, until, first_row, num_rows, group, position, window = span
    k_rows, v_rows = rows
    k_ahead, v_ahead = ahead
    scores, factors = scratch[:TILE], scratch[TILE].ctypes.data
    for t in range(0, until - begin, TOKENS):
        at = scores[t].ctypes.data
        _score(kind, q.ctypes.data, 4 * dim, k_rows[t:].ctypes.data, dim, at)
        for i in range(t, min(t + TOKENS, len(k_ahead))):
            simd.prefetch(k_ahead[i], row_bytes)
    rounded = _round_up(until - begin)
    earliest = position + first_row // group
    latest = position + (min(first_row + ROWS, num_rows) - 1) // group
    if begin + rounded > min(until, earliest + 1) or (window and begin <= latest - window):
        _mask(scores, begin, until, first_row, num_rows, group, position, window)
    state = block[ROWS * dim :].ctypes.data
    simd.soften(scores.ctypes.data, rounded // TOKENS, state, factors)
    for t in range(0, until - begin, TOKENS):
        count = min(TOKENS, until - begin - t)
        at = scores[t].ctypes.data
        _accumulate(kind, block.ctypes.data, factors, at, v_rows[t:].ctypes.data, count, dim)
        scratch[TILE] = 1
        for i in range(t, min(t + TOKENS, len(v_ahead))):
            simd.prefetch(v_ahead[i], row_bytes)


@njit
def _attend_item(queries, out_dim, blocks, table, memories, sizes, task, low, high, first_block):
    """Attend the queries of ``task`` over the tokens ``[low, high)`` into its blocks."""
    page_size, group, kind, window = sizes[0], sizes[1], sizes[2], sizes[3]
    k_memory, v_memory = memories[0], memories[1]
    dim = queries.shape[2]
    pages = table[task[SEQ]]
    num_heads, num_rows, position = task[NUM_HEADS], task[Q_COUNT] * group, task[POSITION]
    num_blocks = (num_rows - 1) // ROWS + 1
    state = blocks[first_block : first_block + num_heads * num_blocks]
    state[:] = 0
    state[:, ROWS * dim : ROWS * dim + ROWS] = MASKED

    q = _gather_queries(queries, task, group)
    scratch = np.empty((TILE + 1, ROWS), np.float32)
    k_rows, v_rows = np.empty((2, TILE), np.int64), np.empty((2, TILE), np.int64)
    # A row that does not fill whole vectors is copied: reading past it is not allowed.
    copied = out_dim != dim
    copies = np.zeros((2, TILE if copied else 0, dim), np.float32)
    computed = FLOAT32 if copied else kind
    row_bytes = out_dim * (4 if kind == FLOAT32 else 2)

    # A step is a tile of tokens and one head: all heads of a tile follow one another.
    num_steps = ((high - low - 1) // TILE + 1) * num_heads
    for step in range(-1, num_steps):
        after = (step + 1) % 2
        num_ahead = 0
        if step + 1 < num_steps:
            tile = low + (step + 1) // num_heads * TILE
            stop = min(tile + TILE, high)
            head = task[HEAD] + (step + 1) % num_heads
            _find_rows(k_rows[after], k_memory, pages, page_size, head, tile, stop)
            _find_rows(v_rows[after], v_memory, pages, page_size, head, tile, stop)
            num_ahead = stop - tile
        if step < 0:
            continue
        k_now, v_now = k_rows[1 - after], v_rows[1 - after]
        tile = low + step // num_heads * TILE
        stop = min(tile + TILE, high)
        h = step % num_heads
        if copied:
            _widen(kind, k_now, _round_up(stop - tile), out_dim, copies[0])
            _widen(kind, v_now, _round_up(stop - tile), out_dim, copies[1])
        for b in range(num_blocks):
            first_row = b * ROWS
            begin, until = tile, min(stop, position + (first_row + ROWS - 1) // group + 1)
            if window:
                begin = max(begin, position + first_row // group - window + 1)
                begin = tile + (begin - tile) // TOKENS * TOKENS
            if begin < until:
                _attend_block(
                    computed,
                    q[h, first_row:],
                    (k_now[begin - tile :], v_now[begin - tile :]),
                    (k_rows[after, :num_ahead], v_rows[after, :num_ahead]),
                    row_bytes,
                    scratch,
                    state[h * num_blocks + b],
                    (begin, until, first_row, num_rows, group, position, window),
                )
            num_ahead = 0


@njit
def _merge(out, blocks, task, items, group):
    """Normalise a task's rows, its parts weighted by their share of the softmax sum."""
    num_rows, dim = task[Q_COUNT] * group, out.shape[2]
    num_blocks = (num_rows - 1) // ROWS + 1
    width = (blocks.shape[1] - 2 * ROWS) // ROWS
    parts = range(task[FIRST_ITEM], task[FIRST_ITEM] + task[NUM_ITEMS])
    for h in range(task[NUM_HEADS]):
        for row in range(num_rows):
            at = h * num_blocks + row // ROWS
            lane = ROWS * width + row % ROWS
            largest = np.float32(MASKED)
            for part in parts:
                largest = max(largest, blocks[items[part, BLOCK] + at, lane])
            target = out[task[Q_ROW] + row // group, (task[HEAD] + h) * group + row % group]
            total = np.float32(0)
            for part in parts:
                block = blocks[items[part, BLOCK] + at]
                weight = np.exp2(block[lane] - largest)
                total += weight * block[lane + ROWS]
                for d in range(dim):
                    target[d] += weight * block[row % ROWS * width + d]
            for d in range(dim):
                target[d] /= total


def _compile(version):
    @njit(
        "int64(int64, float32[:,:,::1], float32[:,:,::1], int32[:,:], "
        "int64[:,::1], int64[::1], int64[:,::1], int64[:,::1], int64)",
        cache=True,
        nogil=True,
        parallel=True,
    )
    def attend_items(threads, queries, out, table, memories, sizes, tasks, items, num_blocks):
        blocks = np.empty((num_blocks, ROWS * (queries.shape[2] + 2)), np.float32)
        tickets = np.zeros(1, np.int64)
        for _ in prange(threads):
            item = simd.fetch_add(tickets.ctypes.data)
            while item < len(items):
                _attend_item(
                    queries,
                    out.shape[2],
                    blocks,
                    table,
                    memories,
                    sizes,
                    tasks[items[item, TASK]],
                    items[item, LOW],
                    items[item, HIGH],
                    items[item, BLOCK],
                )
                item = simd.fetch_add(tickets.ctypes.data)
        for task in prange(len(tasks)):
            _merge(out, blocks, tasks[task], items, sizes[1])
        return version

    return attend_items


_SOURCES = [Path(__file__).with_name(f"numba_{name}.py") for name in ("plan", "simd", "vectors")]
VERSION = int.from_bytes(
    hashlib.sha256(bytes([ROWS, TOKENS]) + b"".join(map(Path.read_bytes, _SOURCES))).digest()[:7]
)
"""Fingerprint of what is compiled into ``attend_items`` besides this file."""

attend_items = _compile(VERSION)
"""``(threads, queries, out, table, memories, sizes, tasks, items, num_blocks)``.

``memories``: for K and V the address and the strides (page, token, head) in bytes; ``sizes``:
page size, group, kind, window (0: none). Adds to ``out``, which is 0.
Returns ``VERSION``: as a constant of the code it is part of the key of Numba's cache on disk,
which by itself looks at this file only."""
