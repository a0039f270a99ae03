"""Compiles the Triton kernels without a GPU, so that spilled registers show before a run does.

``python -m kvalloc.kernels.triton_compile --out FILE`` measures every configuration.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from . import triton_kernels
from .triton_kernels import attend_pages, combine_splits
from .triton_tiles import Variant

TARGETS = (80, 90, 100)
PREFILL_TOKENS = 4096
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_STRIDES = ("q_token", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head")


def standard_variants() -> Iterator[Variant]:
    """The configurations that must not spill: those of the common models."""
    sizes = product(TARGETS, ("float16", "bfloat16"), (64, 128, 256), (16, 256), (1, 4, 8))
    for arch, dtype, head_dim, page_size, group in sizes:
        yield Variant(arch, dtype, head_dim, page_size, group, 1, split=True)
        yield Variant(arch, dtype, head_dim, page_size, group, PREFILL_TOKENS)


def other_variants() -> Iterator[Variant]:
    """Padded head dims, float32, windows, ragged batches, short queries, one KV head."""
    for arch in TARGETS:
        for head_dim in (64, 96, 128, 192, 256):
            yield Variant(arch, "float16", head_dim, 16, 4, 1, windowed=True, split=True)
            yield Variant(arch, "float16", head_dim, 16, 4, PREFILL_TOKENS, True, True)
        for head_dim in (64, 128, 256):
            yield Variant(arch, "float32", head_dim, 16, 4, 1, windowed=True, split=True)
            yield Variant(arch, "float32", head_dim, 16, 4, PREFILL_TOKENS, True, True)
            yield Variant(arch, "bfloat16", head_dim, 1, 8, 4, split=True)
            yield Variant(arch, "bfloat16", head_dim, 64, 8, 8, ragged=True)
        yield Variant(arch, "bfloat16", 128, 16, 128, 1)


def measure(variant: Variant) -> dict[str, Any]:
    """Compile the kernels of a variant and ask the assembler what they take.

    Returns
    -------
    dict
        The fields of the variant and of its tiles, ``registers`` per thread and
        ``shared_bytes`` per program of ``attend_pages``, ``pipelined`` (loads are issued ahead
        of their use), and ``spill_bytes`` per thread: stack and local memory, those of
        ``combine_splits`` included where contexts are split.

    Raises
    ------
    RuntimeError
        Under the interpreter, which has no compiler.
    """
    constants: dict[str, Any] = variant.constants(upcast=False)
    if not variant.split:
        constants |= {"partial": None, "partial_lse": None}
    if not variant.ragged:
        constants["tiles"] = None
    kernel = _compile(attend_pages, variant, constants, variant.options())
    used = _resources(kernel)
    spills = used["STACK"] + used["LOCAL"]
    if variant.split:
        constants = {**variant.combine_constants()}
        combine = _compile(combine_splits, variant, constants, variant.combine_options())
        spills += _resources(combine)["STACK"] + _resources(combine)["LOCAL"]
    fields = {name: getattr(variant, name) for name in Variant.__dataclass_fields__}
    return {
        **fields,
        **variant.tiles._asdict(),
        "registers": used["REG"],
        "spill_bytes": spills,
        "shared_bytes": kernel.metadata.shared,
        "pipelined": "async_copy_global_to_local" in kernel.asm["ttgir"],
    }


def measure_all(variants: Sequence[Variant], workers: int = 2) -> list[dict[str, Any]]:
    """``measure`` each variant, in order, in ``workers`` processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        results = pool.map(measure, variants)
        return list(track(results, "compiling", len(variants), console=Console(stderr=True)))


def source_hash() -> str:
    """Changes with the kernels' code, not with their comments or layout."""
    with open(triton_kernels.__file__, "rb") as file:
        words = [
            token.string
            for token in tokenize.tokenize(file.readline)
            if token.type not in (tokenize.COMMENT, tokenize.NL)
        ]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _compile(
    kernel: Any, variant: Variant, constants: dict[str, Any], options: dict[str, Any]
) -> Any:
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("the interpreter cannot compile: unset TRITON_INTERPRET")
    signature = {
        name: "constexpr" if name in constants else _argument_type(name, variant.dtype)
        for name in kernel.arg_names
    }
    # As at a launch: torch aligns buffers, and strides are multiples of the head dim.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in _STRIDES
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", variant.arch, 32), options=options)


def _argument_type(name: str, dtype: str) -> str:
    if name in ("out", "q", "k", "v"):
        return {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32"}[dtype]
    if name in ("partial", "partial_lse"):
        return "*fp32"
    if name in ("block_table", "first", "lengths", "tiles"):
        return "*i32"
    return "fp32" if name == "log2_scale" else "i32"


def _resources(compiled: Any) -> dict[str, int]:
    """``REG``, ``STACK``, ``LOCAL``… as the assembler counted them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = _run_tool("cuobjdump", "--dump-resource-usage", file.name)
    return {name: int(count) for name, count in re.findall(r"\b([A-Z]+):(\d+)", dump)}


def _run_tool(name: str, *arguments: str) -> str:
    command = [str(_TOOLS / name), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _environment() -> dict[str, Any]:
    return {
        "command": "python -m kvalloc.kernels.triton_compile",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "triton": triton.__version__,
        "ptxas": re.findall(r"V[\d.]+", _run_tool("ptxas", "--version"))[0],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "targets": [f"sm_{arch}" for arch in TARGETS],
        "kernels_sha256": source_hash(),
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(title="most of any configuration")
    for column in ("target", "dtype", "head dim", "registers", "spill bytes", "shared bytes"):
        table.add_column(column, justify="right")
    keys = sorted({(row["arch"], row["dtype"], row["head_dim"]) for row in rows})
    for arch, dtype, head_dim in keys:
        same = [
            r for r in rows if (r["arch"], r["dtype"], r["head_dim"]) == (arch, dtype, head_dim)
        ]
        worst = [max(row[k] for row in same) for k in ("registers", "spill_bytes", "shared_bytes")]
        table.add_row(f"sm_{arch}", dtype, str(head_dim), *map(str, worst))
    Console().print(table)


def main() -> int:
    """Measure every configuration; 1 if a standard one spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    standard = list(standard_variants())
    rows = measure_all([*standard, *other_variants()], arguments.workers)
    for i, row in enumerate(rows):
        row["standard"] = i < len(standard)
    _print_table(rows)
    if arguments.out:
        lines = ",\n".join("  " + json.dumps(row) for row in rows)
        head = json.dumps({"environment": _environment()}, indent=1)[:-2]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')
    spilling = sum(1 for row in rows if row["standard"] and row["spill_bytes"])
    if spilling:
        print(f"{spilling} standard configurations spill registers", file=sys.stderr)
    return 1 if spilling else 0


if __name__ == "__main__":
    raise SystemExit(main())
