"""HNG016: all ranks are in the same collective, and it does not end."""

from __future__ import annotations

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

    ## What it detects
    Every rank of the job has called the same collective, with arguments that fit together, and
    nothing has moved for the hang threshold. The program is not to blame then: the network, a GPU,
    or the library between them is. The evidence shows what the GPUs and the library say.

    ## Why it matters
    People look for a mistake in their code, while a cable, a switch or a GPU is broken.

    ## Example
    One GPU has fallen off the bus, and the kernels of all others wait for its data.

    ## How to fix
    Look at the GPUs and links in the evidence and at the kernel log (Xid) of the nodes; run the
    collective benchmark of the library on the same nodes; leave out one node after another.

    ## References
    - `NCCL_DEBUG=INFO`, NCCL RAS, `nvidia-smi -q`
    """

    code = "HNG016"
    name = "endless-collective"
    severity = Severity.ERROR

    why = "All ranks made the same call with fitting arguments, so the transfer itself is stuck."
    fix = (
        "Look at the GPUs, links and the kernel log of the nodes in the evidence; try the same "
        "collective without your program on the same nodes, leaving out one after another."
    )
    fix_changes = "The set of nodes that the job runs on."
    fix_leaves = "Other jobs on the broken node."
    disproof = "The collective ends by itself, or a rank's stack shows that it never issued it."

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
            f"fitting arguments, and it has not ended for {states[call.rank].idle_s:.0f} s",
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
