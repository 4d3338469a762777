"""HNG004: a rank fetches data while the others wait for it in a collective."""

from __future__ import annotations

from collections.abc import Iterator

from distdiag.alignment import Alignment
from distdiag.checks.base import Check
from distdiag.event import Collective, Heartbeat
from distdiag.finding import Finding, Grade, Severity
from distdiag.reasoning.culprits import (
    all_work,
    blame_missing,
    camp_evidence,
    is_reliable,
    missing_evidence,
)
from distdiag.reasoning.descriptions import (
    at,
    call_location,
    call_phrase,
    main_stack,
    user_location,
)
from distdiag.reasoning.explanations import camps_by_place, explain, is_in_dataloader, state_of


class RankInDataloader(Check):
    """A rank fetches data while the others wait for it in a collective.

    ## What it detects
    A collective in which ranks have waited for the hang threshold, and the ranks that they wait for
    are inside their data loader, by their stack or by the phase of their last heartbeat.

    ## Why it matters
    It looks like a hang of the network and is one of the data: a slow or dead file server, a worker
    process that died or deadlocked, one rank with a much larger sample.

    ## Example
    The shard of one rank lies on storage that does not answer.

    ## How to fix
    Look at the workers and the storage of the named rank. `DataLoader(timeout=...)` turns a worker
    that is stuck into an error; `num_workers=0` shows the line that it is stuck in.

    ## References
    - `torch.utils.data.DataLoader(timeout=..., num_workers=..., multiprocessing_context=...)`
    """

    code = "HNG004"
    name = "rank-in-dataloader"
    severity = Severity.WARNING
    needs = (Heartbeat, Collective)

    why = "The rank cannot come to the collective before it has its batch."
    fix = (
        "Look at the storage and the worker processes of this rank: run it with num_workers=0 to "
        "see the line, or set DataLoader(timeout=...) to make a stuck worker an error."
    )
    fix_changes = "With a timeout, a slow batch ends the run instead of holding it up."
    fix_leaves = (
        "Uneven amounts of data per rank, which end in another wait at the end of an epoch."
    )
    disproof = "The stack of the rank shows it outside of the data loader."

    def check_missing(self, alignment: Alignment[Collective]) -> Iterator[Finding]:
        """Judge a call whose missing ranks are all in their data loader."""
        if alignment.kind != "collective" or explain(alignment) is not None:
            return
        culprits = blame_missing(alignment).culprits
        if not is_in_dataloader(alignment, culprits):
            return
        call = alignment.any_event
        state = state_of(alignment, min(culprits))
        location = user_location(main_stack(state.stacks)) or call_location(call)
        is_note = all_work(alignment, culprits) or not is_reliable(alignment)
        yield self.finding(
            f"no batch has come on {culprits.phrase()} for {state.idle_s:.0f} s{at(location)}; "
            f"waiting in {call_phrase(call)}: {alignment.present_ranks.phrase()}"
            f"{at(call_location(call))}",
            ranks=culprits,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.LIKELY,
            confidence=0.4 if is_note else 0.85,
            evidence=camp_evidence(
                alignment, camps_by_place(alignment), lambda each: f"waits in {call_phrase(each)}"
            )
            + missing_evidence(alignment),
        )
