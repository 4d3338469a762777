"""HNG015: a rank is slow, and the others wait for it."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import blame_missing, location_in, missing_evidence, step_of
from distdiag.checks.shared.explanations import explain, state_of
from distdiag.checks.shared.stuck import activity_of_missing, is_late
from distdiag.findings.descriptions import agree, at, call_location, call_phrase, idle_phrase
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.views.alignment import OpenCollective


class Straggler(Check[OpenCollective]):
    """A rank is slow, and the others wait for it.

    ## What you see
    Each step takes as long as the slowest rank, and the other ranks are idle meanwhile. If the slow
    rank takes too long, the other ranks run into the timeout of their process group.

    ## Example
        # wrong: the rank with the longest document tokenizes for minutes
        shard = documents[rank::world_size]

        # right: equal work for each rank
        shard = balance(documents, key=len, parts=world_size)[rank]

    ## How to fix
    Give all ranks equal work at the line where the slow rank computes. Or let the other ranks do
    useful work meanwhile.

    Changes: The order or the grouping of samples, if those are balanced.

    Leaves: Ranks that are slow because of their hardware.

    ## When it is not a defect
    The rank uses no processor time: then it is stuck, and not slow.

    It is always a note, as the rank will come. To silence it, set `ignore = ["HNG015"]` in
    `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group
    """

    code = "HNG015"
    name = "straggler"
    severity = Severity.INFO

    def check(self, alignment: OpenCollective) -> Iterator[Finding]:
        """Judge a collective whose missing ranks all work."""
        if alignment.kind != "collective" or not is_late(alignment):
            return
        if explain(alignment) is not None or activity_of_missing(alignment) is not None:
            return
        culprits = blame_missing(alignment).culprits
        state, call = state_of(alignment, min(culprits)), alignment.any_event
        location, waiting = location_in(alignment, culprits), alignment.present_ranks
        yield self.finding(
            f"{culprits.phrase()} {agree('has been computing', culprits)}{at(location)}"
            f"{idle_phrase(state)} while {waiting.phrase()} {agree('waits', waiting)} in "
            f"{call_phrase(call)}{at(call_location(call))}",
            ranks=culprits,
            step=step_of(alignment, culprits),
            location=location,
            grade=Grade.NOTE,
            confidence=0.6,
            evidence=(
                Evidence(
                    ranks=waiting,
                    summary=f"waits in {call_phrase(call)}",
                    location=call_location(call),
                ),
                *missing_evidence(alignment),
            ),
        )
