"""The options of ``kvalloc compare``: their types, names and help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .scheduling import OnFailure, OnFull

DEFAULT_BACKENDS = ("contiguous:max", "contiguous:exact", "paged:16", "vmm:64KiB")
DEFAULT_OF_SLOTS = (*DEFAULT_BACKENDS[:3], "vmm:16")
"""There pages count tokens."""
DEFAULT_MODEL = "tiny"
DEFAULT_MEMORY = "4MiB"
"""Too little for the built-in traces: what a backend does then is the question."""
DEFAULT_MEMORY_OF_FILES = "64MiB"

Layout = Literal["token-major", "head-major"]
"""What is consecutive in memory: the heads of a token, or the tokens of a head."""

Device = Literal["auto", "cpu", "cuda"]
"""Where a real run happens."""

TraceName = Annotated[str, typer.Argument(help="A built-in name (kvalloc trace list) or a file.")]
Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        "-b",
        metavar="SPEC",
        help=f"See above. Repeat it (default: {', '.join(DEFAULT_BACKENDS)}; vmm:16 of slots).",
    ),
]
RunOrAccount = Annotated[
    bool | None,
    typer.Option(
        "--run/--account", help="Real memory and attention (default), or the books alone."
    ),
]
Slots = Annotated[int | None, typer.Option(help="Memory in tokens, without a model (books alone).")]
Model = Annotated[
    str | None,
    typer.Option(help=f"Whose cache it is: kvalloc size --list (default: {DEFAULT_MODEL})."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help=f"Memory for the cache, as in 16GiB (default: {DEFAULT_MEMORY}; "
        f"{DEFAULT_MEMORY_OF_FILES} for a file)."
    ),
]
Dtype = Annotated[str | None, typer.Option(help="Of the cache (default: the model's).")]
MaxNew = Annotated[
    str | None,
    typer.Option(
        metavar="N|limit|output",
        help="Where the trace gives no max_new (default: its largest output).",
    ),
]
IfFull = Annotated[OnFull, typer.Option(help="A refused admission waits or is lost.")]
IfGrowthFails = Annotated[
    OnFailure,
    typer.Option(help="A refused growth preempts (compute again, or swap), or is lost."),
]
StepMs = Annotated[float, typer.Option(help="Length of a step, for arrivals in seconds.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Replay only the first N requests.")]
Rate = Annotated[
    float | None, typer.Option(help="Requests a second (1e-6 to 1e6), for files without times.")
]
Place = Annotated[
    Device, typer.Option(help="Where a run happens: auto takes the GPU if torch finds one.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Check every attention output against float64.")
]
Order = Annotated[Layout, typer.Option(help="Order of the tensors in memory, for all backends.")]
Seed = Annotated[int, typer.Option(min=0, help="Of whatever is random.")]
Out = Annotated[Path, typer.Option(help="Folder for compare.json and the figures.")]
