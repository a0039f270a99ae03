"""Bytes a token, shapes of well-known models, and the shapes that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvalloc.geometry import ITEMSIZE, SLOTS, KVGeometry, LayerShape, canonical_dtype
from kvalloc.models import geometry, model_names

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

# Written down from the public configurations: layers, query heads, KV heads, head dim,
# context limit, bytes of a token in 16 bits.
PUBLISHED = {
    "GPT-2": (12, 12, 12, 64, 1024, 36_864),
    "OPT-13B": (40, 40, 40, 128, 2048, 819_200),
    "Falcon-7B": (32, 71, 1, 64, 2048, 8_192),
    "Llama-2-7B": (32, 32, 32, 128, 4096, 524_288),
    "Llama-2-70B": (80, 64, 8, 128, 4096, 327_680),
    "Llama-3-8B": (32, 32, 8, 128, 8192, 131_072),
    "Llama-3-70B": (80, 64, 8, 128, 8192, 327_680),
    "Llama-3.1-8B": (32, 32, 8, 128, 131_072, 131_072),
    "Llama-3.2-1B": (16, 32, 8, 64, 131_072, 32_768),
    "Mistral-7B-v0.1": (32, 32, 8, 128, 32_768, 131_072),
    "Mistral-7B-v0.3": (32, 32, 8, 128, 32_768, 131_072),
    "Mixtral-8x7B-v0.1": (32, 32, 8, 128, 32_768, 131_072),
    "Qwen2.5-7B": (28, 28, 4, 128, 131_072, 57_344),
    "Qwen2.5-72B": (80, 64, 8, 128, 131_072, 327_680),
    "Qwen3-8B": (36, 32, 8, 128, 40_960, 147_456),
    "Qwen3-32B": (64, 64, 8, 128, 40_960, 262_144),
    "Gemma-2-9B": (42, 16, 8, 256, 8192, 344_064),
    "Gemma-3-27B": (62, 32, 16, 128, 131_072, 507_904),
    "Phi-3-mini-4k": (32, 32, 32, 96, 4096, 393_216),
    "Phi-4": (40, 40, 10, 128, 16_384, 204_800),
    "Yi-6B": (32, 32, 4, 128, 4096, 65_536),
    "Yi-34B": (60, 56, 8, 128, 4096, 245_760),
    "gpt-oss-20b": (24, 64, 8, 64, 131_072, 49_152),
    "DeepSeek-V3": (61, 128, 1, 576, 163_840, 70_272),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_shape(name: str) -> None:
    layers, q_heads, kv_heads, head_dim, max_context, bytes_per_token = PUBLISHED[name]
    model = geometry(name)
    assert model.name == name
    assert len(model.layers) == layers
    assert model.q_heads == q_heads
    assert {(shape.kv_heads, shape.head_dim) for shape in model.layers} == {(kv_heads, head_dim)}
    assert model.max_context == max_context
    assert model.with_dtype("bf16").bytes_per_token == bytes_per_token


def test_no_preset_is_left_unchecked() -> None:
    assert set(model_names()) == {"tiny", *PUBLISHED}


def test_native_dtypes() -> None:
    native = {name: geometry(name).dtype for name in PUBLISHED}
    assert native.pop("GPT-2") == "float32"
    for name in ("OPT-13B", "Llama-2-7B", "Llama-2-70B"):
        assert native.pop(name) == "float16"
    assert set(native.values()) == {"bfloat16"}
    assert geometry("gpt-2").bytes_per_token == 2 * PUBLISHED["GPT-2"][-1]


def test_tiny_runs_everywhere() -> None:
    tiny = geometry("tiny")
    assert tiny.layers == (LayerShape(2, 64),) * 2
    assert (tiny.q_heads, tiny.dtype, tiny.bytes_per_token) == (8, "float32", 2048)


def test_numbers_of_the_docs() -> None:
    llama = geometry("Llama-3-8B")
    assert llama.bytes_per_token == 128 * KIB
    assert llama.bytes_per_token * 4096 == GIB // 2
    assert llama.bytes_per_token * 64 * 131_072 == TIB
    assert llama.with_dtype("fp8").bytes_per_token == 64 * KIB


@pytest.mark.parametrize(
    ("name", "context", "kept", "live"),
    [
        ("Gemma-2-9B", 8192, 2.625 * GIB, 8192 * 172_032 + 672 * MIB),
        ("Gemma-3-27B", 131_072, 62 * GIB, 131_072 * 81_920 + 416 * MIB),
        ("Gemma-3-27B", 1024, 1024 * 507_904, 1024 * 507_904),
        ("Gemma-3-27B", 1025, 1025 * 507_904, 1025 * 81_920 + 416 * MIB),
        ("Mistral-7B-v0.1", 4096, 512 * MIB, 512 * MIB),
        ("Mistral-7B-v0.1", 32_768, 4 * GIB, 512 * MIB),
        ("Mistral-7B-v0.3", 32_768, 4 * GIB, 4 * GIB),
        ("gpt-oss-20b", 1000, 49_152_000, 24_576_000 + 3 * MIB),
        ("Phi-3-mini", 4096, 4096 * 393_216, 2047 * 393_216),
        ("Llama-3-8B", 0, 0, 0),
    ],
)
def test_windows_bound_what_is_live(name: str, context: int, kept: float, live: int) -> None:
    model = geometry(name)
    assert model.bytes_per_token * context == kept
    assert model.windowed_bytes(context) == live


def test_local_layers_are_where_the_models_have_them() -> None:
    def local(name: str) -> list[int]:
        return [i for i, shape in enumerate(geometry(name).layers) if shape.window]

    assert local("gemma-2-9b") == list(range(0, 42, 2))
    assert local("gpt-oss-20b") == list(range(0, 24, 2))
    globals_of_gemma = sorted(set(range(62)) - set(local("gemma-3-27b")))
    assert globals_of_gemma == list(range(5, 60, 6)), "the last two of 62 are local"


def test_a_latent_is_one_tensor() -> None:
    deepseek = geometry("deepseek-v3")
    assert deepseek.tensor_bytes(0) == deepseek.layer_bytes(0) == 1152
    assert geometry("llama-3-8b").layer_bytes(0) == 2 * geometry("llama-3-8b").tensor_bytes(0)


@pytest.mark.parametrize(
    ("spelled", "proper"),
    [
        ("llama-3-8b", "Llama-3-8B"),
        ("LLAMA3-8B", "Llama-3-8B"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("llama-3-1-8b", "Llama-3.1-8B"),
        ("llama31-8b", "Llama-3.1-8B"),
        ("qwen25_72b", "Qwen2.5-72B"),
        ("mistral-7b", "Mistral-7B-v0.1"),
        ("mistral 7b v03", "Mistral-7B-v0.3"),
        ("mixtral-8x7b", "Mixtral-8x7B-v0.1"),
        ("phi-3-mini", "Phi-3-mini-4k"),
        ("gpt2", "GPT-2"),
        ("GPT-OSS-20B", "gpt-oss-20b"),
        ("deepseek_v3", "DeepSeek-V3"),
    ],
)
def test_names_are_found_however_they_are_spelled(spelled: str, proper: str) -> None:
    assert geometry(spelled).name == proper


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("lama-3-8b", "did you mean Llama-3-8B"),
        ("llama-3-18b", "did you mean"),
        ("llama318b", "did you mean"),
        ("falcon", "Falcon-7B"),
        ("mistral-7b-v0.2", "Mistral-7B-v0.1"),
        ("", "kvalloc size --list"),
        ("-", "kvalloc size --list"),
    ],
)
def test_an_unknown_model_names_near_ones(wrong: str, told: str) -> None:
    with pytest.raises(ValueError, match="unknown model") as error:
        geometry(wrong)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("name", "tp", "kv_heads", "share"),
    [
        ("Llama-3-70B", 8, 1, 8),
        ("Llama-3-70B", 16, 1, 8),
        ("Llama-3-8B", 1, 8, 1),
        ("Qwen2.5-7B", 2, 2, 2),
        ("DeepSeek-V3", 8, 1, 1),
    ],
)
def test_a_shard_divides_heads_or_replicates_them(
    name: str, tp: int, kv_heads: int, share: int
) -> None:
    whole = geometry(name)
    part = whole.shard(tp)
    assert part.layers[0].kv_heads == kv_heads
    assert part.bytes_per_token * share == whole.bytes_per_token
    assert part.q_heads == whole.q_heads // tp
    assert part.layers[0].window == whole.layers[0].window


@pytest.mark.parametrize(
    ("name", "tp", "told"),
    [
        ("Falcon-7B", 2, "71 query heads"),
        ("Phi-4", 4, "10 KV heads cannot be divided evenly over 4 GPUs"),
        ("Phi-4", 20, None),
        ("Qwen2.5-7B", 14, "4 KV heads cannot be replicated evenly over 14 GPUs"),
        ("Llama-3-8B", 0, "positive integer"),
        ("Llama-3-8B", 3, "32 query heads"),
    ],
)
def test_uneven_shards_are_refused(name: str, tp: int, told: str | None) -> None:
    if told is None:
        assert geometry(name).shard(tp).layers[0].kv_heads == 1
        return
    with pytest.raises(ValueError, match=told):
        geometry(name).shard(tp)


@pytest.mark.parametrize(
    ("name", "proper"),
    [
        ("fp32", "float32"),
        ("BF16", "bfloat16"),
        ("half", "float16"),
        ("torch.float16", "float16"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        *((name, name) for name in ITEMSIZE),
    ],
)
def test_dtypes_have_short_names(name: str, proper: str) -> None:
    assert canonical_dtype(name) == proper
    assert KVGeometry("mine", (LayerShape(1, 64),), 1, name).dtype == proper


@pytest.mark.parametrize("name", ["int8", "", "float64", "bf-16"])
def test_other_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown cache dtype"):
        canonical_dtype(name)


@pytest.mark.parametrize("field", ["layers", "q_heads", "kv_heads", "head_dim", "max_context"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_counts_are_positive_integers(field: str, value: object) -> None:
    numbers = {"layers": 2, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "max_context": 128}
    KVGeometry.uniform("mine", **numbers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{field} must be a positive integer"):
        KVGeometry.uniform("mine", **{**numbers, field: value})  # type: ignore[arg-type]


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="window must be a positive integer"):
        LayerShape(8, 128, window=0)
    with pytest.raises(ValueError, match="tensors must be 2"):
        LayerShape(8, 128, tensors=3)
    with pytest.raises(ValueError, match="at least one layer"):
        KVGeometry("mine", (), 8, "bf16")
    with pytest.raises(ValueError, match="8 query heads cannot share 3 KV heads evenly in layer 1"):
        KVGeometry("mine", (LayerShape(2, 64), LayerShape(3, 64)), 8, "bf16")
    with pytest.raises(ValueError, match="0 or more tokens"):
        geometry("tiny").windowed_bytes(-1)


def test_a_slot_is_one_byte() -> None:
    assert SLOTS.bytes_per_token == 1
    assert SLOTS.max_context is None


@settings(deadline=None)
@given(
    layers=st.lists(
        st.builds(
            LayerShape,
            kv_heads=st.sampled_from([1, 2, 4, 8]),
            head_dim=st.integers(1, 256),
            window=st.none() | st.integers(1, 100),
            tensors=st.sampled_from([1, 2]),
        ),
        min_size=1,
        max_size=6,
    ),
    dtype=st.sampled_from(sorted(ITEMSIZE)),
    context=st.integers(0, 200),
)
def test_the_formula_for_any_layers(layers: list[LayerShape], dtype: str, context: int) -> None:
    model = KVGeometry("any", tuple(layers), 8, dtype)
    live = 0
    for token in range(context):  # token by token, as an eviction would see it
        for shape in layers:
            if shape.window is None or token >= context - shape.window:
                live += shape.tensors * shape.kv_heads * shape.head_dim * ITEMSIZE[dtype]
    assert model.windowed_bytes(context) == live
    unbounded = KVGeometry(
        "any", tuple(LayerShape(s.kv_heads, s.head_dim, None, s.tensors) for s in layers), 8, dtype
    )
    assert unbounded.windowed_bytes(context) == context * model.bytes_per_token
    assert hash(model) == hash(KVGeometry("any", tuple(layers), 8, dtype))


@pytest.mark.parametrize("layers", [5, (1,), "x", None, [LayerShape(1, 1), (1, 1)]])
def test_layers_are_layer_shapes(layers: Any) -> None:
    with pytest.raises(TypeError, match=r"layers must be a tuple of LayerShape, .*KVGeometry"):
        KVGeometry("mine", layers, 1, "float16")


@pytest.mark.parametrize("name", [None, 3, ("llama-3-8b",), LayerShape])
def test_a_model_is_told_by_its_name(name: Any) -> None:
    with pytest.raises(TypeError, match="a model is told by its name, not by"):
        geometry(name)


@pytest.mark.parametrize("context", ["4", 1.5, None])
def test_a_context_is_a_whole_number(context: Any) -> None:
    with pytest.raises(TypeError, match="context must be an integer, not"):
        geometry("tiny").windowed_bytes(context)
