"""The device code of paged attention: one pass over the pages, and the sum over splits.

Only these two kernels read tensors; what they are launched with is decided in
``paged_triton`` and ``triton_tiles``.
"""
# The compiler reads annotations, so the parameters of kernels have none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fold_tile(
    state,
    q,
    tile,
    table,
    begin,
    end,
    position,
    window,
    k,
    v,
    k_page,
    k_slot,
    v_page,
    v_slot,
    log2_scale,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    UPCAST: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One step of the online softmax: the keys ``tile * BLOCK_N …`` join the state.

    ``MASKED`` is off only where every row sees every token of the tile.
    """
    acc, peak, total = state
    tokens = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    readable = (tokens >= begin) & (tokens < end)
    if TILE_IN_PAGE:
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
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * log2_scale
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
    out,
    partial,
    partial_lse,
    q,
    k,
    v,
    block_table,
    first,
    lengths,
    tiles,
    log2_scale,
    window,
    q_len,
    tiles_per_seq,
    num_splits,
    min_share,
    q_token,
    q_head,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    table_row,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RAGGED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERIOR: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend one tile of query rows to one share of the keys of its sequence.

    Grid: (query tiles, KV heads, splits). The rows of a sequence are its (query token, head
    of the group) pairs, token-major, so that all heads of a group use each loaded K and V.
    ``partial`` float32 ``[T_q, H_q, num_splits, D]`` and ``partial_lse`` float32
    ``[T_q, H_q, num_splits]`` are written under ``SPLIT``, ``out`` ``[T_q, H_q, D]`` otherwise.
    ``tiles`` int32 ``[num_tiles, 4]`` (sequence, first row, first query token, query tokens)
    is read under ``RAGGED``; otherwise every sequence has ``q_len`` query tokens.
    """
    # The last queries of a prompt see the most keys: they start first.
    index = tl.program_id(0)
    if RAGGED:
        seq = tl.load(tiles + 4 * index)
        row_0 = tl.load(tiles + 4 * index + 1)
        q_start = tl.load(tiles + 4 * index + 2)
        q_len = tl.load(tiles + 4 * index + 3)
    else:
        seq = index // tiles_per_seq
        row_0 = (tiles_per_seq - 1 - index % tiles_per_seq) * BLOCK_M
        q_start = seq * q_len
    kv_head = tl.program_id(1).to(tl.int64)
    num_rows = q_len * GROUP
    length = tl.load(lengths + seq)
    stored = tl.load(first + seq)
    table = block_table + seq.to(tl.int64) * table_row

    rows = row_0 + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    position = length - q_len + rows // GROUP
    lowest = length - q_len + row_0 // GROUP
    highest = length - q_len + (tl.minimum(row_0 + BLOCK_M, num_rows) - 1) // GROUP
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

    token_of_row = q_start.to(tl.int64) + rows // GROUP
    head_of_row = kv_head * GROUP + rows % GROUP
    inside = (rows < num_rows)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = q + token_of_row * q_token + head_of_row * q_head
    query = tl.load(q_rows[:, None] + dims[None, :], mask=inside, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    k += kv_head * k_head
    v += kv_head * v_head

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    TILE_IN_PAGE: tl.constexpr = PAGE_SIZE % BLOCK_N == 0
    full_lo = hi
    full_hi = hi
    if INTERIOR:
        # Tiles that every row sees whole need no mask; those on either side of them do.
        full_lo = tl.minimum(tl.maximum(tl.cdiv(full_begin, BLOCK_N), lo), hi)
        full_hi = tl.minimum(tl.maximum((lowest + 1) // BLOCK_N, full_lo), hi)
        for tile in range(full_lo, full_hi):
            acc, peak, total = fold_tile(
                (acc, peak, total), query, tile, table, begin, end, position, window,
                k, v, k_page, k_slot, v_page, v_slot, log2_scale,
                False, WINDOWED, UPCAST, TILE_IN_PAGE, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    num_leading = full_lo - lo
    for edge in range(0, num_leading + hi - full_hi):
        tile = tl.where(edge < num_leading, lo + edge, full_hi + edge - num_leading)
        acc, peak, total = fold_tile(
            (acc, peak, total), query, tile, table, begin, end, position, window,
            k, v, k_page, k_slot, v_page, v_slot, log2_scale,
            True, WINDOWED, UPCAST, TILE_IN_PAGE, PAGE_SIZE, HEAD_DIM, BLOCK_N, BLOCK_D,
        )  # fmt: skip

    seen = total != 0.0  # also true for NaN, which must not be hidden
    result = acc / tl.where(seen, total, 1.0)[:, None]
    row_id = token_of_row * (GROUP * tl.num_programs(1)) + head_of_row
    if SPLIT:
        part_id = row_id * num_splits + tl.program_id(2)
        lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(partial_lse + part_id, lse, mask=rows < num_rows)
        part = partial + part_id[:, None] * HEAD_DIM + dims[None, :]
        tl.store(part, result, mask=inside & seen[:, None])
    else:
        rows_out = out + row_id[:, None] * HEAD_DIM + dims[None, :]
        tl.store(rows_out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    out,
    partial,
    partial_lse,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
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
