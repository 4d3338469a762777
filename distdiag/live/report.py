"""The report on a job of which there is nothing but the stacks of its ranks."""

from collections.abc import Mapping
from datetime import UTC, datetime

from distdiag.checks import load_checks
from distdiag.engine import Engine
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Outcome, RankInfo, Report, Run
from distdiag.live.job_dump import JobDump, RankStacks
from distdiag.record.redaction import redacted
from distdiag.views.rank_states import RankState, StackView


def report_of(dump: JobDump) -> Report:
    """Return what the checks found that need nothing but stacks, and which ones need more.

    A check takes part when it judges a `StackView`; the others would take a rank without events
    for one that was never heard of.
    """
    catalogue = load_checks()
    able = {code: check for code, check in catalogue.items() if StackView in check.views}
    engine = Engine([check() for check in able.values()], RankSet(dump.ranks))
    for event in dump.events():
        engine.feed(event)
    engine.finish()
    unable = {code: "needs more than stacks" for code in catalogue if code not in able}
    states = engine.states()
    return Report(
        complete=True,
        run=Run(
            id=dump.job,
            command=tuple(redacted(next(stacks.who.command for stacks in dump.ranks.values()))),
            world_size=dump.world_size,
            ranks=tuple(_rank_info(stacks, states) for stacks in dump.ranks.values()),
            torch="",
            started=datetime.now(UTC).isoformat(timespec="milliseconds"),
            ended=None,
            outcome=Outcome.RUNNING,
        ),
        findings=engine.findings,
        checked=engine.checked,
        not_checked=unable | engine.not_checked,
        silent_ranks=dump.absent,
    )


def _rank_info(stacks: RankStacks, states: Mapping[int, RankState]) -> RankInfo:
    who = stacks.who
    return RankInfo(
        rank=who.rank,
        local_rank=who.local_rank,
        world_size=who.world_size,
        hostname=who.hostname,
        pid=who.pid,
        fate=states[who.rank].status,
    )
