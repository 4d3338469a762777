"""Reports as runs leave them, and strings that try to get out of the place where they are shown."""

from distdiag.events.ranks import RankSet
from distdiag.findings.finding import (
    Evidence,
    Finding,
    Grade,
    IgnoredFinding,
    Location,
    Outcome,
    RankInfo,
    Report,
    Run,
    Severity,
)
from distdiag.reports.gate import Gate


def make_run(outcome=Outcome.FINISHED, **changes):
    fields = {
        "id": "20260101-120000-1",
        "command": ("train.py", "--epochs", "3"),
        "world_size": 2,
        "ranks": tuple(
            RankInfo(rank=rank, local_rank=rank, world_size=2, hostname="node", pid=1000 + rank)
            for rank in range(2)
        ),
        "torch": "2.13.0",
        "started": "2026-01-01T12:00:00.000+00:00",
        "ended": "2026-01-01T12:00:07.000+00:00",
        "outcome": outcome,
        "exit_status": 0,
    }
    return Run(**(fields | changes))


def make_finding(**changes):
    gather = Location("train.py", 41, "train_step", "dist.all_gather(parts, batch)")
    fields = {
        "code": "COL003",
        "name": "collective-shape-mismatch",
        "severity": Severity.ERROR,
        "grade": Grade.PROVEN,
        "confidence": 0.97,
        "message": "all_gather #12 has shape [4, 8] on rank 0 and [3, 8] on rank 1",
        "ranks": RankSet({1}),
        "step": 12,
        "location": gather,
        "subjects": ("default_pg",),
        "evidence": (
            Evidence(ranks=RankSet({0}), summary="called it with [4, 8]", location=gather),
            Evidence(ranks=RankSet({1}), summary="called it with [3, 8]", location=gather),
        ),
        "why": "Every rank must pass a tensor of the same shape.",
        "fix": "Drop the last incomplete batch.",
        "fix_changes": "Some samples of each epoch are left out.",
        "fix_leaves": "All other batches.",
        "disproof": "Rank 1 passed [4, 8].",
    }
    return Finding(**(fields | changes))


def make_warning(**changes):
    return make_finding(
        **{
            "code": "COL010",
            "name": "unwaited-work",
            "severity": Severity.WARNING,
            "grade": Grade.LIKELY,
            "message": "the Work of all_reduce #3 was never waited for",
            "location": None,
            "evidence": (),
            "subjects": (),
            "ranks": RankSet(),
            **changes,
        }
    )


def make_note(**changes):
    note = {
        "severity": Severity.INFO,
        "grade": Grade.NOTE,
        "code": "REP003",
        "name": "noted",
    }
    return make_finding(**(note | changes))


def make_report(*findings, gate=None, **changes):
    fields = {
        "complete": True,
        "run": make_run(),
        "findings": findings,
        "checked": ("COL001", "COL003", "COL010"),
        "not_checked": {"MOE001": "no choice of experts was seen", "rank 3": "not observed"},
    }
    return (gate or Gate()).judged(Report(**(fields | changes)))


HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "\x1b]0;owned\x07\x1b[2J\x9b31m",
    "[bold red]x[/] [/nope] :smile:",
    "a\n::set-output name=x::y\n::add-mask::z",
    "\r\n::error file=a,line=1::fake",
    "a,b:c%0A::stop-commands::x",
    "```\n# heading\n```",
    "`` ` `` [link](https://example.org) ![i](x)",
    "| a | b |\n|---|---|",
    "@everyone #1 <!-- x",
    "]]></failure><testcase name='x'/>",
    "&lt;&amp;\x00\x08\x0b\ufffe\uffff",
    "\ud800 caf\udce9 \u202egnp.exe",
    "..\\..\\/../etc/passwd",
    "",
    " ",
    "-->",
)


def filled_with(text):
    """Return a report that holds a text wherever it can hold one."""
    place = Location(text, -3, text, text)
    finding = Finding(
        code=text,
        name=text,
        severity=Severity.ERROR,
        grade=Grade.LIKELY,
        confidence=0.5,
        message=text,
        ranks=RankSet({0}),
        evidence=(Evidence(ranks=RankSet({0}), summary=text, location=place, values={text: text}),),
        location=place,
        subjects=(text, f"/{text}"),
        why=text,
        fix=text,
        fix_changes=text,
        fix_leaves=text,
        disproof=text,
        fingerprint=text,
    )
    info = RankInfo(
        rank=0, local_rank=0, world_size=1, hostname=text, pid=1, fate=text, last=text, label=text
    )
    report = Report(
        complete=True,
        run=make_run(
            Outcome.FAILED,
            id=text,
            command=(text, f"{text}.py"),
            ranks=(info,),
            torch=text,
            started=text,
            ended=text,
            active_modes=(text,),
            dump_transport=text,
        ),
        findings=(finding, make_note(message=text), make_warning(message=text)),
        ignored=(IgnoredFinding(finding=finding, by="baseline", reason=text),),
        checked=(text,),
        not_checked={text: text, "MOE001": text},
        next_time=(text,),
        tool_version=text,
    )
    return Gate().judged(report)
