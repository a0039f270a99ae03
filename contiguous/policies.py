"""How many slots an admission sets aside for tokens that are not generated yet."""

from __future__ import annotations

from ..sequences import count
from .buddy import next_power_of_two

POLICIES = ("max", "limit", "pow2", "oracle", "exact")
"""The names; ``max`` is the maximum reservation of the article in docs/replay.md. Orca (2022), as
the PagedAttention paper (2023) simulates it, has the next three as max, pow2 and oracle."""


def check_policy(policy: str, limit: int | None) -> None:
    """Refuse a policy that does not exist, or that lacks the limit which it reserves."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy {policy!r}: use one of {', '.join(POLICIES)}")
    if policy == "limit" and limit is None:
        raise ValueError("policy 'limit' reserves the context limit: pass limit=")


def reservation(
    policy: str, tokens: int, max_new: int | None, expected_new: int | None, limit: int | None
) -> int:
    """Tokens to reserve for a prompt of ``tokens``, clamped to ``limit``.

    - ``max``: prompt + ``max_new``;
    - ``limit``: ``limit``, whatever the request asks for;
    - ``pow2``: prompt + the next power of two of ``expected_new`` (0 stays 0);
    - ``oracle``: prompt + ``expected_new``;
    - ``exact``: the prompt alone.

    Raises
    ------
    ValueError
        A negative count, or the count that the policy goes by is None.
    """
    most = None if max_new is None else count("max_new", max_new)
    expected = None if expected_new is None else count("expected_new", expected_new)
    if policy == "exact":
        return tokens
    if policy == "limit":
        assert limit is not None
        return limit
    if policy == "max":
        if most is None:
            raise ValueError(
                "policy 'max' reserves prompt + max_new: pass max_new=, or use policy 'limit' "
                "or 'exact'"
            )
        room = tokens + most
    else:
        if expected is None:
            raise ValueError(
                f"policy {policy!r} reserves by the true output length: pass expected_new=, "
                "which a replay knows, or use policy 'max'"
            )
        room = tokens + (next_power_of_two(expected) if policy == "pow2" else expected)
    return room if limit is None else min(room, limit)
