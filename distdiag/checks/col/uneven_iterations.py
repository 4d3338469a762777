"""COL011: a loop with collectives runs more often on some ranks than on others."""

from collections.abc import Iterator
from typing import Final

from distdiag.checks.base import Check
from distdiag.checks.shared.culprits import (
    is_reliable,
    location_in,
    missing_evidence,
    parting_evidence,
)
from distdiag.checks.shared.explanations import UnevenLoop, explain, state_of
from distdiag.events.collectives import Collective
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import at, call_location, call_phrase, signal_name
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.source import Loop
from distdiag.views.alignment import Alignment, CollectiveView, OpenCollective
from distdiag.views.invariants import clean_module


class UnevenIterations(Check[CollectiveView | OpenCollective]):
    """A loop with collectives runs more often on some ranks than on others.

    ## What you see
    The extra pass has no partner: it hangs, or pairs with the next collective of the ranks that
    went on, and the values are wrong without an error. The number of passes depends on something
    local: the length of this rank's data, its loss, its clock, a signal that it got.

    ## Example
        # wrong: each rank stops by its own loss
        while loss > target:
            loss = train_epoch(model, loader)

        # right: the ranks decide together
        while any_rank(loss > target):  # an all_reduce of the flag with MAX
            loss = train_epoch(model, loader)

    ## How to fix
    Decide together: all_reduce the stop flag (MAX) or the number of passes before the loop, run
    masked dummy passes on ranks that are done, or bound the loop by an agreed count. For DDP,
    torch.distributed.algorithms.Join does it for uneven inputs.

    Changes: Ranks see other numbers of samples per epoch; means must weigh by sample counts.

    Leaves: Metrics that divide by a local count, which stay wrong.

    ## When it is not a defect
    The ranks' records show equally many calls from the line in the loop.

    To silence it, set `ignore = ["COL011"]` in `distdiag.toml`.

    ## References
    - https://github.com/pytorch/pytorch/issues/141069
    - https://github.com/huggingface/transformers/issues/30228
    - https://github.com/Lightning-AI/pytorch-lightning/issues/379
    - https://github.com/pytorch/torchtitan/issues/1618
    - https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html
    """

    code = "COL011"
    name = "uneven-iterations"
    severity = Severity.ERROR

    def check(self, alignment: CollectiveView | OpenCollective) -> Iterator[Finding]:
        """Judge a call in a loop that met a later call, or that some ranks never made."""
        found = explain(alignment)
        if not isinstance(found, UnevenLoop):
            return
        odd = found.stayers if len(found.stayers) < len(found.leavers) else found.leavers
        where = call_location(found.call)
        module = clean_module(found.call.site.module)
        loop = found.loop
        which = f"the loop{at(loop.location)}" if loop else "a loop"
        # Under a condition it may be that which holds more often, and not the loop that is longer.
        is_under = loop is not None and bool(loop.under)
        did = f"called {found.call.signature.op} in" if is_under else "ran"
        yield self.finding(
            f"{found.stayers.phrase()} {did} {which} more often than {found.leavers.phrase()}: "
            f"{found.leavers.phrase()} called {found.call.signature.op}{at(where)} "
            f"{_times(found.num_left)}, {found.stayers.phrase()} {_times(found.num_stayed)}"
            f"{_signal(alignment, found.leavers)}{_cleanup(found)}",
            ranks=odd,
            step=found.call.step,
            location=found.cleanup
            or (loop.deciding if loop else None)
            or location_in(found.point, odd)
            or location_in(alignment, odd)
            or where,
            subjects=(module,) if module else (),
            grade=Grade.PROVEN if is_reliable(alignment) else Grade.NOTE,
            confidence=0.9,
            evidence=(
                Evidence(
                    ranks=found.stayers,
                    summary=f"is in {call_phrase(found.call)}, call {found.num_stayed} from here",
                    location=where,
                    values={"step": found.call.step},
                ),
                *_left(found, alignment),
                *_conditions(found),
                *missing_evidence(alignment),
                *parting_evidence(alignment),
            ),
            fix=_fix_of_cleanup(found) or _fix(loop) or self.fix,
        )


def _cleanup(found: UnevenLoop) -> str:
    if found.cleanup is None:
        return ""
    return f", which went on in a `finally` or `except` at {found.cleanup}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _fix_of_cleanup(found: UnevenLoop) -> str:
    """Return what to do where an exception may have ended the loop."""
    if found.cleanup is None:
        return ""
    return (
        f"Look for an exception in the log of {found.leavers.phrase()}: the next call there is in "
        f"a `finally` or `except` (line {found.cleanup.line}) around the loop. Call no collective "
        "there, since the other ranks do not come to it: log the exception, and let the process "
        "end with it."
    )


def _fix(loop: Loop | None) -> str:
    """Return what to do about a loop whose source is known."""
    if loop is None:
        return ""
    line = loop.location.line
    if loop.under:
        guard = loop.under[-1]
        return (
            f"Find out why `{guard.text}` (line {guard.location.line}) holds on some ranks only. "
            f"Let all ranks decide alike: all_reduce the condition before, or use a value that is "
            f"the same on all ranks, such as the number of the pass. {_OF_ITEMS}"
        )
    if loop.handlers and not loop.is_decided:
        where = loop.handlers[0]
        return (
            f"Look whether `{where.source}` (line {where.line}) has caught an exception on some "
            "ranks only: they leave out the collectives of that pass. Log it there. Let all ranks "
            "skip a pass together: all_reduce a flag before the collectives, and let nothing "
            f"between them raise. If none was caught, give the loop in line {line} equally many "
            "items on all ranks."
        )
    if loop.exit is not None:
        return (
            f"Let all ranks leave the loop together: all_reduce the condition "
            f"`{loop.exit.text}` of line {loop.exit.location.line} (MAX) before it is tested."
        )
    if loop.test:
        return (
            f"Let all ranks leave the loop together: all_reduce the condition `{loop.test}` of "
            f"line {line} (MAX) in each pass."
        )
    if loop.caught is not None:
        return (
            f"Look for an exception that `{loop.caught.text}` (line {loop.caught.location.line}) "
            "catches on some ranks only, which leaves the loop there. Let the process end with it. "
            "Or let all ranks agree after each pass whether one of them has failed."
        )
    return (
        f"Give the loop in line {line} equally many items on all ranks: a DistributedSampler, "
        f"drop_last=True, or the smallest number of batches (an all_reduce with MIN). Under DDP, "
        f"`with Join([model]):` (torch.distributed.algorithms) lets ranks with fewer items wait."
    )


_OF_ITEMS: Final = (
    "If the ranks have different numbers of items, make them equal (DistributedSampler, "
    "drop_last=True)."
)


def _conditions(found: UnevenLoop) -> Iterator[Evidence]:
    if found.loop is None:
        return
    if found.loop.exit is not None:
        yield Evidence(
            ranks=found.leavers,
            summary=f"leaves the loop if `{found.loop.exit.text}`",
            location=found.loop.exit.location,
        )
    elif found.loop.caught is not None:
        yield Evidence(
            ranks=found.leavers,
            summary=f"leaves the loop in `{found.loop.caught.text}` if an exception is raised",
            location=found.loop.caught.location,
        )
    for handler in found.loop.handlers:
        yield Evidence(
            ranks=RankSet(found.stayers | found.leavers),
            summary="an exception that is caught here leaves out the call, on the rank that has "
            "it alone",
            location=handler,
        )
    for guard in found.loop.under:
        yield Evidence(
            ranks=RankSet(found.stayers | found.leavers),
            summary=f"in the loop the call stands under `{guard.text}`",
            location=guard.location,
        )


def _left(found: UnevenLoop, alignment: Alignment[Collective]) -> Iterator[Evidence]:
    summary = f"made {found.num_left} calls from there"
    rank = min(found.leavers)
    call = found.point.by_rank.get(rank)
    calls = [*state_of(alignment, rank).recent] if call is None else [call]
    here = [each for each in calls if each.group == found.call.group]
    if call is not None:
        summary += f", then went on to {call_phrase(call)}"
    yield Evidence(
        ranks=found.leavers,
        summary=summary,
        location=call_location(call) if call is not None else None,
        # Its last call before this point, or the one that it made instead: not what came later.
        values={"step": here[-1].step} if here else {},
    )


def _signal(alignment: Alignment[Collective], leavers: RankSet) -> str:
    signals = [state_of(alignment, rank).signalled for rank in leavers]
    names = sorted({signal_name(signal.signal) for signal in signals if signal is not None})
    return f", which had received {', '.join(names)}" if names else ""
