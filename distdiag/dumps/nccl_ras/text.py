"""The text that NCCL's RAS subsystem answers with, since NCCL 2.24.

Example of what tells something::

    #0-0 (cf264af53edbe986) MISMATCH
      Communicator ranks have different AllReduce operation counts
      7 ranks have launched up to operation 12
      Rank 3 has launched up to operation 11 -- GPU 3 managed by process 812 on node 10.0.0.1
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from distdiag.dumps.nccl_ras.status import Communicator, Lag, Member, RasStatus, lags_of

_LONGEST_LINE: Final = 1024
"""NCCL's own limit."""

_VERSION: Final = re.compile(r"NCCL version (\S+) compiled")
_ROW: Final = re.compile(r"(\d+)\s+(\d+)\s+\d+\s+[\d-]+\s+(\d+)\s+\d+\s+[A-Z]+\s+[A-Z,]+$")
_HEAD: Final = re.compile(r"#(\d+)-\d+ \(([0-9a-f]+)\) [A-Z]+$")
_OP: Final = re.compile(r"Communicator ranks have different (\w+) operation counts$")
_TIMEOUTS: Final = re.compile(r"Encountered (\d+) communication timeout")
_MISSING: Final = re.compile(r"Missing communicator data from (\d+) ranks?$")
_LISTED: Final = re.compile(r"The (?:missing|unknown) ranks?: ([\d,]+)$")
_PROCESS: Final = re.compile(r"Process (\d+) on node (\S+) managing GPU")
_MANY: Final = re.compile(r"(\d+) ranks (have|reported) (.+)$")
_ONE: Final = re.compile(
    r"Rank (\d+)(?: (has|reported) (.+?))? -- "
    r"(?:GPU .+ managed by process (\d+) on node (\S+)|\[process information not found\])$"
)
_LAUNCHED: Final = re.compile(r"launched up to operation (\d+)$")
_NOTHING: Final = "not launched any operations"
_RUNNING: Final = "status RUNNING"


@dataclass
class _Group:
    """Ranks of which the same is said, such as ``launched up to operation 12``."""

    said: str
    size: int
    members: list[Member] = field(default_factory=list)


@dataclass
class _Found:
    """What the text says of one communicator."""

    name: str
    size: int | None
    num_missing: int = 0
    missing: list[Member] = field(default_factory=list)
    odd: list[_Group] = field(default_factory=list)
    ops: dict[str, list[_Group]] = field(default_factory=dict)
    groups: list[_Group] = field(default_factory=list)

    def build(self) -> Communicator:
        odd = [m for group in self.odd if group.said != _RUNNING for m in group.members]
        return Communicator(
            name=self.name,
            size=self.size,
            lags=tuple(lag for op, groups in self.ops.items() for lag in _lags(op, groups)),
            missing=tuple(self.missing),
            num_missing=self.num_missing,
            odd=tuple(odd),
        )


class _Reader:
    def __init__(self) -> None:
        self.version = ""
        self.num_communicators = 0
        self.num_timeouts = 0
        self.dead: list[Member] = []
        self.found: dict[str, _Found] = {}
        self._sizes: dict[str, int] = {}
        self._now: _Found | None = None
        self._is_dead_part = False

    def line(self, line: str) -> None:
        """Take in one line; those that say nothing of a rank are passed over."""
        rules: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], None]], ...] = (
            (_VERSION, self._on_version),
            (_ROW, self._on_row),
            (_HEAD, self._on_head),
            (_OP, self._on_op),
            (_TIMEOUTS, self._on_timeouts),
            (_MISSING, self._on_missing),
            (_LISTED, self._on_listed),
            (_PROCESS, self._on_process),
            (_MANY, self._on_many),
            (_ONE, self._on_one),
        )
        text = line.strip()
        if text in ("DEAD", "INCOMPLETE"):
            self._now, self._is_dead_part = None, text == "DEAD"
            return
        for pattern, act in rules:
            if match := pattern.match(text):
                act(match)
                return

    def _on_version(self, match: re.Match[str]) -> None:
        self.version = match[1]

    def _on_row(self, match: re.Match[str]) -> None:
        group, communicators, size = match.groups()
        self.num_communicators += int(communicators)
        self._sizes[group] = int(size)

    def _on_head(self, match: re.Match[str]) -> None:
        group, name = match.groups()
        self._now = self.found.setdefault(name, _Found(f"0x{name}", self._sizes.get(group)))
        self._now.groups = self._now.odd

    def _on_op(self, match: re.Match[str]) -> None:
        if self._now is not None:
            self._now.groups = self._now.ops.setdefault(match[1], [])

    def _on_timeouts(self, match: re.Match[str]) -> None:
        self.num_timeouts = int(match[1])

    def _on_missing(self, match: re.Match[str]) -> None:
        if self._now is not None:
            self._now.num_missing = int(match[1])
            self._now.groups = []

    def _on_listed(self, match: re.Match[str]) -> None:
        if self._now is not None:
            ranks = [int(rank) for rank in match[1].split(",") if rank]
            self._now.missing += [Member(rank) for rank in ranks]

    def _on_process(self, match: re.Match[str]) -> None:
        if self._is_dead_part:
            self.dead.append(Member(-1, int(match[1]), match[2]))

    def _on_many(self, match: re.Match[str]) -> None:
        if self._now is not None:
            self._now.groups.append(_Group(match[3], int(match[1])))

    def _on_one(self, match: re.Match[str]) -> None:
        if self._now is None:
            return
        rank, verb, said, pid, host = match.groups()
        groups = self._now.groups
        if verb is not None:
            groups.append(_Group(said, 1))
        note = groups[-1].said if groups and groups is self._now.odd else ""
        member = Member(int(rank), int(pid) if pid else None, host or "", note)
        (groups[-1].members if groups else self._now.missing).append(member)


def parse_text(text: str) -> RasStatus:
    """Parse an answer; what is not understood is passed over."""
    reader = _Reader()
    for line in text.splitlines():
        reader.line(line[:_LONGEST_LINE])
    told = [found.build() for found in reader.found.values()]
    return RasStatus(
        nccl_version=reader.version,
        num_communicators=reader.num_communicators,
        communicators=tuple(communicator for communicator in told if communicator.is_sick),
        dead=tuple(reader.dead),
        num_timeouts=reader.num_timeouts,
    )


def _lags(op: str, groups: list[_Group]) -> list[Lag]:
    counted = []
    for group in groups:
        launched = _LAUNCHED.search(group.said)
        if launched is not None or group.said.endswith(_NOTHING):
            count = int(launched[1]) if launched else 0
            counted.append((count, group.size, tuple(group.members)))
    return lags_of(op, counted)
