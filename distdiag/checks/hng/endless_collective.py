"""HNG016: all ranks are in the same collective, and it does not end."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.hng.stuck_rank import outside_evidence
from distdiag.checks.shared.stuck import odd_ranks
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, blocking_call, call_location, call_phrase
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.rank_states import JobView


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
        calls = [call for rank in ranks if (call := blocking_call(states[rank])) is not None]
        if not calls or len(calls) < len(ranks) or len({_key(call) for call in calls}) > 1:
            return
        call = calls[0]
        yield self.finding(
            f"{ranks.phrase()} wait in {call_phrase(call)}{at(call_location(call))}, all with "
            f"matching arguments, and it has not ended for {states[call.rank].idle_s:.0f} s",
            ranks=ranks,
            step=call.step,
            location=call_location(call),
            subjects=(call.group.label,),
            grade=Grade.LIKELY,
            confidence=0.7,
            evidence=(
                Evidence(
                    ranks=RankSet(ranks),
                    summary=f"waits in {call_phrase(call)}",
                    location=call_location(call),
                ),
                *outside_evidence(states, ranks),
            ),
        )


def _key(call: Collective) -> tuple[object, ...]:
    return (call.group.name, call.group.generation, call.collective_seq_id)
