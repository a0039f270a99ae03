"""Trace files as they should be, mutations of them, and what a reader owes whatever the bytes."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from kvalloc.experiments.errors import BadInput
from kvalloc.experiments.readers import read_trace

ROWS = {
    "own": b"arrival_s,prompt_tokens,output_tokens,max_new_tokens,prefix,prefix_tokens\n"
    b"0.25,100,7,9,a;b,64;3\n1.5,20,0,,,\n2.5,9,1,4,7,9\n",
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2024-05-10 00:00:01+00:00,396,109",
    "vidur": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n",
    "burst": b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n6,GPT-4,0,0,0,API log\n",
    "own json": b'{"arrival_step": 3, "prompt_tokens": 9, "output_tokens": 2, "prefix": ["a"], '
    b'"prefix_tokens": [4]}\n{"arrival_step": 3, "prompt_tokens": 9, "output_tokens": 2}\n',
    "mooncake": b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n',
    "bailian": b'{"chat_id": 1, "timestamp": 6.1, "input_length": 20, "output_length": 5, '
    b'"hash_ids": [3, 4]}\n',
    "weka": b'{"block_size": 64, "requests": [{"t": 0.5, "in": 70, "out": 2, "hash_ids": [1]}, '
    b'{"type": "subagent", "t": 1, "requests": [{"t": 2, "in": 7, "out": 2}]}]}\n',
}
PARTS = (
    b"\0 \xff \xef\xbb\xbf \xe2\x80\xa8 \" ' , ; \n \r\n { } [ ] : - + . e E _ 0 1 9 nan inf NaN "
    b"Infinity null true 1e308 -1 0.5 9007199254740993 99999999999999999999 \\u0000 \\ud800"
).split(b" ")


def mutated(chance: random.Random) -> bytes:
    """A file of some family with up to three wounds, packed or plain."""
    content = bytearray(ROWS[chance.choice(sorted(ROWS))])
    for _ in range(chance.randint(0, 3)):
        at, cut = chance.randint(0, len(content)), chance.randint(0, 8)
        noise = bytes(chance.randint(0, 255) for _ in range(chance.randint(0, 4)))
        content[at : at + cut] = chance.choice([*PARTS, noise])
    return gzip.compress(bytes(content)) if chance.random() < 0.3 else bytes(content)


def trace_or_sentence(path: Path) -> bool:
    """Read a file: a trace (True), or an error of one sentence that names it."""
    try:
        trace = read_trace(path)
    except BadInput as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        assert len(str(error)) < 600
        return False
    assert len(trace) >= 1
    return True
