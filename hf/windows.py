"""Which layers of a model store K and V, and how far back each of them looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers.cache_utils as hf
from transformers import PreTrainedConfig

SHARED = 0
"""Instead of a window: the layer reads what another one stored."""

_WINDOWED = ("sliding_attention", "chunked_attention")  # their masks differ, their caches do not


def cached_windows(config: PreTrainedConfig) -> list[int | None]:
    """Window in tokens of every layer that stores something, None where it looks at all."""
    return [window for window in _windows(config) if window != SHARED]


def layers_of(config: PreTrainedConfig, make: Callable[[int, int | None], Any]) -> list[Any]:
    """A cache layer per layer of the model.

    Parameters
    ----------
    make
        Called with the number among the layers that store something, and the window.
    """
    layers: list[Any] = []
    num_made = 0
    for window in _windows(config):
        if window == SHARED:
            layers.append(hf.DummyLayer())
        else:
            layers.append(make(num_made, window))
            num_made += 1
    return layers


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Window, None or ``SHARED``, layer by layer.

    Raises
    ------
    ValueError
        A kind of layer, or of model, that has more or less than K and V of every token.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(
            f"a cache is made for a config, as model.config, not {type(config).__name__}"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        raise ValueError(
            f"{text.model_type} has an encoder's keys to keep as well: use transformers' "
            "EncoderDecoderCache"
        )
    kinds, options = hf.get_layer_types_and_kwargs(text)
    if isinstance(options, dict):  # transformers before 5.18: one for all layers
        options = [options] * len(kinds)
    windows: list[int | None] = []
    for kind, option in zip(kinds, options, strict=True):
        if kind in _WINDOWED:
            windows.append(int(option["sliding_window"]))
        elif kind in ("full_attention", "dummy"):
            windows.append(None if kind == "full_attention" else SHARED)
        else:
            raise ValueError(
                f"{text.model_type} has layers of kind {kind!r}, which are no keys and values of "
                "every token: use transformers' DynamicCache"
            )
    return windows
