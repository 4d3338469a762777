"""Builds races as the engine would show them."""

from itertools import count

from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.files import FileAccess, FileAction, FileClosed, FileContent
from distdiag.events.lifecycle import Raised
from distdiag.findings.finding import Severity
from distdiag.views.files import Access, Conflict, Race
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings

WORLD = ProcessGroup("0", "default_pg", (0, 1, 2, 3), "gloo")
_SEQS = count(1)


def access(rank, action, site, path="/data/cache.pt", *, content=None, unwaited=(), **values):
    """An access of a rank; `content` is what the file held at its end."""
    extra = {name: values.pop(name) for name in ("is_before_init", "is_followed") if name in values}
    event = event_of(
        FileAccess,
        rank,
        time_ns=next(_SEQS) * 1000,
        action=FileAction(action),
        path=path,
        written=values.pop("written", path.rpartition("/")[2]),
        site=site,
        **values,
    )
    held = None if content is None else FileContent(len(content), (hash(content),))
    closed = event_of(FileClosed, rank, access=event.seq, content=held)
    return Access(event, closed, unwaited=tuple(unwaited), **extra)


def race(conflict, changes, uses=None, **values):
    """A race between these accesses; without `uses` all of them write."""
    by_rank = {each.event.rank: each for each in changes}
    used = by_rank if uses is None else {each.event.rank: each for each in uses}
    paths = tuple({each.event.path: None for each in [*changes, *(uses or ())]})
    return Race(Conflict(conflict), by_rank, used, paths, **values)


def read_of_write(write_site, read_site, *, change="write", **values):
    """Rank 0 writes what ranks 1 and 2 read."""
    return race(
        "read-of-write",
        [access(0, change, write_site)],
        [access(rank, "read", read_site) for rank in (1, 2)],
        **values,
    )


def barrier(rank=0, number=3, line=7, **values):
    """A barrier that a rank made."""
    return event_of(
        Collective,
        rank,
        group=WORLD,
        collective_seq_id=number,
        signature=Signature("barrier"),
        site=plain_site(line),
        **values,
    )


def missing_file(rank, path):
    """The exception of a rank that did not find a file."""
    message = f"[Errno 2] No such file or directory: '{path}'"
    return event_of(
        Raised,
        rank,
        type="FileNotFoundError",
        message=message,
        frames=plain_site(40).user_frames,
        traceback="",
    )


def alarms(check, shown):
    """The findings of a check about a race, of warning or above."""
    return [f for f in findings(check, shown) if f.severity is not Severity.INFO]
