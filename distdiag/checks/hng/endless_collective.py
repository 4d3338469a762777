"""HNG016: all ranks are in the same collective, and it does not end."""

from collections.abc import Iterator

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
from distdiag.views.rank_states import JobView

_WHY_OF_RECORDS = (
    "All ranks that left a record came to this call with matching arguments, so no rank of them "
    "is known to be at fault: a rank that left none is the first suspect, then the network, a GPU, "
    "or a rank whose GPU still works on what came before."
)
_FIX_OF_RECORDS = (
    "Look for ranks that said nothing at all, and at the kernel log (Xid) and the links of the "
    "nodes. For the next time set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 and "
    "TORCH_NCCL_DUMP_ON_TIMEOUT=1, and take `distdiag dump` while the job hangs."
)


class EndlessCollective(Check[JobView]):
    """All ranks are in the same collective, and it does not end.

    ## What you see
    All ranks made the same call with matching arguments, so the transfer itself is stuck: the
    network, a GPU, or the library between them, such as a GPU that has fallen off the bus. The
    program is not to blame.

    ## Example
        # wrong: one broken link among the nodes of the job
        torchrun --nnodes 4 --nproc-per-node 8 train.py

        # right: find the node with the collective benchmark, and leave it out
        mpirun -H node1:8,node2:8 all_reduce_perf -b 8 -e 1G -g 1
        torchrun --nnodes 3 --nproc-per-node 8 train.py

    ## How to fix
    Look at the GPUs, links and the kernel log (Xid) of the nodes in the evidence; try the same
    collective without your program on the same nodes, leaving out one after another.

    Changes: The set of nodes that the job runs on.

    Leaves: Other jobs on the broken node.

    ## When it is not a defect
    The collective ends by itself, or a rank's stack shows that it never issued it.

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
        if not calls or len({_key(call) for call in calls}) > 1:
            return
        call = calls[0]
        if not all(rank in found or states[rank].has_reached(call) for rank in ranks):
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
            f"{at(call_location(call))}{alike}, and it has not ended"
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


def _key(call: Collective) -> tuple[object, ...]:
    return (call.group.name, call.group.generation, call.collective_seq_id)
