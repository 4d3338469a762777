"""Which calls need every rank: collectives, the making of groups, the saving of sharded state."""

import ast
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from distdiag.lint.bindings import value_of
from distdiag.lint.modules import Function


class Family(StrEnum):
    """What a call does that needs other ranks."""

    COLLECTIVE = "collective"
    GROUP = "group"
    CHECKPOINT = "checkpoint"
    START = "start"


@dataclass(frozen=True, slots=True)
class Operation:
    """A call that is complete only when every rank of its group makes it.

    `group` is None for all ranks, else the text of the group. `parameter` is the name of the
    parameter of the function around it that holds the group, if it is one.
    """

    kind: str
    family: Family = Family.COLLECTIVE
    group: str | None = None
    parameter: str | None = None


# Where `group` stands among the arguments (torch.distributed; keyword `group` everywhere).
_GROUP_AT: Final = {
    "all_gather": 2,
    "all_gather_coalesced": 2,
    "all_gather_into_tensor": 2,
    "all_gather_object": 2,
    "all_reduce": 2,
    "all_reduce_coalesced": 2,
    "all_to_all": 2,
    "all_to_all_single": 4,
    "barrier": 0,
    "broadcast": 2,
    "broadcast_object_list": 2,
    "gather": 3,
    "gather_object": 3,
    "monitored_barrier": 0,
    "reduce": 3,
    "reduce_scatter": 3,
    "reduce_scatter_tensor": 3,
    "scatter": 3,
    "scatter_object_list": 3,
}
_GROUPS: Final = frozenset(
    {"init_device_mesh", "new_group", "new_subgroups", "new_subgroups_by_enumeration"}
)
_HOMES: Final = re.compile(
    r"^(torch\.distributed(\.distributed_c10d|\.c10d|\.device_mesh)?|torch\.distributed\.checkpoint(\.\w+)*"
    r"|deepspeed\.comm(\.comm)?|dist|c10d)$"
)
_CHECKPOINT_HOME: Final = re.compile(r"^(torch\.distributed\.checkpoint(\.\w+)*|dcp|dist_cp)$")
_CHECKPOINT: Final = frozenset({"async_save", "load", "load_state_dict", "save", "save_state_dict"})
_STATE_DICTS: Final = frozenset(
    {"get_model_state_dict", "get_optimizer_state_dict", "get_state_dict"}
)
_FRAMEWORKS: Final = {
    re.compile(r"(^|\.|_)(accelerator|partial_?state|accelerator_?state|state)$", re.IGNORECASE): {
        "gather": Family.COLLECTIVE,
        "gather_for_metrics": Family.COLLECTIVE,
        "pad_across_processes": Family.COLLECTIVE,
        "reduce": Family.COLLECTIVE,
        "wait_for_everyone": Family.COLLECTIVE,
        "save_state": Family.CHECKPOINT,
        "get_state_dict": Family.CHECKPOINT,
    },
    re.compile(r"(^|\.|_)(fabric|strategy)$", re.IGNORECASE): {
        "all_gather": Family.COLLECTIVE,
        "barrier": Family.COLLECTIVE,
        "broadcast": Family.COLLECTIVE,
    },
    re.compile(r"(^|\.|_)((model|ds|deepspeed)_engine|fabric)$", re.IGNORECASE): {
        "save_checkpoint": Family.CHECKPOINT,
    },
    re.compile(r"(^|\.)fabric$", re.IGNORECASE): {"save": Family.CHECKPOINT},
}
_EVERYWHERE: Final = {
    "wait_for_everyone": Family.COLLECTIVE,
    "gather_for_metrics": Family.COLLECTIVE,
    "monitored_barrier": Family.COLLECTIVE,
    "full_tensor": Family.COLLECTIVE,
}
_ACCELERATE_UTILS: Final = frozenset(
    {"broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "wait_for_everyone"}
)
_STARTS: Final = re.compile(
    r"^(torch\.distributed(\.\w+)?|dist)\.init_process_group$|^deepspeed(\.comm(\.comm)?)?\.init_distributed$"
    r"|^accelerate(\.\w+)*\.(Accelerator|PartialState)$"
)
_WORLD: Final = frozenset(
    {"None", "dist.group.WORLD", "torch.distributed.group.WORLD", "group.WORLD"}
)


def operation_of(call: ast.Call, function: Function) -> Operation | None:
    """Return what a call needs other ranks for, None if it does not."""
    full = function.module.full_name(call.func)
    home, _, name = full.rpartition(".")
    if _STARTS.match(full):
        return Operation(name, Family.START)
    if name in _GROUP_AT and _HOMES.match(home):
        return _with_group(name, call, function)
    if name in _GROUPS and _HOMES.match(home):
        return None if _is_local(call) else Operation(name, Family.GROUP)
    if _is_checkpoint(home, name, call):
        return Operation(name, Family.CHECKPOINT)
    if home.startswith("accelerate.utils") and name in _ACCELERATE_UTILS:
        return Operation(name)
    if full == "torch_xla.core.xla_model.rendezvous":
        return Operation(name)
    return _of_method(call, function)


def _of_method(call: ast.Call, function: Function) -> Operation | None:
    if not isinstance(call.func, ast.Attribute):
        return None
    name = call.func.attr
    if name in _EVERYWHERE:
        return Operation(name, _EVERYWHERE[name])
    owner = call.func.value
    text = ast.unparse(owner.func if isinstance(owner, ast.Call) else owner)
    for pattern, names in _FRAMEWORKS.items():
        if name in names and pattern.search(text) and not text.startswith("tf."):
            return Operation(name, names[name])
    if name == "save_checkpoint" and _is_made_by(owner, function, "deepspeed.initialize"):
        return Operation(name, Family.CHECKPOINT)
    return None


def _is_made_by(owner: ast.expr, function: Function, maker: str) -> bool:
    made = value_of(owner, function)
    return isinstance(made, ast.Call) and function.module.full_name(made.func) == maker


def _is_checkpoint(home: str, name: str, call: ast.Call) -> bool:
    if not _CHECKPOINT_HOME.match(home):
        return False
    if name in _STATE_DICTS:
        return home.endswith(".state_dict")
    return name in _CHECKPOINT and not any(
        k.arg in ("no_dist", "process_group") for k in call.keywords
    )


def _is_local(call: ast.Call) -> bool:
    return any(k.arg == "use_local_synchronization" for k in call.keywords)


def _with_group(name: str, call: ast.Call, function: Function) -> Operation:
    given = next((k.value for k in call.keywords if k.arg in ("group", "process_group")), None)
    if given is None and len(call.args) > _GROUP_AT[name]:
        given = call.args[_GROUP_AT[name]]
    if given is None or ast.unparse(given) in _WORLD:
        return Operation(name)
    text = ast.unparse(given)
    is_parameter = isinstance(given, ast.Name) and text in function.parameters
    return Operation(name, group=text, parameter=text if is_parameter else None)
