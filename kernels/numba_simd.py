# mypy: allow-untyped-calls
"""The inner loops of paged attention, with explicit vectors, for Numba to inline.

Whether LLVM vectorises such loops by itself changes from release to release; here it has no
choice. All arguments are int64; addresses count bytes. A *block* is ``ROWS`` query rows; its
scores are stored token-major, ``[token, row]``. A *row table* is an array of int64 addresses of
K or V rows, which makes page size, layout and page order invisible here.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from numba import types
from numba.extending import intrinsic

from .numba_vectors import (
    FLOAT,
    HALF,
    I16,
    I32,
    I64,
    LANES,
    MASKED,
    ROWS,
    TOKENS,
    Emitter,
)

WIDE = 4 if LANES == 16 else 2
"""Vectors of a V row held at once: ``ROWS × WIDE`` accumulators fit the registers."""

Emit = Callable[..., Any]


def _routine(emit: Emit, *names: str, result: Any = types.void) -> Any:
    """A Numba function of int64 arguments ``names`` whose body ``emit(emitter, *names)`` writes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = emit(Emitter(builder), *args)
        return context.get_dummy_value() if result is types.void else value

    def typing(context: Any, *args: Any) -> Any:
        return result(*[types.int64] * len(names)), generate

    # Numba asks for the names; a variadic function has none.
    typing.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("context", *names)]
    )
    return intrinsic(typing)


def _score(load: Callable[[Emitter, Any], Any], itemsize: int) -> Emit:
    def emit(e: Emitter, q: Any, q_stride: Any, table: Any, dim: Any, scores: Any) -> None:
        keys = [e.load_as(I64, e.offset(table, I64(t), I64(8)), 8) for t in range(TOKENS)]
        queries = [e.offset(q, I64(row), q_stride) for row in range(ROWS)]
        sums = [e.variable() for _ in range(LANES)]
        for total in sums:
            e.builder.store(e.constant(0.0), total)
        with e.loop(I64(0), dim, LANES) as (d, _):
            rows = [e.load_float32(e.offset(query, d, I64(4))) for query in queries]
            for t, key in enumerate(keys):
                k = load(e, e.offset(key, d, I64(itemsize)))
                for row in range(ROWS):
                    total = sums[t * ROWS + row]
                    product = e.multiply_add(k, rows[row], e.builder.load(total))
                    e.builder.store(product, total)
        e.store(e.sums([e.builder.load(total) for total in sums]), scores)

    return emit


def _soften(e: Emitter, scores: Any, num_vectors: Any, state: Any, factors: Any) -> None:
    sums_at = e.builder.add(state, I64(4 * ROWS))
    largest, total = e.variable(), e.variable()
    e.builder.store(e.constant(MASKED), largest)
    with e.loop(I64(0), num_vectors, 1) as (i, _):
        score = e.load_float32(e.offset(scores, i, I64(4 * LANES)))
        e.builder.store(e.maximum(score, e.builder.load(largest)), largest)
    old = e.load_rows(state)
    new = e.maximum(old, e.over_tokens(e.builder.load(largest), e.maximum))
    factor = e.exp2(e.builder.fsub(old, new))
    e.store_rows(new, state)
    e.store_rows(factor, factors)
    e.builder.store(e.constant(0.0), total)
    with e.loop(I64(0), num_vectors, 1) as (i, _):
        at = e.offset(scores, i, I64(4 * LANES))
        weight = e.exp2(e.builder.fsub(e.load_float32(at), new))
        e.store(weight, at)
        e.builder.store(e.add(weight, e.builder.load(total)), total)
    added = e.over_tokens(e.builder.load(total), e.add)
    e.store_rows(e.multiply_add(e.load_rows(sums_at), factor, added), sums_at)


def _accumulate(load: Callable[[Emitter, Any], Any], itemsize: int) -> Emit:
    def emit(
        e: Emitter, out: Any, factors: Any, weights: Any, table: Any, num_tokens: Any, dim: Any
    ) -> None:
        row_bytes = e.builder.mul(dim, I64(4))
        whole = e.builder.sub(dim, e.builder.srem(dim, I64(WIDE * LANES)))
        for start, stop, width in ((I64(0), whole, WIDE), (whole, dim, 1)):
            with e.loop(start, stop, width * LANES) as (d, _):
                column = e.offset(out, d, I64(4))
                totals = {(row, w): e.variable() for row in range(ROWS) for w in range(width)}
                addresses = {
                    (row, w): e.builder.add(
                        e.offset(column, I64(row), row_bytes), I64(4 * LANES * w)
                    )
                    for row, w in totals
                }
                for (row, w), total in totals.items():
                    factor = e.spread(e.builder.add(factors, I64(4 * row)))
                    scaled = e.builder.fmul(e.load_float32(addresses[row, w]), factor)
                    e.builder.store(scaled, total)
                with e.loop(I64(0), num_tokens, 1) as (t, _):
                    value = e.load_as(I64, e.offset(table, t, I64(8)), 8)
                    value = e.offset(value, d, I64(itemsize))
                    parts = [
                        load(e, e.builder.add(value, I64(LANES * itemsize * w)))
                        for w in range(width)
                    ]
                    weight_at = e.offset(weights, t, I64(4 * ROWS))
                    for row in range(ROWS):
                        weight = e.spread(e.builder.add(weight_at, I64(4 * row)))
                        for w in range(width):
                            total = totals[row, w]
                            product = e.multiply_add(weight, parts[w], e.builder.load(total))
                            e.builder.store(product, total)
                for cell, total in totals.items():
                    e.store(e.builder.load(total), addresses[cell])

    return emit


def _widen(element: Any, itemsize: int) -> Emit:
    def emit(e: Emitter, row: Any, count: Any, out: Any) -> None:
        with e.loop(I64(0), count, 1) as (i, _):
            value = e.load_as(element, e.offset(row, i, I64(itemsize)), itemsize)
            if element is I16:
                bits = e.builder.shl(e.builder.zext(value, I32), I32(16))
                value = e.builder.bitcast(bits, FLOAT)
            elif element is HALF:
                value = e.builder.fpext(value, FLOAT)
            e.store(value, e.offset(out, i, I64(4)))

    return emit


def _prefetch(e: Emitter, address: Any, num_bytes: Any) -> None:
    with e.loop(I64(0), num_bytes, 64) as (i, _):
        e.prefetch(e.builder.add(address, i))


def _fetch_add(e: Emitter, address: Any) -> Any:
    pointer = e.builder.inttoptr(address, I64.as_pointer())
    return e.builder.atomic_rmw("add", pointer, I64(1), "monotonic")


_LOADS = ((Emitter.load_float32, 4), (Emitter.load_bfloat16, 2), (Emitter.load_float16, 2))

score_float32, score_bfloat16, score_float16 = (
    _routine(_score(load, itemsize), "q", "q_stride", "row_table", "dim", "scores")
    for load, itemsize in _LOADS
)
"""Scores of the next ``TOKENS`` keys for a block of queries."""

accumulate_float32, accumulate_bfloat16, accumulate_float16 = (
    _routine(
        _accumulate(load, itemsize), "out", "factors", "weights", "row_table", "num_tokens", "dim"
    )
    for load, itemsize in _LOADS
)
"""``out[row] ← out[row] · factors[row] + Σ weights[token, row] · V[token]``."""

soften = _routine(_soften, "scores", "num_vectors", "state", "factors")
"""Scores become weights; ``state`` (a block's maxima, then its sums) moves on; ``factors`` is
what earlier results must be multiplied by."""

widen_float32, widen_bfloat16, widen_float16 = (
    _routine(_widen(element, itemsize), "row", "count", "out")
    for element, itemsize in ((FLOAT, 4), (I16, 2), (HALF, 2))
)
"""A row as float32, for head dimensions that do not fill vectors."""

prefetch = _routine(_prefetch, "address", "num_bytes")
"""Ask for memory that will be needed soon."""

fetch_add = _routine(_fetch_add, "address", result=types.int64)
"""Take the next ticket from a counter that threads share."""
