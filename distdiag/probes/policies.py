"""How wrappers were told to compute with the parameters of a unit, and where to keep them."""

from __future__ import annotations

from typing import Any, Final

from distdiag.model_event import Policy

_GATHERED: Final = ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
"""The strategies of FSDP1 that keep parameters whole between forward and backward."""


def policy_of_group(group: Any) -> Policy:  # noqa: ANN401
    """Return the policy of what FSDP2 gathers together; of other versions, as much as they tell."""
    precision = getattr(group, "mp_policy", None)
    offload = getattr(group, "offload_policy", None)
    kind = type(offload).__name__
    return Policy(
        param_dtype=_dtype(precision, "param_dtype"),
        reduce_dtype=_dtype(precision, "reduce_dtype"),
        offload="cpu" if kind == "CPUOffloadPolicy" else "",
        reshard_after_forward=_resharding(group),
    )


def _resharding(group: Any) -> str:  # noqa: ANN401
    mesh = getattr(group, "mesh_info", None)
    if mesh is None or not hasattr(group, "post_forward_mesh_info"):
        return ""
    after = group.post_forward_mesh_info
    if after is None or after is mesh or after == mesh:
        return str(after is not None)
    return str(getattr(after, "shard_mesh_size", True))


def policy_of_wrapper(module: Any) -> Policy:  # noqa: ANN401
    """Return the policy of FSDP1 or DDP."""
    precision = getattr(module, "mixed_precision", None)
    offload = getattr(module, "cpu_offload", None)
    strategy = getattr(getattr(module, "sharding_strategy", None), "name", "")
    resharding = "" if strategy in ("", "NO_SHARD") else str(strategy not in _GATHERED)
    return Policy(
        param_dtype=_dtype(precision, "param_dtype"),
        reduce_dtype=_dtype(precision, "reduce_dtype"),
        offload="cpu" if getattr(offload, "offload_params", False) else "",
        reshard_after_forward=resharding,
    )


def _dtype(precision: Any, name: str) -> str:  # noqa: ANN401
    dtype = getattr(precision, name, None)
    return "" if dtype is None else str(dtype).removeprefix("torch.")
