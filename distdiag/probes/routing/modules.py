"""Which modules may route tokens to experts, and what they say of it themselves."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

from torch import nn

from distdiag.config.placement_rules import matches
from distdiag.probes.models.modules import clean_name, is_compiled, own_modules, own_parameters

_CLASSES: Final = re.compile(
    r"Router|Gat(e|ing)(?![a-z])|Top_?[Kk]|MoE|Moe(?![a-z])|MOE|OfExperts|Switch|Sparse"
)
_ROUTERS: Final = re.compile(r"Router|Gat(e|ing)(?![a-z])|Top_?[Kk]")
_PARTS: Final = frozenset(
    {"experts", "expert", "local_experts", "router", "gate", "gating", "wg", "w_gate", "routing"}
)
_COUNTS: Final = ("num_experts", "n_routed_experts", "num_local_experts", "n_experts")
_RANDOM: Final = re.compile(r"jitter|nois[ey]|rsample|stochastic|random(?!_?(seed|state))")
_OFF: Final = frozenset({"", "none", "off", "false"})
_MOST_EXPERTS: Final = 4096


def routing_modules(root: nn.Module, named: Sequence[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in whose forward pass experts may be chosen, with their names.

    Those that fit a pattern of `named` are among them, whatever their kind. Modules that are
    compiled, or are part of one, are left alone: hooks would change their graphs.
    """
    compiled: set[int] = set()
    for name, module in root.named_modules():
        if id(module) in compiled or is_compiled(module):
            compiled.update(map(id, module.children()))
        elif (_may_route(module) or is_named(clean_name(name), named)) and not any(
            map(is_compiled, module.modules())
        ):
            yield clean_name(name), module


def _may_route(module: nn.Module) -> bool:
    if isinstance(module, (nn.Linear, nn.ModuleList, nn.ModuleDict)):
        return False
    if not _PARTS.isdisjoint(own_modules(module)) or not _PARTS.isdisjoint(own_parameters(module)):
        return True
    return bool(_CLASSES.search(type(module).__name__))


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Say whether the user names a module as one that routes."""
    return any(matches(pattern, name) for pattern in patterns)


def is_router(module: nn.Module) -> bool:
    """Say whether a module is one that does nothing but route, by its class."""
    return bool(_ROUTERS.search(type(module).__name__))


def expert_counts(module: nn.Module) -> frozenset[int]:
    """Return how many experts there may be, by what the module has; empty if nothing tells."""
    found: set[int] = set()
    for owner in (module, getattr(module, "config", None)):
        for name in _COUNTS:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                found.add(value)
    for name, part in own_modules(module).items():
        if isinstance(part, nn.ModuleList) and "expert" in name:
            found.add(len(part))
        if isinstance(part, nn.Linear) and name in _PARTS:
            found.add(part.out_features)
    return frozenset(number for number in found if 1 < number <= _MOST_EXPERTS)


def is_meant_random(module: nn.Module) -> bool:
    """Say whether a gate is set to choose by random numbers while it trains.

    Options to choose at random which tokens are dropped, or a second expert, are not among them:
    with these the draw is seen if there is one, and some choices are made before it.
    """
    for owner in (module, getattr(module, "config", None)):
        values = getattr(owner, "__dict__", {})
        if any(_RANDOM.search(str(name)) and _is_on(value) for name, value in values.items()):
            return True
    return False


def _is_on(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() not in _OFF
    return isinstance(value, (bool, int, float)) and value > 0
