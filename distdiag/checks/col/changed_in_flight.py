"""COL015: what an asynchronous call sends is changed before the call is over."""

from collections.abc import Iterator

from distdiag.checks.base import Check
from distdiag.events.collectives import BufferChanged
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_location, call_phrase, user_location
from distdiag.findings.finding import Finding, Grade, Severity
from distdiag.views.rank_states import WorkView


class ChangedInFlight(Check[WorkView]):
    """A tensor is changed while an asynchronous call still sends it.

    ## What you see
    The other ranks receive a mixture of old and new values, at random, and nobody sees an error:
    from its call until its `wait()` is over, an asynchronous collective or send reads the tensor.

    ## Example
        # wrong: the second copy overwrites what the first send may not have sent yet
        works = []
        for out in outputs:
            buffer.copy_(out)
            works.append(dist.isend(buffer, 1))

        # right: a tensor for each send under way
        for out in outputs:
            works.append(dist.isend(out.clone(), 1))

    ## How to fix
    Call `work.wait()` before the tensor is changed, or give each call under way a tensor of its
    own.

    Changes: The host, or its stream, waits there, or more memory is in use.

    Leaves: Values that were already sent.

    ## When it is not a defect
    The program knows that the call was over when it changed the tensor, by a way that distdiag
    does not observe.

    On GPUs it is a note, since the stream may order the two. To silence it, set
    `ignore = ["COL015"]` in `distdiag.toml`.

    ## References
    - https://docs.pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations
    - https://github.com/NVIDIA/Megatron-LM/pull/4047
    """

    code = "COL015"
    name = "changed-in-flight"
    severity = Severity.WARNING

    def check(self, view: WorkView) -> Iterator[Finding]:
        """Judge a tensor that was changed between a call and the wait for it."""
        event = view.event
        if not isinstance(event, BufferChanged):
            return
        call = next((call for call in view.recent if call.seq == event.call), None)
        if call is None:
            return
        ranks = RankSet([event.rank])
        waited = user_location(event.site.frames)
        times = "" if event.num_changes == 1 else f" {event.num_changes} times"
        yield self.finding(
            f"{ranks.phrase()} changed the tensor of {call_phrase(call)}"
            f"{at(call_location(call))}{times} before it waited for the call",
            ranks=ranks,
            step=call.step,
            location=call_location(call),
            grade=Grade.LIKELY if event.device == "cpu" else Grade.NOTE,
            confidence=0.9,
            evidence=f"waited{at(waited)}; between the two no other wait told that it was over",
        )
