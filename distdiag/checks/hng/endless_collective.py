"""HNG016: all ranks are in the same collective, and it does not end."""

from collections.abc import Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.checks.hng.stuck_rank import outside_evidence
from distdiag.checks.shared.stuck import odd_ranks
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    agree,
    at,
    blocking_call,
    call_location,
    call_phrase,
    idle_phrase,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.rank_states import JobView, RankState

_WHY_OF_RECORDS = (
    "All ranks that left a record made this call with matching arguments, so none of these ranks "
    "is known to be at fault. Suspect a rank without a record first, then the network, then a GPU "
    "that has failed or is still busy with earlier work."
)
_FIX_OF_RECORDS = (
    "Look for ranks that wrote nothing at all, then check the kernel log (`dmesg | grep Xid`) and "
    "the links of the nodes. For the next run set `TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and "
    "`TORCH_NCCL_DUMP_ON_TIMEOUT=1`, and run `distdiag dump` while the job hangs."
)
_WHY_BLOCKED = (
    "All ranks have issued this call, but only the GPUs of some ranks have begun it, and these "
    "wait. On the GPUs of the other ranks earlier work blocks the stream: a kernel, a copy or "
    "another collective does not end, or the stream waits for an event of another stream."
)
_FIX_BLOCKED = (
    "Issue the collectives of different groups in the same order on every rank. If the order is "
    "the same already, look for a kernel that these ranks issued before this call and that does "
    "not end (`CUDA_LAUNCH_BLOCKING=1`, `py-spy dump --native --pid PID`)."
)
MOST_TOLD = 3
"""So many ranks are told with their calls."""


class EndlessCollective(Check[JobView]):
    """All ranks are in the same collective, and it does not end.

    ## What you see
    The job hangs in a call that every rank has made with matching arguments. The transfer itself is
    stuck: the network, a GPU or its driver (a GPU may have fallen off the bus). The program is not
    to blame.

    Flight recorders may tell which GPUs have begun the call. If some have not, the finding names
    them: earlier work on their streams does not end.

    ## Example
        # wrong: one broken link among the nodes of the job
        torchrun --nnodes 4 --nproc-per-node 8 train.py

        # right: find the node with the collective benchmark, and leave it out
        mpirun -H node1:8,node2:8 all_reduce_perf -b 8 -e 1G -g 1
        torchrun --nnodes 3 --nproc-per-node 8 train.py

    ## How to fix
    Check the GPUs, the links and the kernel log (`dmesg | grep Xid`) of the nodes in the evidence.
    Then run the same collective without your program (`all_reduce_perf` of nccl-tests) on these
    nodes, leave out one node at a time, and start the job without the broken node.

    Changes: The set of nodes that the job runs on.

    Leaves: Other jobs on the broken node.

    ## When it is not a defect
    The collective ends by itself, or a rank's stack shows that this rank never issued the call.

    To silence it, set `ignore = ["HNG016"]` in `distdiag.toml`.

    ## References
    - https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    - https://docs.nvidia.com/deploy/xid-errors/index.html
    - https://github.com/NVIDIA/nccl-tests
    """

    code = "HNG016"
    name = "endless-collective"
    severity = Severity.ERROR

    def check(self, view: JobView) -> Iterator[Finding]:
        """Judge a job that stands still with all its ranks in one call."""
        states = view.states
        ranks = odd_ranks(states)
        found = {rank: call for rank in ranks if (call := blocking_call(states[rank])) is not None}
        calls = list(found.values())
        if not calls:
            return
        if len({_key(call) for call in calls}) > 1:
            if _wait_for_one_another(found, states):
                yield self._crossed(found, states)
            return
        call = calls[0]
        if not all(rank in found or states[rank].has_reached(call) for rank in ranks):
            return
        blocked = RankSet(rank for rank in ranks if states[rank].has_begun(call) is False)
        if blocked and any(states[rank].has_begun(call) for rank in ranks):
            yield self._blocked(call, RankSet(ranks - blocked), blocked, states)
            return
        absent = RankSet(set(call.group.ranks) - states.keys())
        if 0 < len(absent) < len(ranks):
            return  # COL001 reports that
        unread = f"; {absent.phrase()} left no record" if absent else ""
        is_from_outside = bool(states[call.rank].progress)
        # How many ranks there were is not known where one alone was heard of.
        is_note = bool(absent) or (is_from_outside and len(ranks) == 1)
        alike = ", all with matching arguments" if len(calls) > 1 else ""
        yield self.finding(
            f"{ranks.phrase()} {agree('waits', ranks)} in {call_phrase(call)}"
            f"{at(call_location(call))}{alike}, and the call has not ended"
            f"{idle_phrase(states[call.rank])}{unread}",
            ranks=RankSet(),  # they are those that wait; who keeps them waiting is not known
            step=call.step,
            location=call_location(call),
            subjects=(call.group.label,),
            grade=Grade.NOTE if is_note else Grade.LIKELY,
            confidence=0.4 if is_note else 0.7,
            evidence=(
                Evidence(
                    ranks=RankSet(ranks),
                    summary=f"waits in {call_phrase(call)}",
                    location=call_location(call),
                ),
                *outside_evidence(states, ranks),
            ),
            why=_WHY_OF_RECORDS if is_from_outside else self.why,
            fix=_FIX_OF_RECORDS if is_from_outside else self.fix,
        )

    def _crossed(self, calls: Mapping[int, Collective], states: Mapping[int, RankState]) -> Finding:
        """Name ranks whose GPUs each wait in a call that the GPU of another has not begun."""
        each = [
            f"the GPU of rank {rank} is in {call_phrase(call)}{at(call_location(call))}"
            for rank, call in list(calls.items())[:MOST_TOLD]
        ]
        more = f", and {len(calls) - MOST_TOLD} more" if len(calls) > MOST_TOLD else ""
        call = calls[min(calls)]
        return self.finding(
            f"GPUs wait for one another: {', '.join(each)}{more}; all ranks have issued these "
            "calls, but in different orders or on streams that wait for one another",
            ranks=RankSet(calls),
            step=call.step,
            location=call_location(call),
            grade=Grade.LIKELY,
            confidence=0.7,
            evidence=tuple(
                Evidence(
                    ranks=RankSet([rank]),
                    summary=f"its GPU is in {call_phrase(own)}",
                    location=call_location(own),
                )
                for rank, own in calls.items()
            )
            + outside_evidence(states, RankSet(calls)),
            why=_WHY_BLOCKED,
            fix=_FIX_BLOCKED,
        )

    def _blocked(
        self,
        call: Collective,
        begun: RankSet,
        blocked: RankSet,
        states: Mapping[int, RankState],
    ) -> Finding:
        """Name the ranks whose GPUs have not come to the call in which the others' wait."""
        is_one_side = len(blocked) < len(begun)
        return self.finding(
            f"the GPU of {blocked.phrase()} has not begun {call_phrase(call)}"
            f"{at(call_location(call))}, in which {begun.phrase()} {agree('waits', begun)}"
            f"{idle_phrase(states[call.rank])}: earlier work on its stream does not end",
            ranks=blocked,
            step=call.step,
            location=call_location(call),
            subjects=(call.group.label,),
            grade=Grade.LIKELY,
            confidence=0.7 if is_one_side else 0.5,
            evidence=(
                Evidence(
                    ranks=blocked,
                    summary=f"issued {call_phrase(call)}, but its GPU has not begun the call",
                ),
                Evidence(
                    ranks=begun,
                    summary=f"waits in {call_phrase(call)}",
                    location=call_location(call),
                ),
                *outside_evidence(states, RankSet(begun | blocked)),
            ),
            why=_WHY_BLOCKED,
            fix=_FIX_BLOCKED,
        )


def _wait_for_one_another(calls: Mapping[int, Collective], states: Mapping[int, RankState]) -> bool:
    """Say whether the GPU of each rank waits in a call which that of some other has not begun."""
    return all(
        states[rank].has_begun(call)
        and any(states[other].has_begun(call) is False for other in calls)
        for rank, call in calls.items()
    )


def _key(call: Collective) -> tuple[object, ...]:
    return (call.group.name, call.group.generation, call.collective_seq_id)
