"""Which process groups were used meanwhile, by how far their own counters have come."""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from distdiag.probes.untyped import Untyped


class UsedGroups:
    """Remembers the counters of all process groups of this rank."""

    def __init__(self) -> None:
        self._before = _counters()

    def members(self) -> tuple[int, ...]:
        """Return the ranks of the group that was used since, in its order; none if none was.

        Raises:
            ValueError: several were used, and nothing tells which of them is meant.

        """
        after = _counters()
        used = [group for group, count in after.items() if count != self._before.get(group, 0)]
        ranks = {tuple(dist.get_process_group_ranks(group)) for group in used}
        if len(ranks) > 1:
            raise ValueError(
                "several process groups were used: name the `group` whose ranks share a sequence"
            )
        return ranks.pop() if ranks else ()


def ranks_of(group: Untyped) -> tuple[int, ...]:
    """Return the global ranks of a process group, a mesh, a list, or what a function returns."""
    if callable(group) and not hasattr(group, "get_group"):
        group = group()
    if isinstance(group, list | tuple):
        return tuple(map(int, group))
    if hasattr(group, "mesh"):
        return tuple(int(rank) for rank in group.mesh.flatten().tolist())
    return tuple(dist.get_process_group_ranks(group))


def _counters() -> dict[Any, int]:
    counters: dict[Any, int] = {}
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        try:
            counters[group] = group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
    return counters
