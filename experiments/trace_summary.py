"""What a trace is like: totals, percentiles, and how much of its prompts repeats."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .errors import BadInput
from .trace import Ints, Key, Trace

PERCENTILES = (50, 90, 99)


def shared_prefix(trace: Trace) -> Ints:
    """Leading prompt tokens that an earlier request had as well: int64 ``[N]``.

    Earlier means above it in the trace; nothing is ever forgotten. Two prompts share
    their equal leading runs, so the answer does not depend on a page size.
    """
    shared = np.zeros(len(trace), np.int64)
    nodes: dict[tuple[int, Key, int], int] = {}  # (parent, key, tokens) -> node of a tree
    for i, runs in enumerate(trace.prefix or ()):
        node, seen = 0, len(nodes)
        for key, tokens in runs:
            node = nodes.setdefault((node, key, tokens), len(nodes) + 1)
            if node <= seen:  # below a new node there are only new ones
                shared[i] += tokens
    return shared


def prefix_hits(trace: Trace, page_size: int) -> Ints:
    """Prompt tokens found in full pages seen before, with infinite memory: int64 ``[N]``.

    ``⌊min(shared, n − 1) / B⌋ · B`` for a prompt of n tokens and pages of B: only full
    pages are found again, and at least one token is left to compute.
    """
    if page_size < 1:
        raise BadInput(f"--page-size must be at least 1 token, not {page_size}")
    page_size = min(page_size, np.iinfo(np.int64).max)  # larger than any prompt either way
    return np.minimum(shared_prefix(trace), trace.prompt - 1) // page_size * page_size


def summarise(trace: Trace, *, page_size: int = 16, step_ms: float = 25.0) -> dict[str, Any]:
    """The figures of ``kvalloc trace describe``, ready for JSON.

    ``prefix_hit_fraction`` is 0 where the trace says nothing about prefixes
    (``has_prefixes`` tells); ``span_s`` of a trace in steps takes ``step_ms`` per step.
    """
    if not 0 < step_ms < math.inf:
        raise BadInput(f"--step-ms must be a positive number, not {step_ms}")
    prompt_tokens, hits = int(trace.prompt.sum()), int(prefix_hits(trace, page_size).sum())
    span = float(trace.arrival[-1] - trace.arrival[0]) if len(trace) else 0.0
    given = trace.max_new[trace.max_new >= 0]
    return {
        "name": trace.name,
        "requests": len(trace),
        "unit": trace.unit,
        "span_s": span if trace.unit == "s" else span * step_ms / 1000,
        "prompt_tokens": prompt_tokens,
        "output_tokens": int(trace.output.sum()),
        "max_context": int((trace.prompt + trace.output).max(initial=0)),
        "prompt": _spread(trace.prompt),
        "output": _spread(trace.output),
        "max_new": _spread(given) if len(given) else None,
        "max_new_missing": len(trace) - len(given),
        "page_size": page_size,
        "prefix_hit_fraction": hits / prompt_tokens if prompt_tokens else 0.0,
        "has_prefixes": trace.prefix is not None,
        "failed": trace.failed,
        "skipped": trace.skipped,
        "notices": list(trace.notices),
    }


def _spread(tokens: Ints) -> dict[str, float | int]:
    if not len(tokens):
        return {}
    marks = np.percentile(tokens, PERCENTILES, method="inverted_cdf").tolist()
    return {
        "mean": float(tokens.mean()),
        "min": int(tokens.min()),
        **{f"p{mark}": int(value) for mark, value in zip(PERCENTILES, marks, strict=True)},
        "max": int(tokens.max()),
    }
