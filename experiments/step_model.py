"""How long a step would take on a GPU that is not here: a roofline. All it says is simulated.

A step reads the weights and the KV cache of the running sequences once, and does the products of
the tokens that it computes; it takes as long as the slower of memory and arithmetic, plus a fixed
cost. Under tensor parallelism weights, products and KV heads are divided by the GPUs; a model
with fewer KV heads than GPUs replicates them, and reads them once on each. Not in the model:
communication between GPUs, kernels that miss the roofline (factors say how far), sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import KVGeometry
from ..models import geometry
from .errors import BadInput


@dataclass(frozen=True)
class Gpu:
    """Peak rates from the vendor's data sheets: bytes/s, dense bf16 FLOP/s, memory in bytes."""

    bandwidth: float
    flops: float
    memory_bytes: int


@dataclass(frozen=True)
class Model:
    """Parameters that are stored, and those that one token passes through (fewer in a mixture)."""

    num_parameters: int
    num_active: int


GPUS = {
    "A100-80GB": Gpu(2.039e12, 312e12, 80 * 10**9),
    "H100-SXM": Gpu(3.35e12, 989e12, 80 * 10**9),
    "H200-SXM": Gpu(4.8e12, 989e12, 141 * 10**9),
    "L4": Gpu(0.3e12, 121e12, 24 * 10**9),
}
_DENSE = {
    "OPT-13B": 12_853_473_280,
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-70B": 68_976_648_192,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Yi-6B": 6_061_035_520,
    "Yi-34B": 34_388_917_248,
}
MODELS = {name: Model(num, num) for name, num in _DENSE.items()} | {
    "Mixtral-8x7B-v0.1": Model(46_702_792_704, 12_879_925_248)
}


@dataclass(frozen=True)
class StepModel:
    """Time of a step of one model on ``tp`` GPUs of one kind. Simulated.

    Attributes
    ----------
    bandwidth_factor, flops_factor : float
        Shares of the peaks that kernels reach.
    overhead_s : float
        Of every step: launches, sampling, the scheduler.
    weight_bytes : int
        Bytes per parameter.
    """

    gpu: Gpu
    model: Model
    shard: KVGeometry
    tp: int
    bandwidth_factor: float = 0.8
    flops_factor: float = 0.6
    overhead_s: float = 0.002
    weight_bytes: int = 2

    @property
    def cache_bytes(self) -> int:
        """Bytes of one GPU for the cache: 90 % of its memory, less the weights.

        Raises
        ------
        BadInput
            The weights alone do not fit.
        """
        left = int(self.gpu.memory_bytes * 0.9) - self._weights
        if left <= 0:
            raise BadInput(f"the weights do not fit on {self.tp} GPUs: use more of them")
        return left

    @property
    def _weights(self) -> int:
        return self.model.num_parameters * self.weight_bytes // self.tp

    def step_s(self, num_decoding: int, live_bytes: int, prefill: tuple[int, ...] = ()) -> float:
        """Seconds of a step.

        Parameters
        ----------
        num_decoding
            Sequences that produce one token each.
        live_bytes
            KV bytes per GPU that they read.
        prefill
            Lengths of the prompts that are computed in this step.
        """
        if not num_decoding and not prefill:
            return 0.0
        tokens = num_decoding + sum(prefill)
        # Attention of a prompt: two products of n²/2 pairs, over all query heads of this GPU.
        head_dim = max(shape.head_dim for shape in self.shard.layers)
        width = 2 * len(self.shard.layers) * self.shard.q_heads * head_dim
        flops = 2 * self.model.num_active * tokens / self.tp
        flops += sum(width * n * n for n in prefill)
        num_bytes = self._weights + live_bytes + sum(prefill) * self.shard.bytes_per_token
        memory = num_bytes / (self.gpu.bandwidth * self.bandwidth_factor)
        return max(memory, flops / (self.gpu.flops * self.flops_factor)) + self.overhead_s


def step_model(model: str, gpu: str, tp: int = 1) -> StepModel:
    """The step model of a well-known model on a named GPU.

    Raises
    ------
    BadInput
        Unknown GPU or model, or heads that do not divide.
    """
    if gpu not in GPUS:
        raise BadInput(f"unknown GPU {gpu!r}; choose from {', '.join(GPUS)}")
    try:
        whole = geometry(model)
        shard = whole.shard(tp)
    except ValueError as error:
        raise BadInput(str(error)) from error
    if whole.name not in MODELS:
        raise BadInput(f"the parameters of {whole.name} are not known; use {', '.join(MODELS)}")
    return StepModel(GPUS[gpu], MODELS[whole.name], shard, tp)
