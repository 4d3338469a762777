"""HNG017: by their stacks, some ranks wait in a collective that the others are not in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.hng.stuck_rank import fault_on_stacks, outside_evidence
from distdiag.checks.shared.activities import doing_by_stack
from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import agree, main_stack, user_location, who
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.views.rank_states import RankState, RankStatus, StackView

_COLLECTIVE_FILES: Final = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
)
_NO_WAIT: Final = frozenset(
    {"init_process_group", "destroy_process_group", "get_rank", "is_initialized"}
)
# Functions of C++ by which a thread is in a collective. What it waits with below them, a futex or
# a condition variable, says nothing more.
_NATIVE_CALL: Final = re.compile(
    r"c10d::ProcessGroup\w*::(?P<method>[a-z]\w*)"
    r"|c10d::ops::(?:\(anonymous namespace\)::)?(?P<op>[a-z]\w*?)_?(?:CPU|CUDA|_)*$"
    r"|gloo::(?P<gloo>all\w+|barrier|broadcast|gather|reduce\w*|scatter)"
    r"|p?nccl(?P<nccl>AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|Send|Recv)"
)
_NATIVE_WAIT: Final = re.compile(
    r"c10d::(?:\w+::)*(?:Work\w*|AsyncWork)::(?:wait|synchronize)\w*|gloo::transport::.*::wait\w+"
    r"|ncclGroupEnd|ncclCommWatchdog"
)
_NO_COLLECTIVE: Final = re.compile(r"[Ww]atchdog|[Hh]eartbeat|runLoop|~ProcessGroup|abort|shutdown")
_PUBLIC: Final = {
    "allreduce": "all_reduce",
    "AllReduce": "all_reduce",
    "allgather": "all_gather",
    "AllGather": "all_gather",
    "_allgather_base": "all_gather_into_tensor",
    "ReduceScatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "Send": "send",
    "Recv": "recv",
}
_SOME_CALL: Final = "a collective"
# Functions that wait for a GPU: for whatever was queued on it, a collective or a kernel.
_DEVICE_FILES: Final = re.compile(r"torch(?:_npu)?/(?:cuda|xpu|npu)/(?:__init__|streams|utils)\.py")
_DEVICE_CALL: Final = re.compile(r"(?:cu|cuda|hip)(?:Stream|Device|Event|Ctx)Synchronize")
_DEVICE: Final = "a synchronisation with its GPU"
LEAST_RANKS: Final = 3
"""With fewer there is no majority that one rank could have left."""


@dataclass(frozen=True, slots=True)
class Standpoint:
    """Where some ranks stand: in the function `call` of torch (None: in none), at `location`."""

    call: str | None
    location: Location | None
    ranks: RankSet

    def __str__(self) -> str:
        """Return it as the end of ``rank 3 …``."""
        place = f" at {self.location}" if self.location is not None else ""
        return f"waits in {self.call}{place}" if self.call else f"is{place or ' in no known line'}"


def standpoints(states: Mapping[int, RankState]) -> tuple[Standpoint, ...]:
    """Group ranks of which nothing but stacks is known by where they stand, largest group first.

    Empty if records of any rank were read: these say more.
    """
    if any(state.status is not RankStatus.SILENT for state in states.values()):
        return ()
    ranks_at: dict[tuple[str | None, Location | None], list[int]] = {}
    for rank, state in states.items():
        stack = main_stack(state.stacks)
        if stack:
            ranks_at.setdefault((_call_of(state), user_location(stack)), []).append(rank)
    found = [Standpoint(call, place, RankSet(ranks)) for (call, place), ranks in ranks_at.items()]
    return tuple(sorted(found, key=lambda each: (-len(each.ranks), min(each.ranks))))


def _call_of(state: RankState) -> str | None:
    """Return the function of torch.distributed that a rank is in, if it is in one.

    A backward pass makes its collectives in the threads of autograd, for which the main thread
    waits.
    """
    stack = main_stack(state.stacks)
    if (call := _call_in(stack)) is not None or state.stacks is None:
        return call
    if _waits_for_device(stack):
        return _DEVICE
    if not any(frame.function == "_engine_run_backward" for frame in stack):
        return None
    others = (_call_in(thread.frames) for thread in state.stacks.threads)
    return next((call for call in others if call is not None), None)


def _call_in(stack: tuple[Frame, ...]) -> str | None:
    """Return the public function of torch.distributed that a stack is inside of."""
    for frame in reversed(stack):
        if frame.file.replace("\\", "/").endswith(_COLLECTIVE_FILES):
            name = frame.function
            if not name.startswith("_") and name not in _NO_WAIT and name != "wrapper":
                return name
    native = [frame.function for frame in stack if not frame.user and "::" in frame.function]
    native += [frame.function for frame in stack if "nccl" in frame.function]
    if any(_NO_COLLECTIVE.search(name) for name in native):
        return None
    calls = (match for name in native if (match := _NATIVE_CALL.search(name)) is not None)
    names = [name for match in calls for name in match.groups() if name]
    if names:
        return next((_PUBLIC[name] for name in names if name in _PUBLIC), names[-1])
    return _SOME_CALL if any(_NATIVE_WAIT.search(name) for name in native) else None


def _waits_for_device(stack: tuple[Frame, ...]) -> bool:
    if any(_DEVICE_CALL.search(frame.function) for frame in stack if not frame.user):
        return True
    inner = stack[0] if stack else None
    if inner is None or inner.function != "synchronize":
        return False
    return _DEVICE_FILES.search(inner.file.replace("\\", "/")) is not None


class PartedStacks(Check[StackView]):
    """By their stacks, some ranks wait in a collective that the others are not in.

    ## What you see
    Some ranks wait inside a function of torch.distributed, and the other ranks are elsewhere. Those
    elsewhere probably keep the waiting ranks waiting, but one sample of the stacks cannot tell a
    wait from a short moment.

    Ranks that wait for their GPU are mentioned but not named as culprits: they may be waiting for
    other ranks, or other ranks for them.

    ## Example
        # wrong: seven ranks are in the all_reduce, rank 3 is in an evaluation of its own
        if loss < best:
            evaluate(model)
        dist.all_reduce(loss)

        # right: all ranks evaluate, or none
        dist.all_reduce(loss)
        if loss < best:
            evaluate(model)

    ## How to fix
    Look at the line where the named rank is, and take a second dump (`distdiag dump`). If the rank
    has not moved, free what it waits for at that line. Or, if it took another branch than the other
    ranks, let all ranks take the same branch.

    Changes: Nothing by itself: this tells where to look.

    Leaves: Which call is missing: run the job under distdiag.check to see it.

    ## When it is not a defect
    A second dump shows the ranks at other lines: the job continues.

    To silence it, set `ignore = ["HNG017"]` in `distdiag.toml`.

    ## References
    - https://github.com/benfred/py-spy
    """

    code = "HNG017"
    name = "parted-stacks"
    severity = Severity.WARNING

    def check(self, view: StackView) -> Iterator[Finding]:
        """Name the ranks that are in no call while others are, or the fewer that are in another."""
        states = view.states
        all_places = standpoints(states)
        # Who waits for its GPU may do so for the others, or they for it.
        places = [place for place in all_places if place.call != _DEVICE]
        waiting = [place for place in places if place.call is not None]
        odd = [place for place in places if place.call is None] or _fewest(waiting)
        is_alike = not waiting and _is_one_apart(places)
        if is_alike:
            odd = list(places[1:])
        elif not waiting or not odd:
            if waiting and len(all_places) > len(places):
                yield self._beside_devices(all_places, states)
            return
        ranks = RankSet(rank for place in odd for rank in place.ranks)
        doing = doing_by_stack(states[min(odd[0].ranks)])
        sign = f" ({doing.activity}, {doing.sign})" if doing is not None else ""
        others = [place for place in all_places if place not in odd]
        fault = next(filter(None, (fault_on_stacks(states[rank]) for rank in ranks)), None)
        yield self.finding(
            f"{_listed(odd[:1], states)}{sign}, while {_listed([*others, *odd[1:]], states)}",
            ranks=ranks,
            location=odd[0].location,
            grade=Grade.NOTE if is_alike else Grade.LIKELY,
            confidence=0.4 if is_alike else 0.7 if 2 * len(ranks) < len(states) else 0.5,
            evidence=tuple(
                Evidence(ranks=place.ranks, summary=str(place), location=place.location)
                for place in (*odd, *others)
            )
            + outside_evidence(states, ranks),
            why=fault.cause if fault is not None else self.why,
            fix=fault.fix if fault is not None else self.fix,
        )

    def _beside_devices(
        self, places: Sequence[Standpoint], states: Mapping[int, RankState]
    ) -> Finding:
        """Tell who waits for a GPU and who in a collective; nobody is known to be late."""
        return self.finding(
            _listed(places, states),
            ranks=RankSet(),
            grade=Grade.NOTE,
            confidence=0.3,
            evidence=tuple(
                Evidence(ranks=place.ranks, summary=str(place), location=place.location)
                for place in places
            ),
        )


def _is_one_apart(places: Sequence[Standpoint]) -> bool:
    """Say whether all ranks but fewer than half stand at one line of the program."""
    num_ranks = sum(len(place.ranks) for place in places)
    is_there = len(places) > 1 and places[0].location is not None
    return is_there and num_ranks >= LEAST_RANKS and 2 * len(places[0].ranks) > num_ranks


def _fewest(waiting: Sequence[Standpoint]) -> list[Standpoint]:
    """Return the calls that fewer ranks are in than in the most frequent one, all on a tie."""
    if len(waiting) < 2:
        return []
    most = len(waiting[0].ranks)
    return [place for place in waiting if len(place.ranks) < most] or list(waiting)


def _listed(places: Sequence[Standpoint], states: Mapping[int, RankState]) -> str:
    parts = [f"{who(p.ranks, states)} {agree(str(p), p.ranks)}" for p in places[:3]]
    return "; ".join(parts) + (f"; and {len(places) - 3} more places" if len(places) > 3 else "")
