"""HNG019: the log holds a well-known fault of others, and nothing else explains the end better."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from distdiag.checks.base import Check
from distdiag.checks.shared.failures import known_fault_of, waited_for
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import FaultLogged
from distdiag.findings.finding import Evidence, Finding, Grade, Severity
from distdiag.findings.known_faults import KnownFault as Row
from distdiag.findings.known_faults import known_faults
from distdiag.views.base import View
from distdiag.views.rank_states import RankState

MOST_LINES = 4
"""So many different lines of one fault are shown; the others say the same."""


@dataclass(frozen=True, slots=True)
class FaultView(View):
    """The lines of known faults in the logs of a job that has ended."""

    is_of_one_rank: ClassVar[bool] = True

    lines: tuple[FaultLogged, ...]
    states: Mapping[int, RankState]


class KnownFault(Check[FaultView]):
    """The log holds a well-known fault of a library, the machine or the launcher.

    ## What you see
    The job ended after a line in the log that is known from many other jobs. The cause of this line
    is known; the last lines of the log complain about its consequences.

    ## Example
        # wrong: containers have 64 MiB of /dev/shm, and NCCL writes "failed to extend /dev/shm/…"
        docker run --gpus all image torchrun --nproc-per-node 8 train.py

        # right
        docker run --gpus all --shm-size=16g image torchrun --nproc-per-node 8 train.py

    ## How to fix
    Do what the finding says. `distdiag explain NAME` shows this known fault with its source, and
    `distdiag list --known-faults` shows all known faults.

    Changes: What the finding says; the program itself as a rule need not change.

    Leaves: Faults that the job would have met later.

    ## When it is not a defect
    The job continued after this line and ended without an error.

    Findings of other checks that are proven come first: this finding is then a note. It is also a
    note if the job survived the fault, or if the fault only follows from another one. To silence
    it, set `ignore = ["HNG019"]` in `distdiag.toml`.

    ## References
    - https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
    - https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html
    - https://docs.pytorch.org/docs/stable/distributed.html
    """

    code = "HNG019"
    name = "known-fault"
    severity = Severity.ERROR
    gives_way = True

    def check(self, view: FaultView) -> Iterator[Finding]:
        """Report the fault that comes first; where there is none, what only follows from one."""
        lines = [line for line in view.lines if not _is_told_elsewhere(line, view.states)]
        causes = [line for line in lines if _is_cause(line, view.states)]
        shown = _of_first_row(causes or lines)
        if not shown:
            return
        row = _ROWS[shown[0].fault]
        others = [line for line in lines if line.fault != row.id]
        ranks = RankSet(line.rank for line in shown if line.is_rank_known)
        who = ranks.phrase() if ranks else _places(shown) or "a rank that the log does not name"
        yield self.finding(
            f'{who} wrote "{shown[0].text}": {row.title} (known fault {row.id}'
            f"{_reservation(row, shown[0])}){_waited_for(row, shown[0])}",
            # Victims are no culprits.
            ranks=ranks if row.role in _CAUSES and row.blames == "who-met-it" else RankSet(),
            subjects=(row.id,),
            grade=Grade.LIKELY if causes else Grade.NOTE,
            confidence=0.9 if causes else 0.5,
            evidence=(*_evidence(row, shown), *_further(others)),
            why=row.cause,
            fix=row.fix,
        )


_CAUSES = ("cause", "ambiguous", "general")
"""The roles of rows that may explain an end, those that explain it best first."""
_NUMBER = re.compile(r"\d+")
# What NCCL puts before its lines, and what the driver of the GPU names.
_NCCL_PLACE = re.compile(r"(?:^|\s)([\w.-]{1,80}):(\d{1,9}):\d{1,9} \[(\d{1,3})\] ")
_GPU = re.compile(r"NVRM: (?:Xid \((?:PCI:)?|.{0,20}GPU )([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]{4,12})")
_ROWS = {row.id: row for row in known_faults()}


def _places(lines: list[FaultLogged]) -> str:
    """Return the hosts, processes and GPUs that wrote the lines, or were written of."""
    found = dict.fromkeys(filter(None, (_place(line.text) for line in lines)))
    more = f" and {len(found) - MOST_LINES} more" if len(found) > MOST_LINES else ""
    return ", ".join(list(found)[:MOST_LINES]) + more


def _place(text: str) -> str:
    if match := _NCCL_PLACE.search(text):
        host, pid, device = match.groups()
        return f"process {pid} on {host} (GPU {device})"
    match = _GPU.search(text)
    return f"the driver of GPU {match[1]}" if match else ""


def _is_told_elsewhere(line: FaultLogged, states: Mapping[int, RankState]) -> bool:
    """Say whether the line is a part of what some rank raised, which HNG001 reports.

    So is a line that says less than the known fault of the exception, and one that only follows
    from something where all that wait do so in one call.
    """
    state = states.get(line.rank) if line.is_rank_known else None
    known = [state] if state is not None else list(states.values())
    rows = [row for each in known if (row := known_fault_of(each)) is not None]
    role = _ROWS[line.fault].role
    calls = {(c.group.name, c.collective_seq_id) for s in states.values() for c in s.waiting[:1]}
    if role == "consequence" and len(calls) == 1:
        return True  # HNG016 tells it, or whoever did not come to this call is known
    says_less = any(
        row.role == "cause" or _weight(row) < _weight(_ROWS[line.fault]) for row in rows
    )
    return any(row.id == line.fault for row in rows) or (role != "cause" and says_less)


def _weight(row: Row) -> int:
    """Return how little the role of a row explains an end."""
    return _CAUSES.index(row.role) if row.role in _CAUSES else len(_CAUSES)


def _is_cause(line: FaultLogged, states: Mapping[int, RankState]) -> bool:
    if _ROWS[line.fault].role not in _CAUSES:
        return False
    state = states.get(line.rank) if line.is_rank_known else None
    return not line.was_survived or (state is not None and state.has_failed)


def _of_first_row(lines: list[FaultLogged]) -> list[FaultLogged]:
    """Return the lines of the fault that came first.

    Lines of one file are in order, but what may be a consequence comes after what is a cause, and
    general rows say least. Between files the order is that of the table, special rows first.
    """
    if not lines:
        return []
    is_one_file = len({line.file for line in lines}) == 1
    order = list(_ROWS)

    def key(line: FaultLogged) -> tuple[int, int]:
        place = line.place if is_one_file else order.index(line.fault)
        return (_weight(_ROWS[line.fault]), place)

    first = min(lines, key=key).fault
    return [line for line in lines if line.fault == first]


def _reservation(row: Row, line: FaultLogged) -> str:
    if row.role == "consequence":
        return ", which follows from something else"
    if row.role == "harmless":
        return ", which does no harm"
    return ", and went on" if line.was_survived else ""


def _waited_for(row: Row, line: FaultLogged) -> str:
    peer = waited_for(line.text) if row.role != "cause" else None
    return f"; it waited for rank {peer} of its group" if peer is not None else ""


def _evidence(row: Row, lines: list[FaultLogged]) -> Iterator[Evidence]:
    alike: dict[tuple[str, str], list[FaultLogged]] = {}
    for line in lines:
        alike.setdefault((line.file, _NUMBER.sub("#", line.text)), []).append(line)
    for same in list(alike.values())[:MOST_LINES]:
        ranks = [line.rank for line in same if line.is_rank_known]
        seen = row.evidence(ranks, said=same[0].text)
        yield Evidence(
            ranks=seen.ranks,
            summary=f"{seen.summary}, in {same[0].file}",
            values=seen.values,
        )


def _further(lines: list[FaultLogged]) -> Iterator[Evidence]:
    by_fault: dict[str, list[FaultLogged]] = {}
    for line in lines:
        by_fault.setdefault(line.fault, []).append(line)
    for fault, same in list(by_fault.items())[:MOST_LINES]:
        yield Evidence(
            ranks=RankSet(line.rank for line in same if line.is_rank_known),
            summary=f"also in the log: {fault}",
            values={"said": same[0].text},
        )
