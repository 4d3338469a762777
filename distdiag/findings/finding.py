"""What checks conclude, what each conclusion rests on, and the report that holds them."""

from enum import StrEnum
from typing import Literal

import msgspec

from distdiag.events.base import Value
from distdiag.events.ranks import RankSet


class Severity(StrEnum):
    """How much a finding threatens the run."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def weight(self) -> int:
        """A number that is larger for the worse severity."""
        return {"info": 0, "warning": 1, "error": 2}[self.value]


class Grade(StrEnum):
    """How sure a finding is. A `note` always has severity info."""

    PROVEN = "proven"
    LIKELY = "likely"
    NOTE = "note"


class Outcome(StrEnum):
    """How a run ended, or that it has not."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    HUNG = "hung"
    ABORTED = "aborted"
    KILLED = "killed"


class Location(msgspec.Struct, frozen=True):
    """A line of the user's code; `source` is its text, stripped."""

    file: str
    line: int
    function: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation that a reader can verify, with the ranks that made it."""

    ranks: RankSet
    summary: str
    location: Location | None = None
    values: dict[str, Value] = {}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One conclusion of one check. `ranks` are the culprits only; the others stand in the evidence.

    Example: ``Finding(code="COL003", name="collective-shape-mismatch", message="all_gather #12 in
    group default_pg …", ranks=RankSet({3}), …)``.

    `fingerprint` is the same for the same finding in another run; a report sets it.
    """

    code: str
    name: str
    severity: Severity
    grade: Grade
    confidence: float
    message: str
    ranks: RankSet
    evidence: tuple[Evidence, ...]
    step: int | None = None
    location: Location | None = None
    subjects: tuple[str, ...] = ()
    why: str = ""
    fix: str = ""
    fix_changes: str = ""
    fix_leaves: str = ""
    disproof: str = ""
    fingerprint: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """What makes two findings the same one, seen again."""
        place = (self.location.file, self.location.line) if self.location else None
        return (self.code, place, self.subjects, self.ranks)


Way = Literal["comment", "configuration", "baseline"]
"""By what a finding is ignored."""


class IgnoredFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding that does not count, since a comment, the configuration or a baseline says so."""

    finding: Finding
    by: Way
    reason: str = ""


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many findings count, by severity, and how many do not.

    `ignored` are those that comments and the configuration name, `baselined` those of a baseline.
    """

    error: int = 0
    warning: int = 0
    info: int = 0
    ignored: int = 0
    baselined: int = 0


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a rank is. `axes` holds its mesh coordinates by axis name, where known.

    `label` is the name of a process whose rank nothing tells; `rank` is only its number then.
    """

    rank: int
    local_rank: int
    world_size: int
    hostname: str
    pid: int
    axes: dict[str, int] = {}
    fate: str = "running"
    last: str = ""
    label: str = ""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Which run a report is about. Times are RFC 3339 in UTC.

    `dump_transport` is the way by which stacks of a hang came from other nodes, if any did.
    `exit_status` is that of the rank whose script failed first, as a shell has it, or 0 if all
    ended well; None if no script has ended.
    """

    id: str
    command: tuple[str, ...]
    world_size: int
    ranks: tuple[RankInfo, ...]
    torch: str
    started: str
    ended: str | None
    outcome: Outcome
    attempts: int = 1
    active_modes: tuple[str, ...] = ()
    dump_transport: str = ""
    exit_status: int | None = None


class ReadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that `distdiag analyze` has read: what it is, whose, and how much was understood.

    `kinds` are words such as ``log`` and ``stacks``, none where nothing in it is known. Lines count
    in a text, `num_lines` in all (0: it is no text), and entries in a dump. `problem` says what was
    not understood, and why.
    """

    path: str
    kinds: tuple[str, ...] = ()
    ranks: RankSet = msgspec.field(default_factory=RankSet)
    num_lines: int = 0
    num_understood: int = 0
    problem: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run showed: findings, what was checked, and what was not and why.

    Of a job that is gone, `files` are what was read of it, and `next_time` is what would have
    helped to find more, one sentence each.

    `findings` are those that count; `ignored` are known and do not. `exit_status` is what the whole
    asks for: the script's own, else 1 if a finding is as severe as `fail_on` (error, warning,
    never), else 0; it is None in older reports, which have no `tool_version` either.
    """

    schema_version: int = 1
    tool_version: str = ""
    complete: bool = False
    run: Run
    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: dict[str, str] = {}
    silent_ranks: RankSet = msgspec.field(default_factory=RankSet)
    files: tuple[ReadFile, ...] = ()
    next_time: tuple[str, ...] = ()
    ignored: tuple[IgnoredFinding, ...] = ()
    counts: Counts = Counts()
    fail_on: str = "error"
    exit_status: int | None = None
