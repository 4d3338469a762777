"""HNG001: a rank raised an exception, and the others wait for it or fail in consequence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from distdiag.checks.base import Check
from distdiag.checks.shared import endings
from distdiag.checks.shared.failures import (
    FirstEnd,
    first_end,
    is_interruption,
    known_fault_of,
    last_word,
    waited_for,
    was_setting_up,
)
from distdiag.events.ranks import RankSet
from distdiag.findings.descriptions import (
    at,
    blocking_call,
    call_location,
    call_phrase,
    cause_line,
    raised_phrase,
    user_location,
    whereabouts,
    who,
)
from distdiag.findings.finding import Evidence, Finding, Grade, Location, Severity
from distdiag.record.exception_text import LONGEST_TRACEBACK, first_of_chain, shortened
from distdiag.views.alignment import OpenCollective
from distdiag.views.rank_states import JobView, RankState, RankStatus

_WHY_ALL = (
    "Every rank raised at the same line. The cause is in the program, or in the input that all "
    "ranks share, and not in how the ranks work together."
)
_WHY_SETUP = (
    "This rank never joined the job: it could not reach the store of the job, or the other ranks "
    "did not come. Ranks that were there waited in vain, or the launcher stopped them."
)
_FIX_SETUP = (
    "Give all ranks the same `MASTER_ADDR`, `MASTER_PORT` and world size, and make sure that this "
    "rank can reach rank 0 there (`nc -vz $MASTER_ADDR $MASTER_PORT`). Then look at where the "
    "other ranks were."
)
_WHY_SEEN = (
    "Nothing caught this exception, and it ended the process. The files that were read show no "
    "other rank, or nothing that came earlier."
)
_WHY_LAST = (
    "This error says that another rank was gone or did not come. It is a consequence, and the "
    "files that were read do not show its cause. It was the first error of this kind."
)
_FIX_LAST = (
    "Read what the other ranks wrote before this error, and what the launcher, the scheduler and "
    "the kernel say of their processes. Next time, keep the output of each rank (`torchrun "
    "--log-dir DIR --redirects 3`) and set `TORCH_NCCL_TRACE_BUFFER_SIZE=2000` and "
    "`TORCH_NCCL_DUMP_ON_TIMEOUT=1`."
)
_SIZES = re.compile(
    r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)"
    r"|Expected size (\d+) but got size (\d+)"
    r"|batch_size \((\d+)\) to match target batch_size \((\d+)\)"
    r"|\(\d+x(\d+) and (\d+)x\d+\)"
)
"""How torch says that two sizes should be equal and are not."""
_MOST_TOLD = 160
"""As many characters are told of the exception that came before another one."""
_GATHERS = ("all_gather", "gather")
_GATHERED = "; one size is the other times the number of ranks of the gather{}"
_WHY_GATHERED = (
    "A gather came right before this error, and one size is wrong by exactly the number of ranks. "
    "The parts were probably concatenated along a different dimension than the one that was "
    "split, or not concatenated at all."
)
_FIX_GATHERED = (
    "Concatenate the gathered parts along the dimension along which the ranks split the tensor."
)
_FIX_ALL = "Fix what the exception says. The script on one rank alone should raise it as well."


class RankRaised(Check[OpenCollective | JobView]):
    """A rank raised an exception, and the others wait for it or fail in consequence.

    ## What you see
    This exception came first. The other ranks wait, are stopped by the launcher, or raise errors
    about lost connections: these are consequences, and they hide the cause in the log.

    ## Example
        # wrong: a rank without tokens fails, and the others wait in the all_reduce
        loss = per_token.view(-1, 8).mean()
        dist.all_reduce(loss)

        # right: an empty batch is allowed on a rank
        loss = per_token.view(-1, 8).mean() if per_token.numel() else per_token.sum()
        dist.all_reduce(loss)

    ## How to fix
    Fix what this exception says on this rank. If the other ranks run the same line without an
    error, compare the data or the shard of this rank with theirs.

    Changes: The other ranks' errors about connections and timeouts disappear as well.

    Leaves: Exceptions that other ranks would have met later by themselves.

    ## When it is not a defect
    Another rank has an earlier exception that is not about a connection or a timeout.

    To silence it, set `ignore = ["HNG001"]` in `distdiag.toml`.

    ## References
    - https://github.com/NVIDIA/Megatron-LM/issues/1877
    - https://github.com/hiyouga/EasyR1/issues/11012
    - https://docs.pytorch.org/docs/stable/elastic/errors.html
    """

    code = "HNG001"
    name = "rank-raised"
    severity = Severity.ERROR

    def check(self, view: OpenCollective | JobView) -> Iterator[Finding]:
        """Name the first exception, at once when others wait for the rank that raised it."""
        states = view.states
        if isinstance(view, OpenCollective):
            missing = view.missing_ranks & states.keys()
            if not any(states[rank].status is RankStatus.RAISED for rank in missing):
                return
        end = first_end(states)
        if end is None and isinstance(view, JobView) and view.is_unexplained:
            yield from self._last_word(states)
        if end is None or states[min(end.ranks)].raised is None:
            return
        others = RankSet(states.keys() - end.ranks)
        if any(_may_raise_too(states[rank]) for rank in others):
            return
        yield self._first(end.ranks, end, states)
        for ranks in end.tied:
            yield self._first(ranks, end, states)

    def _first(self, first: RankSet, end: FirstEnd, states: Mapping[int, RankState]) -> Finding:
        state = states[min(first)]
        others = RankSet(states.keys() - first)
        is_whole = not state.is_reported_only  # else more ranks may have been there
        is_everybody = not others and len(first) > 1
        fault = known_fault_of(state)
        is_own = fault is None or fault.whose == "program"
        gathered = _gathered(state)
        is_program = not others and is_whole and is_own and gathered is None
        is_note = is_program or end.is_outside or is_interruption(state)
        is_sure = others and not end.tied
        why, fix = self._texts(state, is_everybody=is_everybody, has_others=bool(others))
        if fault is not None:
            why, fix = fault.cause, fault.fix
        elif gathered is not None:
            why, fix = _WHY_GATHERED, _FIX_GATHERED
        location = _line(state)
        subject = f"all {len(first)} ranks" if is_everybody and is_whole else who(first, states)
        after = who(others - RankSet(r for t in end.tied for r in t), states) if others else ""
        return self.finding(
            f"{subject} raised {raised_phrase(state)}{at(location)}{_after(state)}"
            + (f", before {after} failed or waited in vain" if after and not end.tied else "")
            + (f": {fault.title} (known fault {fault.id})" if fault is not None else "")
            + (_GATHERED.format(at(gathered.location)) if gathered is not None else ""),
            # Who says that others did not come is a victim.
            ranks=RankSet() if fault is not None and fault.blames == "others" else first,
            step=state.step,
            location=location,
            grade=Grade.NOTE if is_note else Grade.PROVEN if is_sure else Grade.LIKELY,
            confidence=0.95 if is_sure or is_note else 0.85,
            evidence=(
                *_raised_evidence(states[rank] for rank in first),
                *((fault.evidence(first),) if fault is not None else ()),
                *((gathered,) if gathered is not None else ()),
                *(_evidence(states[rank]) for rank in others),
            ),
            why=why,
            fix=fix,
        )

    def _texts(self, state: RankState, *, is_everybody: bool, has_others: bool) -> tuple[str, str]:
        if was_setting_up(state):
            return _WHY_SETUP, _FIX_SETUP
        if state.raised is not None and "/dev/shm/" in cause_line(state.raised.message):
            return endings.SHARED_MEMORY
        if is_everybody:
            return _WHY_ALL, _FIX_ALL
        if not has_others and state.is_reported_only:
            return _WHY_SEEN, self.fix
        return self.why, self.fix

    def _last_word(self, states: Mapping[int, RankState]) -> Iterator[Finding]:
        """Name the first that failed for want of a peer, where nothing else is known."""
        end = last_word(states)
        if end is None or states[min(end.ranks)].raised is None:
            return
        state = states[min(end.ranks)]
        location, fault = _line(state), known_fault_of(state)
        is_told = fault is not None and fault.role != "consequence"
        peer = waited_for(state.raised.message) if state.raised is not None else None
        lost = "lost a peer, and no record says which"
        if peer is not None:
            lost = f"waited in vain for rank {peer} of its group"
        yield self.finding(
            f"{who(end.ranks, states)} raised {raised_phrase(state)}{at(location)}: {fault.title} "
            f"(known fault {fault.id})"
            + (f"; it waited for rank {peer} of its group" if peer is not None else "")
            if fault is not None and is_told
            else f"{who(end.ranks, states)} {lost}: {raised_phrase(state)}{at(location)}",
            ranks=RankSet(),
            step=state.step,
            location=location,
            severity=Severity.WARNING,
            grade=Grade.LIKELY,
            confidence=0.6,
            evidence=(
                *_raised_evidence(s for s in states.values() if s.raised is not None),
                *((fault.evidence(end.ranks),) if fault is not None else ()),
            ),
            why=fault.cause if fault is not None and is_told else _WHY_LAST,
            fix=fault.fix if fault is not None and is_told else _FIX_LAST,
        )


def _after(state: RankState) -> str:
    """Return what had led to what a rank raised, if something else did."""
    first = first_of_chain(state.raised.traceback) if state.raised is not None else ""
    if not first or first.startswith(raised_phrase(state)[:_MOST_TOLD]):
        return ""
    return f", after {first if len(first) <= _MOST_TOLD else first[: _MOST_TOLD - 1] + '…'}"


def _may_raise_too(state: RankState) -> bool:
    """Say whether a rank still runs freely, so that it may be about to raise the same."""
    is_free = state.status is RankStatus.RUNNING and blocking_call(state) is None
    return is_free and state.idle_s < 1.0 and not state.is_over


def _raised_evidence(states: Iterable[RankState]) -> Iterator[Evidence]:
    """Yield what was raised, once where several ranks raised it with the same message."""
    alike: dict[str, list[RankState]] = {}
    for state in states:
        alike.setdefault(raised_phrase(state), []).append(state)
    for phrase, each in alike.items():
        text = each[0].raised.traceback if each[0].raised is not None else ""
        yield Evidence(
            ranks=RankSet(state.rank for state in each),
            summary=f"raised {phrase}",
            location=_line(each[0]),
            values={"traceback": shortened(text, LONGEST_TRACEBACK)},
        )


def _gathered(state: RankState) -> Evidence | None:
    """Return the gather by whose ranks two sizes differ that should be equal."""
    call, raised = state.last_call, state.raised
    sizes = _SIZES.search(raised.message) if raised is not None else None
    if call is None or sizes is None or not call.signature.op.startswith(_GATHERS):
        return None
    less, more = sorted(int(each) for each in sizes.groups() if each is not None)
    num_ranks = len(call.group.ranks)
    if num_ranks < 2 or more != less * num_ranks:
        return None
    return Evidence(
        ranks=RankSet([state.rank]),
        summary=f"{more} is {less} times the {num_ranks} ranks of {call_phrase(call)}, which came "
        "right before",
        location=call_location(call),
    )


def _evidence(state: RankState) -> Evidence:
    call = blocking_call(state) or state.last_call
    location = user_location(call.site.frames) if call is not None else None
    if state.raised is not None:
        location = _line(state)
    return Evidence(ranks=RankSet([state.rank]), summary=whereabouts(state), location=location)


def _line(state: RankState) -> Location | None:
    return user_location(state.raised.frames) if state.raised is not None else None
