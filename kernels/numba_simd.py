# mypy: allow-untyped-calls
"""The three inner loops of paged attention as vector instructions, for Numba to inline.

Numba has no vector type, and whether LLVM finds these loops by itself changes from release to
release; so they are written as LLVM IR with explicit vectors, which LLVM fits to any processor.
A *block* is ``ROWS`` query rows. Scores of a block are stored token-major, ``[token, row]``, so
that one vector holds ``TOKENS`` tokens × ``ROWS`` rows. Addresses are integers, in bytes; a *row
table* is an array of int64 addresses of K or V rows, which makes page size, layout and page
order invisible here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
"""Floats per vector: as many as one register of this processor holds."""
ROWS = 4
"""Query rows that share each load of a K or V row."""
TOKENS = LANES // ROWS
"""Tokens scored at once."""
WIDE = 4 if LANES >= 16 else 2
"""Vectors of V held at once per token: ``ROWS × WIDE`` accumulators stay in registers."""
MASKED = -1.0e38
"""The score of a token that a row does not see: finite, so that no NaN can arise from it."""

_F32 = ir.FloatType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_VEC = ir.VectorType(_F32, LANES)
_IVEC = ir.VectorType(_I32, LANES)
_FUSE = ("contract",)  # lets LLVM fuse multiply and add where the processor can
_UNDERFLOW = -126.0  # exponents below give 0


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _splat(builder: Any, value: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VEC, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(
        one, ir.Constant(_VEC, ir.Undefined), ir.Constant(_IVEC, [0] * LANES)
    )


def _constant(value: float) -> Any:
    return ir.Constant(_VEC, [value] * LANES)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(_pointer(builder, address, _VEC), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, _pointer(builder, address, _VEC), align=4)


def _load_bfloat16(builder: Any, address: Any) -> Any:
    bits = builder.load(_pointer(builder, address, ir.VectorType(_I16, LANES)), align=2)
    wide = builder.shl(builder.zext(bits, _IVEC), ir.Constant(_IVEC, [16] * LANES))
    return builder.bitcast(wide, _VEC)


def _load_float16(builder: Any, address: Any) -> Any:
    half = ir.VectorType(ir.HalfType(), LANES)
    return builder.fpext(builder.load(_pointer(builder, address, half), align=2), _VEC)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _add(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


def _at(builder: Any, base: Any, index: Any, step: int) -> Any:
    return builder.add(base, builder.mul(index, _I64(step)))


def _loop(builder: Any, start: Any, stop: Any, step: int) -> Any:
    return cgutils.for_range_slice(builder, start, stop, _I64(step), _I64)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


def _fold(builder: Any, a: Any, b: Any, half: int) -> Any:
    """In every run of ``2·half`` lanes: sums of the halves of ``a``, then those of ``b``."""
    low = [
        run + i + side
        for run in range(0, LANES, 2 * half)
        for side in (0, LANES)
        for i in range(half)
    ]
    return builder.fadd(
        _shuffle(builder, a, b, low), _shuffle(builder, a, b, [lane + half for lane in low])
    )


def _sums(builder: Any, vectors: list[Any]) -> Any:
    """One vector whose lane ``i`` is the sum over ``vectors[i]``."""
    while len(vectors) > 1:
        half = len(vectors) // 2
        vectors = [_fold(builder, vectors[i], vectors[i + half], half) for i in range(half)]
    return vectors[0]


def _over_tokens(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Combine the tokens of ``[token, row]``; every token's lanes then hold the result."""
    turn = LANES // 2
    while turn >= ROWS:
        lanes = [(lane + turn) % LANES for lane in range(LANES)]
        vector = combine(builder, vector, _shuffle(builder, vector, vector, lanes))
        turn //= 2
    return vector


def _load_rows(builder: Any, address: Any) -> Any:
    """``ROWS`` floats, repeated for every token of a vector."""
    four = builder.load(_pointer(builder, address, ir.VectorType(_F32, ROWS)), align=4)
    return _shuffle(builder, four, four, [lane % ROWS for lane in range(LANES)])


def _store_rows(builder: Any, vector: Any, address: Any) -> None:
    four = _shuffle(builder, vector, vector, list(range(ROWS)))
    builder.store(four, _pointer(builder, address, four.type), align=4)


def _exp2(builder: Any, x: Any) -> Any:
    """``2**x`` for ``x <= 0`` to about 1e-7: Taylor on [−½, ½] and the exponent's bits."""
    magic = _constant(1.5 * 2.0**23)  # adding it leaves round(x) in the lowest mantissa bits
    shifted = builder.fadd(x, magic)
    f = builder.fsub(x, builder.fsub(shifted, magic))
    degree = 7
    value = _constant(math.log(2.0) ** degree / math.factorial(degree))
    for power in reversed(range(degree)):
        term = _constant(math.log(2.0) ** power / math.factorial(power))
        value = _multiply_add(builder, value, f, term)
    exponent = builder.shl(builder.bitcast(shifted, _IVEC), ir.Constant(_IVEC, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(value, _IVEC), exponent), _VEC)
    tiny = builder.fcmp_ordered("<", x, _constant(_UNDERFLOW))
    return builder.select(tiny, _constant(0.0), scaled)


def _emit_score(load: Any, itemsize: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        q, q_stride, table, dim, out = args
        keys = [
            builder.load(_pointer(builder, builder.add(table, _I64(8 * t)), _I64))
            for t in range(TOKENS)
        ]
        queries = [builder.add(q, builder.mul(q_stride, _I64(row))) for row in range(ROWS)]
        sums = [cgutils.alloca_once_value(builder, _constant(0.0)) for _ in range(LANES)]
        for total in sums:
            builder.store(_constant(0.0), total)
        with _loop(builder, _I64(0), dim, LANES) as (d, _):
            rows = [_load(builder, _at(builder, query, d, 4)) for query in queries]
            for t, key in enumerate(keys):
                k = load(builder, _at(builder, key, d, itemsize))
                for row in range(ROWS):
                    total = sums[t * ROWS + row]
                    product = _multiply_add(builder, k, rows[row], builder.load(total))
                    builder.store(product, total)
        _store(builder, _sums(builder, [builder.load(total) for total in sums]), out)
        return context.get_dummy_value()

    return emit


def _emit_soften(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    scores, num_vectors, maxima, sums, factors = args
    top = cgutils.alloca_once(builder, _VEC)
    builder.store(_constant(MASKED), top)
    with _loop(builder, _I64(0), num_vectors, 1) as (i, _):
        s = _load(builder, _at(builder, scores, i, 4 * LANES))
        builder.store(_maximum(builder, s, builder.load(top)), top)
    old = _load_rows(builder, maxima)
    new = _maximum(builder, old, _over_tokens(builder, builder.load(top), _maximum))
    factor = _exp2(builder, builder.fsub(old, new))
    _store_rows(builder, new, maxima)
    _store_rows(builder, factor, factors)
    total = cgutils.alloca_once(builder, _VEC)
    builder.store(_constant(0.0), total)
    with _loop(builder, _I64(0), num_vectors, 1) as (i, _):
        at = _at(builder, scores, i, 4 * LANES)
        p = _exp2(builder, builder.fsub(_load(builder, at), new))
        _store(builder, p, at)
        builder.store(builder.fadd(p, builder.load(total)), total)
    added = _over_tokens(builder, builder.load(total), _add)
    _store_rows(builder, _multiply_add(builder, _load_rows(builder, sums), factor, added), sums)
    return context.get_dummy_value()


def _emit_accumulate(load: Any, itemsize: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, out_stride, factors, weights, table, num_tokens, dim = args
        zero = _I64(0)
        wide_end = builder.mul(builder.sdiv(dim, _I64(WIDE * LANES)), _I64(WIDE * LANES))
        for start, stop, width in ((zero, wide_end, WIDE), (wide_end, dim, 1)):
            cells = [(row, w) for row in range(ROWS) for w in range(width)]
            totals = {cell: cgutils.alloca_once(builder, _VEC) for cell in cells}
            with _loop(builder, start, stop, width * LANES) as (d, _):
                at = {
                    (row, w): builder.add(
                        builder.add(out, builder.mul(out_stride, _I64(row))),
                        builder.mul(builder.add(d, _I64(w * LANES)), _I64(4)),
                    )
                    for row, w in cells
                }
                for row, w in cells:
                    factor = builder.load(
                        _pointer(builder, builder.add(factors, _I64(4 * row)), _F32)
                    )
                    scaled = builder.fmul(_load(builder, at[row, w]), _splat(builder, factor))
                    builder.store(scaled, totals[row, w])
                with _loop(builder, zero, num_tokens, 1) as (t, _):
                    value = builder.load(_pointer(builder, _at(builder, table, t, 8), _I64))
                    value = _at(builder, value, d, itemsize)
                    parts = [
                        load(builder, builder.add(value, _I64(w * LANES * itemsize)))
                        for w in range(width)
                    ]
                    weight = _at(builder, weights, t, 4 * ROWS)
                    for row in range(ROWS):
                        p = builder.load(
                            _pointer(builder, builder.add(weight, _I64(4 * row)), _F32)
                        )
                        spread = _splat(builder, p)
                        for w in range(width):
                            total = totals[row, w]
                            product = _multiply_add(builder, spread, parts[w], builder.load(total))
                            builder.store(product, total)
                for cell in cells:
                    _store(builder, builder.load(totals[cell]), at[cell])
        return context.get_dummy_value()

    return emit


def _emit_widen(element: Any, itemsize: int) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, count, out = args
        with _loop(builder, _I64(0), count, 1) as (i, _):
            stored = builder.load(_pointer(builder, _at(builder, source, i, itemsize), element))
            if element is _I16:
                bits = builder.shl(builder.zext(stored, _I32), _I32(16))
                value = builder.bitcast(bits, _F32)
            else:
                value = stored if element is _F32 else builder.fpext(stored, _F32)
            builder.store(value, _pointer(builder, _at(builder, out, i, 4), _F32))
        return context.get_dummy_value()

    return emit


def _emit_prefetch(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    address, num_bytes = args
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    with _loop(builder, _I64(0), num_bytes, 64) as (i, _):
        line = builder.inttoptr(builder.add(address, i), pointer)
        builder.call(fetch, [line, _I32(0), _I32(2), _I32(1)])  # read, second-level cache, data
    return context.get_dummy_value()


def _emit_fetch_add(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.atomic_rmw("add", _pointer(builder, args[0], _I64), _I64(1), "monotonic")


def _routine(num_args: int, emit: Any, result: Any = types.void) -> Any:
    """A Numba function of int64 arguments whose body ``emit`` writes."""
    signature = result(*[types.int64] * num_args)

    def typing(context: Any, *args: Any) -> Any:
        return signature, emit

    # Numba wants each argument by name.
    names = ["context", *(f"argument_{i}" for i in range(num_args))]
    parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typing.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return intrinsic(typing)


score_float32, score_bfloat16, score_float16 = (
    _routine(5, _emit_score(load, itemsize))
    for load, itemsize in ((_load, 4), (_load_bfloat16, 2), (_load_float16, 2))
)
"""``(q, q_stride, row_table, dim, out)``: scores of ``TOKENS`` keys for a block of queries."""

accumulate_float32, accumulate_bfloat16, accumulate_float16 = (
    _routine(7, _emit_accumulate(load, itemsize))
    for load, itemsize in ((_load, 4), (_load_bfloat16, 2), (_load_float16, 2))
)
"""``(out, out_stride, factors, weights, row_table, num_tokens, dim)``:
``out ← out · factor + Σ weight · V``."""

widen_float32, widen_bfloat16, widen_float16 = (
    _routine(3, _emit_widen(element, itemsize))
    for element, itemsize in ((_F32, 4), (_I16, 2), (ir.HalfType(), 2))
)
"""``(row, count, out)``: a row as float32, for head dimensions that do not fill vectors."""

soften = _routine(5, _emit_soften)
"""``(scores, num_vectors, maxima, sums, factors)``: scores become weights, the state moves on."""

prefetch = _routine(2, _emit_prefetch)
"""``(address, num_bytes)``: ask for memory that the next tile needs."""

fetch_add = _routine(1, _emit_fetch_add, types.int64)
"""``(address)``: take the next ticket from a counter shared by the threads."""
