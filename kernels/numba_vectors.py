# mypy: allow-untyped-calls
"""Vector instructions for Numba, which has no vector type: a thin layer over LLVM's builder.

LLVM fits vectors of any width to any processor, and ``LANES`` is chosen so that one vector is
one register of this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils

_FEATURES = binding.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx2") else 4
"""Floats per vector."""
ROWS = 4
"""Query rows computed together, so that they share each load of a K or V row."""
TOKENS = LANES // ROWS
"""Tokens whose scores fill one vector."""
MASKED = -1.0e38
"""The score of a token that a row does not see: finite, so that no NaN can arise from it."""

FLOAT, HALF = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VECTOR = ir.VectorType(FLOAT, LANES)
_INTEGERS = ir.VectorType(I32, LANES)
_FUSE = ("contract",)  # lets LLVM fuse multiply and add where the processor can


class Emitter:
    """Writes vector instructions at the builder's position. Addresses are int64, in bytes."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def constant(self, value: float) -> Any:
        """A vector with ``value`` in every lane."""
        return ir.Constant(VECTOR, [value] * LANES)

    def variable(self) -> Any:
        """A vector that loops can change; LLVM keeps it in a register."""
        return cgutils.alloca_once(self.builder, VECTOR)

    def loop(self, start: Any, stop: Any, step: int) -> AbstractContextManager[Any]:
        """``with loop(start, stop, step) as (index, _)``."""
        return cgutils.for_range_slice(self.builder, start, stop, I64(step), I64)

    def offset(self, base: Any, index: Any, step: Any) -> Any:
        """The address ``base + index · step``."""
        return self.builder.add(base, self.builder.mul(index, step))

    def load_as(self, kind: Any, address: Any, align: int) -> Any:
        """A value of LLVM type ``kind``."""
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.load(pointer, align=align)

    def store(self, value: Any, address: Any) -> None:
        """Store floats, one or a vector of them."""
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def load_float32(self, address: Any) -> Any:
        """A vector of float32."""
        return self.load_as(VECTOR, address, 4)

    def load_bfloat16(self, address: Any) -> Any:
        """A vector of bfloat16, as float32: the same bits, higher up."""
        bits = self.load_as(ir.VectorType(I16, LANES), address, 2)
        shift = ir.Constant(_INTEGERS, [16] * LANES)
        return self.builder.bitcast(
            self.builder.shl(self.builder.zext(bits, _INTEGERS), shift), VECTOR
        )

    def load_float16(self, address: Any) -> Any:
        """A vector of float16, as float32."""
        return self.builder.fpext(self.load_as(ir.VectorType(HALF, LANES), address, 2), VECTOR)

    def spread(self, address: Any) -> Any:
        """One float32 from memory, in every lane."""
        nothing = ir.Constant(VECTOR, ir.Undefined)
        one = self.builder.insert_element(nothing, self.load_as(FLOAT, address, 4), I32(0))
        return self._shuffle(one, one, [0] * LANES)

    def load_rows(self, address: Any) -> Any:
        """``ROWS`` floats, repeated for every token of a vector."""
        rows = self.load_as(ir.VectorType(FLOAT, ROWS), address, 4)
        return self._shuffle(rows, rows, [lane % ROWS for lane in range(LANES)])

    def store_rows(self, vector: Any, address: Any) -> None:
        """Store the first token's ``ROWS`` floats."""
        self.store(self._shuffle(vector, vector, list(range(ROWS))), address)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """``a · b + c``."""
        return self.builder.fadd(self.builder.fmul(a, b, flags=_FUSE), c, flags=_FUSE)

    def add(self, a: Any, b: Any) -> Any:
        """``a + b``."""
        return self.builder.fadd(a, b)

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger, lane by lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def exp2(self, x: Any) -> Any:
        """``2**x`` for ``x <= 0`` to about 1e-7; 0 below 2**−126.

        Taylor's series on [−½, ½], times a power of two put together from its bits.
        """
        builder = self.builder
        magic = self.constant(1.5 * 2.0**23)  # adding it leaves round(x) in the lowest bits
        shifted = builder.fadd(x, magic)
        rest = builder.fsub(x, builder.fsub(shifted, magic))
        coefficients = [math.log(2.0) ** n / math.factorial(n) for n in range(8)]
        value = self.constant(coefficients.pop())
        while coefficients:
            value = self.multiply_add(value, rest, self.constant(coefficients.pop()))
        exponent = builder.shl(
            builder.bitcast(shifted, _INTEGERS), ir.Constant(_INTEGERS, [23] * LANES)
        )
        scaled = builder.bitcast(builder.add(builder.bitcast(value, _INTEGERS), exponent), VECTOR)
        tiny = builder.fcmp_ordered("<", x, self.constant(-126.0))
        return builder.select(tiny, self.constant(0.0), scaled)

    def sums(self, vectors: list[Any]) -> Any:
        """One vector whose lane ``i`` is the sum over the lanes of ``vectors[i]``."""
        while len(vectors) > 1:
            half = len(vectors) // 2
            vectors = [self._fold(vectors[i], vectors[i + half], half) for i in range(half)]
        return vectors[0]

    def over_tokens(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine the tokens of a ``[token, row]`` vector; every token then holds the result."""
        turn = LANES // 2
        while turn >= ROWS:
            lanes = [(lane + turn) % LANES for lane in range(LANES)]
            vector = combine(vector, self._shuffle(vector, vector, lanes))
            turn //= 2
        return vector

    def prefetch(self, address: Any) -> None:
        """Ask for one cache line, into the second-level cache."""
        pointer = I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        to_read, second_level, data = I32(0), I32(2), I32(1)
        line = self.builder.inttoptr(address, pointer)
        self.builder.call(function, [line, to_read, second_level, data])

    def _fold(self, a: Any, b: Any, half: int) -> Any:
        """In every run of ``2 · half`` lanes: the halves of ``a`` added, then those of ``b``."""
        low = [
            run + lane + side
            for run in range(0, LANES, 2 * half)
            for side in (0, LANES)
            for lane in range(half)
        ]
        high = [lane + half for lane in low]
        return self.builder.fadd(self._shuffle(a, b, low), self._shuffle(a, b, high))

    def _shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))
