"""Verifies a program's own sequence parallelism with numbered tokens, exactly.

``verify(split, gather, length=64)`` is called on all ranks of a group at the same place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, get_args

import msgspec
import torch
import torch.distributed as dist

from distdiag.agent.agent import RankAgent
from distdiag.checks.seq.token_fault import FaultKind, TokenFault
from distdiag.checks.seq.token_trace import faults_of
from distdiag.config.subjects import Dtype, SequenceConfig
from distdiag.events.base import CallSite
from distdiag.events.errors import SequenceFaultError
from distdiag.events.ranks import RankSet
from distdiag.events.sequences import Reduction, TokenTrace
from distdiag.findings.finding import Grade
from distdiag.probes.call_sites import frames_of
from distdiag.probes.sequence.token_passes import Functions
from distdiag.probes.sequence.verify import (
    definitions,
    label_of,
    spec_of,
    trace_of,
    write_trace,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None

__all__ = ["FaultKind", "SequenceVerdict", "TokenFault", "verify"]

AnyFunction = Callable[..., Any]


class SequenceVerdict(msgspec.Struct, frozen=True):
    """What became of the tokens on the ranks that were compared; the same on all ranks."""

    faults: tuple[TokenFault, ...]
    ranks: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; notes do not count, but functions that raised do."""
        return all(
            fault.grade is Grade.NOTE and fault.kind is not FaultKind.RAISED
            for fault in self.faults
        )

    def raise_on_fault(self) -> None:
        """Raise if something is wrong.

        Raises:
            SequenceFaultError: a fault was found.

        """
        if not self.ok:
            raise SequenceFaultError(str(self))

    def __str__(self) -> str:
        if not self.faults:
            return f"the tokens of {RankSet(self.ranks).phrase()} came through as they should"
        return "\n".join(map(str, self.faults))


def verify(  # noqa: PLR0913 (all but two are keywords)
    split: AnyFunction,
    gather: AnyFunction,
    *,
    attention: AnyFunction | None = None,
    length: int,
    batch: int = 2,
    heads: int = 0,
    hidden: int = 8,
    dim: int = 1,
    group: Group = None,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    causal: bool = False,
    documents: Sequence[int] = (),
    reduction: Reduction = "",
    backward: bool = True,
    device: torch.device | str | None = None,
) -> SequenceVerdict:
    """Send numbered tokens through the functions once, and say what became of each of them.

    `split` gets the whole tensor, which is the same on all ranks, and returns this rank's part;
    `attention` gets query, key and value of that part, with queries and keys of zeros; `gather`
    makes the whole from the parts. The tensor has the dimensions batch, heads and hidden (0: none),
    with the length put in at `dim`. `documents` are the lengths of those that are packed in a row.
    `reduction` is what the program does to gradients of parameters over these ranks ("sum", "mean"
    or "none"): it decides by what gradients must be multiplied.

    This is a collective call: all ranks of `group` (None: the default group) make it. They exchange
    what they saw by one object gather. Without a `group` those ranks are compared that used one
    process group meanwhile.

    Raises:
        ValueError: the tensor would be too large, its form or dtype makes no sense, or several
            process groups were used and none is named.

    """
    trial = _Trial(
        Functions(split, gather, attention),
        _members(group),
        torch.device(device) if device is not None else _device(group),
        CallSite(frames_of(sys._getframe(1), _main_script())),
    )
    faults: list[TokenFault] = []
    for dtype in dtypes:
        config = SequenceConfig(
            length=length,
            batch=batch,
            heads=heads,
            hidden=hidden,
            dim=dim,
            dtype=_name_of(dtype),
            causal=causal,
            documents=tuple(documents),
            reduction=reduction,
            backward=backward,
        )
        faults += _compared(_exchanged(trial.run(config), group))
    return SequenceVerdict(tuple(dict.fromkeys(faults)), trial.members or _all_ranks(group))


class _Trial(NamedTuple):
    """Functions that tokens are sent through, on this rank; `site` is where the user asks for it.

    `members` are the ranks of the group, None if the functions themselves show which one they use.
    """

    functions: Functions
    members: tuple[int, ...] | None
    device: torch.device
    site: CallSite

    def run(self, config: SequenceConfig) -> TokenTrace:
        """Send tokens through once; what came of them also goes to the agent, if there is one."""
        spec = spec_of(config, 1, config.dim, self.functions)
        trace = trace_of(self.functions, spec, self.device, self.members)
        trace["functions"] = definitions(self.functions, _main_script())
        name = label_of(self.functions)
        agent = RankAgent.current
        if agent is not None and not agent.recorder.closed:
            write_trace(agent.recorder, name, self.site, trace)
        rank = dist.get_rank() if _has_group() else 0
        return TokenTrace(rank=rank, seq=0, time_ns=0, name=name, number=0, site=self.site, **trace)


def _main_script() -> str | None:
    return RankAgent.current.recorder.main_script if RankAgent.current is not None else None


def _name_of(dtype: torch.dtype) -> Dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in get_args(Dtype):
        raise ValueError(f"tokens cannot be numbered in {name}: use {', '.join(get_args(Dtype))}")
    return cast(Dtype, name)


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _process_group(group: Group) -> dist.ProcessGroup | None:
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    return group.get_group()


def _members(group: Group) -> tuple[int, ...] | None:
    return None if group is None else _all_ranks(group)


def _all_ranks(group: Group) -> tuple[int, ...]:
    if not _has_group():
        return (0,)
    return tuple(dist.get_process_group_ranks(_process_group(group)))


def _device(group: Group) -> torch.device:
    backend = str(dist.get_backend(_process_group(group))) if _has_group() else ""
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _exchanged(own: TokenTrace, group: Group) -> dict[int, TokenTrace]:
    ranks = _all_ranks(group)
    if len(ranks) == 1:
        return {own.rank: own}
    everybody: list[bytes] = [b""] * len(ranks)
    dist.all_gather_object(everybody, msgspec.msgpack.encode(own), group=_process_group(group))
    traces = [msgspec.msgpack.decode(each, type=TokenTrace) for each in everybody]
    return {trace.rank: trace for trace in traces}


def _compared(by_rank: Mapping[int, TokenTrace]) -> list[TokenFault]:
    """Compare the ranks of each group with one another."""
    faults: list[TokenFault] = []
    for members in dict.fromkeys(trace.members for trace in by_rank.values()):
        those = {rank: by_rank[rank] for rank in members if rank in by_rank}
        if all(trace.members == members for trace in those.values()):
            faults += faults_of(those)
    return faults
