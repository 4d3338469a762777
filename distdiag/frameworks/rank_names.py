"""What the names that frameworks give to ranks are on each rank of a small job.

The job has two nodes with two ranks each: the smallest in which the first rank, the first of a
node, the last one and the number of the node all differ.
"""

import ast
import re
from collections.abc import Callable
from typing import Final

RANKS: Final = (0, 1, 2, 3)
RANKS_PER_NODE: Final = 2


def _local(rank: int) -> int:
    return rank % RANKS_PER_NODE


def _node(rank: int) -> int:
    return rank // RANKS_PER_NODE


_GLOBAL: Final = re.compile(
    r"^_*(get_|cached_)?((global|world|my|cur|current|this|dist|ddp|self)_)?_*rank$"
    r"|^(get_)?process_index$",
    re.IGNORECASE,
)
_TERMS: Final[tuple[tuple[str, Callable[[int], object]], ...]] = (
    (r"^_*(get_)?local_*(rank|process_index)$", _local),
    (r"^_*(get_)?(node|group)_rank$", _node),
    # A coordinate along one axis: some ranks have it and some have another one.
    (r"^_*(get_)?(dp|tp|pp|cp|ep|sp|mp|fsdp|replicate|shard)_rank$", _local),
    (r"^_*(get_)?\w*(parallel|partition|pipeline|slice)\w*_rank$", _local),
    (
        r"^_*is_local_(main_process|master|process_zero|rank_?(zero|0)|main)$",
        lambda r: _local(r) == 0,
    ),
    (r"^_*local_(main_process|master_process|process_zero)$", lambda r: _local(r) == 0),
    (
        r"^_*(is_|is|on_)?(global_|world_)?(main|master|chief|lead)_?(process|proc)$",
        lambda r: r == 0,
    ),
    (r"^_*is_?(global_|world_)?(main|master|chief|lead)(_rank|_node)?$", lambda r: r == 0),
    (
        r"^_*is_?((global|world)_)?((process|rank)_?(zero|0)|zero_rank|first_rank)$",
        lambda r: r == 0,
    ),
    (r"^_*(is_)?(global|world_process)_zero$", lambda r: r == 0),
    (r"^_*is_(primary|coordinator|leader)$", lambda r: r == 0),
    (r"^_*is_last_(rank|process)$", lambda r: r == RANKS[-1]),
    (r"^_*(get_)?((global|world)_)?(world_size|num_processes)$", lambda r: len(RANKS)),
    (r"^_*((is|use|in|do)_)*(torch_)?(distributed|ddp)(_\w+)?$|^is_initialized$", lambda r: True),
)
_PATTERNS: Final[tuple[tuple[re.Pattern[str], Callable[[int], object]], ...]] = (
    (_GLOBAL, lambda r: r),
    *((re.compile(pattern, re.IGNORECASE), value) for pattern, value in _TERMS),
)
_VARIABLES: Final[dict[str, Callable[[int], int]]] = {
    "RANK": lambda r: r,
    "LOCAL_RANK": _local,
    "GROUP_RANK": _node,
    "NODE_RANK": _node,
    "SLURM_PROCID": lambda r: r,
    "SLURM_LOCALID": _local,
    "OMPI_COMM_WORLD_RANK": lambda r: r,
    "OMPI_COMM_WORLD_LOCAL_RANK": _local,
    "WORLD_SIZE": lambda r: len(RANKS),
}
# Whose rank is that of this process. Others (`placement.rank`, `worker.rank`) are ranks of things.
_OWNERS: Final = re.compile(
    r"^(self|cls|args|opt|opts|cfg|config|hparams|params|env|ctx|trainer|fabric|comm|c10d|mpu|ps|groups"
    r"|utils?|engine|module|strategy|\w*(dist|state|args|accelerator|trainer|context)\w*)$",
    re.IGNORECASE,
)


def is_global_rank(expr: ast.expr) -> bool:
    """Say whether an expression is by its name the number of this rank among all."""
    return bool(_GLOBAL.match(last_name(expr.func if isinstance(expr, ast.Call) else expr)))


def value_by_name(expr: ast.expr, rank: int) -> object:
    """Return what a name, attribute or function is on a rank, None if its name tells nothing."""
    name = last_name(expr)
    if not name or not _is_of_this_process(expr):
        return None
    return next((value(rank) for pattern, value in _PATTERNS if pattern.match(name)), None)


def value_of_variable(name: str, rank: int) -> str | None:
    """Return the value of an environment variable on a rank, None if launchers do not set it."""
    return str(_VARIABLES[name](rank)) if name in _VARIABLES else None


def last_name(expr: ast.expr) -> str:
    """Return the last part of a dotted name, "" for what is none."""
    if isinstance(expr, ast.Attribute):
        return expr.attr
    return expr.id if isinstance(expr, ast.Name) else ""


def _is_of_this_process(expr: ast.expr) -> bool:
    if not isinstance(expr, ast.Attribute):
        return True
    owner = expr.value.func if isinstance(expr.value, ast.Call) else expr.value
    return bool(_OWNERS.match(last_name(owner)))
