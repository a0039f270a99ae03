"""The device code of paged attention: one pass over the pages, and the sum over splits.

``attend_pages`` and ``combine_splits`` are launched by ``paged_triton``, with the constants of
``triton_tiles``; the others are their parts.
"""
# The compiler reads annotations, so the parameters of kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# pyright: reportArgumentType=false

# Type checkers read what a jitted function returns as nothing: it never runs as Python.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def query_tile(
    tiles, tiles_per_seq, q_len, RAGGED: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """Sequence, first row, first query token and query tokens of this program's tile.

    ``RAGGED`` reads them from ``tiles`` int32 ``[num_tiles, 4]``; otherwise every sequence has
    ``q_len`` query tokens.
    """
    index = tl.program_id(0)
    if RAGGED:
        seq = tl.load(tiles + 4 * index)
        row_0 = tl.load(tiles + 4 * index + 1)
        q_start = tl.load(tiles + 4 * index + 2)
        q_len = tl.load(tiles + 4 * index + 3)
    else:
        # The last queries of a prompt see the most keys: they start first.
        seq = index // tiles_per_seq
        row_0 = (tiles_per_seq - 1 - index % tiles_per_seq) * BLOCK_M
        q_start = seq * q_len
    return seq, row_0, q_start, q_len


@triton.jit
def key_tiles(
    stored, lowest, highest, window, num_splits, min_share,
    WINDOWED: tl.constexpr, SPLIT: tl.constexpr, INTERIOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys that queries at the positions ``[lowest, highest]`` see, and this share's tiles.

    Tokens ``[begin, end)``; tiles ``[lo, hi)``, of which ``[full_lo, full_hi)`` are seen whole
    by every query (none unless ``INTERIOR``).
    """
    begin = stored
    full_begin = stored
    if WINDOWED:
        begin = tl.maximum(stored, lowest - window + 1)
        full_begin = tl.maximum(stored, highest - window + 1)
    end = highest + 1
    lo = begin // BLOCK_N
    # Without a readable token there is no tile, else an undefined table entry were read.
    hi = tl.where(end > begin, tl.cdiv(end, BLOCK_N), lo)
    if SPLIT:
        share = tl.maximum(tl.cdiv(hi - lo, num_splits), min_share)
        lo = tl.minimum(lo + tl.program_id(2) * share, hi)
        hi = tl.minimum(lo + share, hi)
    full_lo = hi
    full_hi = hi
    if INTERIOR:
        full_lo = tl.minimum(tl.maximum(tl.cdiv(full_begin, BLOCK_N), lo), hi)
        full_hi = tl.minimum(tl.maximum((lowest + 1) // BLOCK_N, full_lo), hi)
    return begin, end, lo, full_lo, full_hi, hi


@triton.jit
def load_query(
    rows, row_exists, UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Query rows at the pointers ``rows``, 0 where there is none."""
    dims = tl.arange(0, BLOCK_D)
    inside = row_exists[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(rows[:, None] + dims[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    return query


@triton.jit
def load_tile(
    tile, readable, table, k, v, k_page, k_slot, v_page, v_slot,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """K and V of the tokens ``tile * BLOCK_N …``, 0 where they are not readable."""
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    if PAGE_SIZE % BLOCK_N == 0:
        # One entry serves the tile, and it is defined: the tile holds a readable token.
        page = tl.load(table + (tile * BLOCK_N) // PAGE_SIZE).to(tl.int64)
    elif MASKED:
        page = tl.load(table + tokens // PAGE_SIZE, mask=readable, other=0).to(tl.int64)
    else:
        page = tl.load(table + tokens // PAGE_SIZE).to(tl.int64)
    slot = (tokens % PAGE_SIZE).to(tl.int64)
    keys = k + (page * k_page + slot * k_slot)[:, None] + dims[None, :]
    values = v + (page * v_page + slot * v_slot)[:, None] + dims[None, :]
    inside = readable[:, None]
    if HEAD_DIM < BLOCK_D:
        inside = inside & (dims < HEAD_DIM)[None, :]
    if MASKED:
        # What lies behind a sequence may be NaN, and 0 × NaN is NaN: it is never loaded.
        key = tl.load(keys, mask=inside, other=0.0)
        value = tl.load(values, mask=inside, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        key = tl.load(keys, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(values, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        key = tl.load(keys)
        value = tl.load(values)
    if UPCAST:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
    return key, value


@triton.jit
def fold_tile(
    state, query, tile, table, begin, end, position, window,
    k, v, k_page, k_slot, v_page, v_slot, log2_scale,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, UPCAST: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the tokens ``tile * BLOCK_N …`` join the state.

    ``MASKED`` is off only where every query sees every token of the tile.
    """
    acc, peak, total = state
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    readable = (tokens >= begin) & (tokens < end)
    key, value = load_tile(
        tile, readable, table, k, v, k_page, k_slot, v_page, v_slot,
        MASKED, UPCAST, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * log2_scale
    if MASKED:
        visible = readable[None, :] & (tokens[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (tokens[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, 1))
    # A row that has seen nothing yet keeps the peak −inf; −inf − −inf would be NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score - shift[:, None])
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.sum(weight, 1)
    acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision="ieee")
    return acc, new_peak, total


@triton.jit(do_not_specialize=["window", "q_len", "tiles_per_seq", "num_splits", "min_share"])
def attend_pages(
    out, partial, partial_lse, q, k, v, block_table, first, lengths, tiles,
    log2_scale, window, q_len, tiles_per_seq, num_splits, min_share,
    q_token, q_head, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RAGGED: tl.constexpr, WINDOWED: tl.constexpr, SPLIT: tl.constexpr,
    INTERIOR: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Attend one tile of query rows to one share of the keys of its sequence.

    Grid: (query tiles, KV heads, splits). The rows of a sequence are its (query token, head
    of the group) pairs, token-major, so that all heads of a group use each loaded K and V.
    """
    seq, row_0, q_start, q_len = query_tile(tiles, tiles_per_seq, q_len, RAGGED, BLOCK_M)
    num_rows = q_len * GROUP
    position_0 = tl.load(lengths + seq) - q_len
    lowest = position_0 + row_0 // GROUP
    highest = position_0 + (tl.minimum(row_0 + BLOCK_M, num_rows) - 1) // GROUP
    begin, end, lo, full_lo, full_hi, hi = key_tiles(
        tl.load(first + seq), lowest, highest, window, num_splits, min_share,
        WINDOWED, SPLIT, INTERIOR, BLOCK_N,
    )  # fmt: skip

    kv_head = tl.program_id(1).to(tl.int64)
    rows = row_0 + tl.arange(0, BLOCK_M)
    position = position_0 + rows // GROUP
    token = q_start.to(tl.int64) + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    query = load_query(
        q + token * q_token + head * q_head, rows < num_rows, UPCAST, HEAD_DIM, BLOCK_D
    )
    table = block_table + seq.to(tl.int64) * table_row
    k += kv_head * k_head
    v += kv_head * v_head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if INTERIOR:
        # Tiles that every row sees whole need no mask; those on either side of them do.
        for tile in range(full_lo, full_hi):
            acc, peak, total = fold_tile(
                (acc, peak, total), query, tile, table, begin, end, position, window,
                k, v, k_page, k_slot, v_page, v_slot, log2_scale,
                False, WINDOWED, UPCAST, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    num_leading = full_lo - lo
    for edge in range(0, num_leading + hi - full_hi):
        tile = tl.where(edge < num_leading, lo + edge, full_hi + edge - num_leading)
        acc, peak, total = fold_tile(
            (acc, peak, total), query, tile, table, begin, end, position, window,
            k, v, k_page, k_slot, v_page, v_slot, log2_scale,
            True, WINDOWED, UPCAST, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    store_rows(
        (acc, peak, total), out, partial, partial_lse,
        token * (GROUP * tl.num_programs(1)) + head, rows < num_rows, num_splits,
        SPLIT, HEAD_DIM, BLOCK_D,
    )  # fmt: skip


@triton.jit
def store_rows(
    state, out, partial, partial_lse, row_id, row_exists, num_splits,
    SPLIT: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write finished rows to ``out`` ``[T_q, H_q, D]``, or under ``SPLIT`` one share of them.

    ``partial`` float32 ``[T_q, H_q, num_splits, D]`` takes the result of the share, and
    ``partial_lse`` float32 ``[T_q, H_q, num_splits]`` the logarithm of its weight.
    """
    acc, peak, total = state
    dims = tl.arange(0, BLOCK_D)
    inside = row_exists[:, None] & (dims < HEAD_DIM)[None, :]
    seen = total != 0.0  # also true for NaN, which must not be hidden
    result = acc / tl.where(seen, total, 1.0)[:, None]
    if SPLIT:
        part_id = row_id * num_splits + tl.program_id(2)
        lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part_id, lse, mask=row_exists)
        part = partial + part_id[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part, result, mask=inside & seen[:, None])
    else:
        rows_out = out + row_id[:, None] * HEAD_DIM + dims[None, :]
        tl.store(rows_out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    out, partial, partial_lse, num_splits,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MAX_SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Weigh the results of the splits of one row by their share of the softmax.

    Grid: (query tokens × query heads). Splits without keys have the weight −inf and an
    undefined result, which is not read.
    """
    row = tl.program_id(0).to(tl.int64)
    partial_lse += row * num_splits
    partial += row * num_splits * HEAD_DIM
    splits = tl.arange(0, MAX_SPLITS)
    lse = tl.load(partial_lse + splits, mask=splits < num_splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(lse - shift), 0)
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, num_splits, CHUNK):
        chunk = begin + tl.arange(0, CHUNK)
        part = tl.load(partial_lse + chunk, mask=chunk < num_splits, other=float("-inf"))
        inside = (part != float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        rows = chunk[:, None] * HEAD_DIM + dims[None, :]
        value = tl.load(partial + rows, mask=inside, other=0.0)
        acc += tl.sum(tl.exp2(part - shift)[:, None] * value, 0)
    acc = acc / tl.where(total == 0.0, 1.0, total)
    rows_out = out + row * HEAD_DIM + dims
    tl.store(rows_out, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
