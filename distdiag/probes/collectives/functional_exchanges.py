"""What a functional collective gives to other ranks, recorded as a call of a process group is."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed import distributed_c10d

from distdiag.probes.untyped import Untyped

PERMUTED: Final = "permute"
"""The name of an all-to-all by which each rank gives all that it has to one rank."""
_EXCHANGES: Final = ("all_", "reduce_scatter")


class Given(NamedTuple):
    """The name of the call, its tensors and process group, and the rank in it that gets all."""

    public: str
    tensors: Sequence[torch.Tensor]
    group: Any
    peer: int


class ExchangeLayout:
    """How to read the arguments of one operator, as the installed torch declares it."""

    def __init__(self, name: str, schema: Untyped) -> None:
        self._public = name.removesuffix("_out").removesuffix("_")
        self._names = [argument.name for argument in schema.arguments]
        self.may_exchange = name.startswith(_EXCHANGES) and "group_name" in self._names

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Say what is given to whom.

        An all-to-all may give all to one rank, or parts of unlike sizes.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        tensors = given["input"] if "input" in given else given["inputs"]
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        public, peer = self._public, -1
        if "input_split_sizes" in given:
            public, peer = _by_splits(given["input_split_sizes"], given["output_split_sizes"])
        return Given(public, tensors, _group(given["group_name"]), peer)


def _by_splits(sent: Sequence[int], received: Sequence[int]) -> tuple[str, int]:
    peers = [place for place, size in enumerate(sent) if size]
    if len(peers) == 1 and len(sent) > 1 and sum(map(bool, received)) == 1:
        return PERMUTED, peers[0]
    is_even = len({*sent, *received}) <= 1
    return "all_to_all_single" if is_even else "uneven", -1


def _group(named: Untyped) -> Untyped:
    """Return the process group: newer operators are given it, others its name."""
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    if isinstance(named, str):
        return resolve(named)
    return named if hasattr(named, "group_name") else distributed_c10d.ProcessGroup.unbox(named)
