"""Caches for Hugging Face transformers over the three backends: one changed line in a script.

::

    cache = VmmCache.from_config(model.config, max_length=32768)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=100)

Needs the extra ``kvalloc[transformers]``.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "kvalloc.hf needs transformers: pip install 'kvalloc[transformers]'"
    ) from error

from .caches import ContiguousCache, PagedCache, VmmCache

__all__ = ["ContiguousCache", "PagedCache", "VmmCache"]
