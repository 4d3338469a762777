"""What launchers, schedulers and containers say of processes that they have seen end.

Each row of `ROWS` is one message. Its named groups say whose end it is (`rank`, `ranks`,
`local_rank`, `pid`, `label`, `host`) and how it ended (`code`, `signal`, `how`).
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from distdiag.dumps.log_lines import Log, PlacedLine, Speaker, open_log
from distdiag.dumps.reading import UNKNOWN_RANK, Dump, DumpReader, RankDump
from distdiag.events.lifecycle import Cause, Exited

_WINDOW: Final = 1200
"""Messages of MPI and Ray go on over several lines; so many bytes of them are looked at."""
_MOST_ENDINGS: Final = 10_000
_MOST_TASKS: Final = 100_000

_SHELL: Final = 128
"""Shells and containers add this to the number of a signal."""
_WORDS_OF_SIGNALS: Final = {
    "killed": signal.SIGKILL,
    "terminated": signal.SIGTERM,
    "segmentation fault": signal.SIGSEGV,
    "aborted": signal.SIGABRT,
    "bus error": signal.SIGBUS,
    "floating point exception": signal.SIGFPE,
    "illegal instruction": signal.SIGILL,
    "hangup": signal.SIGHUP,
    "interrupt": signal.SIGINT,
    "out of memory": signal.SIGKILL,
}


class Row(NamedTuple):
    """One message. `word` stands in every line with it; `over` says how many lines it may take.

    `status` is how the process ended where the message does not say it in a group. `is_whole_job`:
    it is of all processes. `is_node`: it is of the node at `host`, which failed.
    `is_vague`: it says nothing of a process that the others do not say.
    `names_last`: it names the process that its launcher started last, whichever failed.
    """

    word: bytes
    pattern: re.Pattern[str]
    status: int | None = None
    cause: Cause = ""
    is_whole_job: bool = False
    is_node: bool = False
    is_vague: bool = False
    goes_on: bool = False
    names_last: bool = False


def _row(word: str, pattern: str, **rest: object) -> Row:
    return Row(word.encode(), re.compile(pattern), **rest)  # type: ignore[arg-type]


_KILL: Final = -int(signal.SIGKILL)
_TERM: Final = -int(signal.SIGTERM)
_HOST: Final = r"(?P<host>[\w.-]{1,80})"

ROWS: Final = (
    # srun
    _row(
        "task",
        rf"(?:srun: )?error: {_HOST}: tasks? (?P<ranks>\d[\d,-]{{0,400}}): "
        r"(?P<how>[A-Z][A-Za-z ]{3,40}?)(?: (?P<code>\d{1,3}))?(?: \(core dumped\))?$",
    ),
    # slurmstepd
    _row(
        "CANCELLED",
        r"(?:JOB|STEP|Job|Step) (?P<label>[\w.+-]{1,40}).{0,120}?CANCELLED.{0,60}?"
        r"DUE TO TIME LIMIT",
        status=_TERM,
        cause="time-limit",
        is_whole_job=True,
    ),
    _row(
        "CANCELLED",
        r"(?:JOB|STEP|Job|Step) (?P<label>[\w.+-]{1,40}).{0,120}?CANCELLED.{0,60}?"
        r"DUE TO PREEMPTION",
        status=_TERM,
        cause="preempted",
        is_whole_job=True,
    ),
    _row(
        "CANCELLED",
        rf"(?:JOB|STEP|Job|Step) (?P<label>[\w.+-]{{1,40}})(?: ON {_HOST})?.{{0,60}}?CANCELLED"
        r".{0,60}?DUE TO NODE ?FAIL",
        status=_TERM,
        cause="node-failed",
        is_whole_job=True,
    ),
    _row(
        "CANCELLED",
        r"(?:JOB|STEP|Job|Step) (?P<label>[\w.+-]{1,40}) .{0,80}?"
        r"CANCELLED AT [\dT:-]{10,25}(?! DUE)",
        status=_TERM,
        cause="cancelled",
        is_whole_job=True,
        is_vague=True,
    ),
    _row(
        "ode failure on",
        rf"[Nn]ode failure on {_HOST}",
        cause="node-failed",
        is_node=True,
    ),
    _row(
        "oom",
        r"(?:Detected \d{1,6} oom[-_]kill events?(?:\(s\))? in (?:step |StepId=)?"
        r"|oom-kill event\(s\) in step )(?P<label>[\w.+-]{1,40})",
        status=_KILL,
        cause="out-of-memory",
        is_whole_job=True,
        is_vague=True,
    ),
    _row(
        "memory limit",
        r"slurmstepd: error: .{0,200}?[Ee]xceeded (?:job|step)? ?memory limit",
        status=_KILL,
        cause="out-of-memory",
        is_whole_job=True,
        is_vague=True,
    ),
    # mpirun of Open MPI 4, prterun of Open MPI 5, MPICH
    _row(
        "noticed that",
        r"noticed that process rank (?P<rank>\d{1,7}) with PID (?P<pid>\d{1,9}) on node "
        rf"{_HOST} exited on signal (?P<signal>\d{{1,3}})",
        goes_on=True,
    ),
    _row(
        "Process name:",
        r"Process name: \[(?:\[\d{1,9},\d{1,9}\]|[\w.@-]{1,100}),(?P<rank>\d{1,7})\]"
        r" Exit code: (?P<code>\d{1,3})",
        goes_on=True,
    ),
    _row(
        "MPI_ABORT was",
        r"MPI_ABORT was invoked on rank (?P<rank>\d{1,7}) in communicator .{1,200}?"
        r"with errorcode (?P<code>\d{1,5})",
        goes_on=True,
    ),
    _row(
        " RUNNING AT ",
        rf"= RANK (?P<rank>\d{{1,7}}) PID (?P<pid>\d{{1,9}}) RUNNING AT {_HOST}"
        r" = KILLED BY SIGNAL: (?P<signal>\d{1,3})",
        goes_on=True,
    ),
    _row(
        " RUNNING AT ",
        rf"= PID (?P<pid>\d{{1,9}}) RUNNING AT {_HOST} = EXIT CODE: \d{{1,3}}"
        r".{0,900}?EXIT STRING: [\w ]{1,40}\(signal (?P<signal>\d{1,3})\)",
        goes_on=True,
    ),
    _row(
        " RUNNING AT ",
        rf"= PID (?P<pid>\d{{1,9}}) RUNNING AT {_HOST} = EXIT CODE: (?P<code>\d{{1,3}})",
        goes_on=True,
    ),
    # deepspeed
    _row(
        "exits with return code",
        r"(?:--local_rank[= ](?P<local_rank>\d{1,5}).{0,4000}?)?exits with return code = "
        r"(?P<code>-?\d{1,3})",
        names_last=True,
    ),
    # composer
    _row(
        " with exit code ",
        r"\bRank (?P<rank>\d{1,7}) crashed with exit code (?P<code>-?\d{1,3})",
    ),
    _row(
        " exited with code ",
        r"\bGlobal rank (?P<rank>\d{1,7}) \(PID \d{1,9}\) exited with code (?P<code>-?\d{1,3})",
    ),
    # horovodrun
    _row(
        " exit with status code ",
        r"^Process (?P<rank>\d{1,7}) exit with status code (?P<code>\d{1,3})\.$",
    ),
    # torch.multiprocessing.spawn
    _row(
        "terminated with",
        r"[Pp]rocess (?P<local_rank>\d{1,5}) terminated with "
        r"(?:signal (?P<signal>SIG\w{1,10})|exit code (?P<code>\d{1,3}))",
    ),
    # subprocess, and with it accelerate
    _row(
        "CalledProcessError",
        r"CalledProcessError: Command .{1,4000}(?:died with <Signals\.(?P<signal>SIG\w{1,10}): "
        r"|returned non-zero exit status (?P<code>\d{1,3}))",
        is_vague=True,
    ),
    # torchrun, when it is told to end
    _row(
        "death signal",
        r"Received (?P<signal>\d{1,2}) death signal, shutting down workers",
        cause="cancelled",
        is_whole_job=True,
        is_vague=True,
    ),
    _row(
        " got signal: ",
        r"SignalException: Process (?:\d{1,9}) got signal: (?P<signal>\d{1,2})",
        cause="cancelled",
        is_whole_job=True,
        is_vague=True,
    ),
    # a shell, of the command that it ran
    _row(
        "Killed",
        r"^(?:.{1,200}: line \d{1,6}: {1,4}(?P<pid>\d{1,9}) )?(?P<how>Killed)(?: {2,}.{0,300})?$",
        is_vague=True,
    ),
    _row(
        "(core dumped)",
        r"^(?:.{1,200}: line \d{1,6}: {1,4}(?P<pid>\d{1,9}) )?"
        r"(?P<how>Segmentation fault|Bus error|Aborted|Illegal instruction"
        r"|Floating point exception) {1,12}\(core dumped\)(?: .{0,300})?$",
        is_vague=True,
    ),
    # docker compose
    _row(
        "exited with code", r"(?:^|\s)(?P<label>[\w.-]{1,120}) exited with code (?P<code>\d{1,3})"
    ),
    # Kubernetes
    _row(
        "OOMKilled",
        r"(?:[Pp]od[ =/\":]{1,4}|[Cc]ontainer[ =/\":]{1,4}|^)(?P<label>[\w.-]{1,120}\d)\b.{0,300}?"
        r"OOMKilled",
        status=_KILL,
        cause="out-of-memory",
    ),
    _row("OOMKilled", r"OOMKilled", status=_KILL, cause="out-of-memory", is_vague=True),
    # Ray
    _row(
        "died unexpectedly before",
        r"The actor died unexpectedly .{0,700}?because its owner has died\..{0,200}?"
        r"Owner Ip address: (?P<host>[\w.:-]{1,60}) .{0,120}?Owner's node has crashed",
        cause="node-failed",
        is_node=True,
        goes_on=True,
    ),
    _row(
        "died unexpectedly before",
        r"The actor died unexpectedly .{0,500}?\bip: (?P<host>[\w.:-]{1,60}) "
        r".{0,80}?because its node has died",
        cause="node-failed",
        is_node=True,
        goes_on=True,
    ),
    _row(
        "died unexpectedly before",
        r"The actor died unexpectedly before finishing this task\.?"
        r"(?: class_name: (?:[\w.<>]{1,200}\.)?(?P<label>\w{1,80}))?"
        r"(?:.{0,200}?pid: (?P<pid>\d{1,9}))?"
        r"(?:.{0,200}?ip: (?P<host>[\w.:-]{1,60}))?",
        goes_on=True,
    ),
    _row(
        "Worker PID:",
        r"Worker IP address: (?P<host>[\w.:-]{1,60}) .{0,100}?Worker PID: (?P<pid>\d{1,9})",
        goes_on=True,
    ),
    _row(
        "running low on memory",
        r"killed due to the node running low on memory(?:.{0,300}?name=(?P<label>\w{1,80})"
        r".{0,80}?pid=(?P<pid>\d{1,9}))?",
        status=_KILL,
        cause="out-of-memory",
        goes_on=True,
    ),
    _row(
        "memory pressure",
        r"killed due to memory pressure \(OOM\)",
        status=_KILL,
        cause="out-of-memory",
        is_whole_job=True,
        is_vague=True,
    ),
    # the kernel's log
    _row(
        "Killed process",
        r"[Oo]ut of memory: Killed process (?P<pid>\d{1,9})",
        status=_KILL,
        cause="out-of-memory",
    ),
    # vLLM
    _row(
        "died unexpectedly",
        r"[Ww]orker(?: ?proc| ?process)? (?:Vllm)?Worker[-_](?P<rank>\d{1,5}) "
        r"(?:has )?died unexpectedly",
    ),
    _row(
        "exit code: ",
        r"Worker \w{1,60} pid (?P<pid>\d{1,9}) died, exit code: (?P<code>-?\d{1,3})",
    ),
    # UCX, which handles the signals of a process that uses it
    _row(
        "Caught signal ",
        rf"\[{_HOST}:(?P<pid>\d{{1,9}}) ?:\d{{1,5}}:\d{{1,9}}\] "
        r"Caught signal (?P<signal>\d{1,2}) \(",
    ),
    # SGLang
    _row("scheduler is dead", r"Rank (?P<rank>\d{1,5}) scheduler is dead"),
)

# A task of Slurm may be a launcher of ranks, too.
_LAUNCHERS: Final = (
    b"torch/distributed/elastic",
    b"torch.distributed.elastic",
    b"torchrun",
    b"launch.py:",
)


# Servers that kill themselves, by SIGKILL, when a worker of theirs has failed.
_ENDS_ITSELF: Final = b"Received sigquit from a child proc"


@dataclass(frozen=True)
class Ending:
    """How one process ended, or all of a job did."""

    status: int | None
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    label: str = ""
    host: str = ""
    cause: Cause = ""
    place: int = 0
    time_ns: int = 0
    is_whole_job: bool = False
    is_node: bool = False
    is_vague: bool = False

    @property
    def reason(self) -> str:
        """How the process ended, in a few words."""
        how = _REASONS.get(self.cause, "")
        if self.status is None:
            return how or "its launcher saw it die"
        if self.status >= 0:
            return how or f"exit code {self.status}"
        name = signal.Signals(-self.status).name if -self.status in _SIGNALS else "a signal"
        return f"{how} ({name})" if how else f"killed by {name}"


_SIGNALS: Final = frozenset(int(each) for each in signal.Signals)
_REASONS: Final = {
    "out-of-memory": "killed for want of memory",
    "time-limit": "ended at the time limit of the job",
    "preempted": "ended to make room for another job",
    "node-failed": "ended since a node failed",
    "cancelled": "the job was cancelled",
}


class Endings(DumpReader):
    """Read how processes ended, as launchers, schedulers, containers and the kernel say it."""

    name = "endings"

    def recognises(self, dump: Dump) -> bool:
        """Look for words of the messages."""
        return any(row.word in dump.data for row in ROWS)

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield one end for each process; vague ones only where nothing else is said."""
        found = _merged(_endings(open_log(dump)))
        if _ENDS_ITSELF in dump.data:
            found = [e for e in found if not (e.is_vague and e.status == _KILL and not e.cause)]
        if any(not ending.is_vague for ending in found):
            oom = any(e.is_vague and e.cause == "out-of-memory" for e in found)
            found = [e for e in found if not e.is_vague]
            found = [
                replace(e, cause=e.cause or "out-of-memory") if oom and e.status == _KILL else e
                for e in found
            ]
        for ending in found:
            yield RankDump(
                rank=ending.rank,
                local_rank=ending.local_rank,
                pid=ending.pid,
                label=ending.label,
                node=ending.host if ending.local_rank is not None else "",
                place=ending.place,
                is_whole_job=ending.is_whole_job,
                is_node=ending.is_node,
                is_vague=ending.is_vague,
                events=(_exited(ending),),
                path=dump.path,
                source=self.name,
            )


def _exited(ending: Ending) -> Exited:
    return Exited(
        rank=UNKNOWN_RANK if ending.rank is None else ending.rank,
        seq=-1,
        time_ns=ending.time_ns,
        reason=ending.reason,
        status=ending.status,
        cause=ending.cause,
    )


def _endings(log: Log) -> Iterator[Ending]:
    launch = _Launch(any(word in log.data for word in _LAUNCHERS), _stopped(log))
    for line in log.lines_with({row.word for row in ROWS}):
        window = ""
        for row in ROWS:
            if row.word.decode() not in line.text:
                continue
            window = window or (_window(log, line) if row.goes_on else "")
            if match := row.pattern.search(window if row.goes_on else line.text):
                yield from _of_match(log, line, row, match, launch)
                break


def _window(log: Log, line: PlacedLine) -> str:
    """Return a line with those that follow, on one line."""
    text = log.text(line.place, min(len(log.data), line.place + _WINDOW))
    # Prefixes of the lines that follow are no words of the message.
    parts = log.data[line.place : line.place + _WINDOW].splitlines()[1:]
    rest = " ".join(part.decode("utf-8", errors="replace").strip(" *") for part in parts)
    return " ".join(f"{line.text} {rest}".split()) if parts else text


class _Launch(NamedTuple):
    """What a log tells of its launcher: tasks are started by one, and how many each started."""

    is_within: bool
    num_started: Mapping[Speaker, int]


def _of_match(
    log: Log, line: PlacedLine, row: Row, match: re.Match[str], launch: _Launch
) -> Iterator[Ending]:
    groups = match.groupdict()
    status = _status(row, groups)
    if status == 0:
        return
    speaker = line.speaker
    host = groups.get("host") or speaker.label
    label = groups.get("label") or ""
    pid = int(groups["pid"]) if groups.get("pid") else None
    local_rank = int(groups["local_rank"]) if groups.get("local_rank") else None
    is_any = row.names_last and bool(local_rank) and launch.num_started.get(speaker, 0) != 1
    if is_any:
        label, local_rank = f"one of local ranks 0-{local_rank}", None
    ending = Ending(
        status,
        rank=int(groups["rank"]) if groups.get("rank") else log.named(Speaker(label=label)).rank,
        local_rank=local_rank,
        pid=pid,
        label=f"{host} local rank {local_rank}".strip()
        if local_rank is not None
        else _label(row, label, pid, host),
        host=host,
        cause=row.cause or ("out-of-memory" if groups.get("how") == "Out Of Memory" else ""),
        place=line.place,
        time_ns=log.time_ns(line.place + 40),
        is_whole_job=row.is_whole_job,
        is_node=row.is_node,
        # A traceback beside it says more than a failing status of some process.
        is_vague=row.is_vague or (is_any and (status or 0) > 0),
    )
    for task in _tasks(groups.get("ranks") or ""):
        if launch.is_within:
            yield replace(ending, rank=None, label=f"task {task} on {host}")
        else:
            yield replace(ending, rank=task)
    if not groups.get("ranks"):
        yield ending


def _stopped(log: Log) -> Mapping[Speaker, int]:
    """Return how many processes each launcher of a log had started, by what it stopped at last."""
    lines = {(line.speaker, line.text) for line in log.lines_with((b"Killing subprocess ",))}
    return Counter(speaker for speaker, _ in lines)


def _label(row: Row, label: str, pid: int | None, host: str) -> str:
    if row.is_whole_job:
        return f"job {label.partition('.')[0]}" if label else ""
    if row.is_node:
        return f"node {host}"
    if pid is not None:
        return f"{label} pid={pid}".strip() + (f", ip={host}" if host[:1].isdigit() else "")
    return label


def _status(row: Row, groups: dict[str, str | None]) -> int | None:
    """Return the exit status, or minus the number of a signal; 0 for what is no failure."""
    if code := groups.get("code"):
        value = int(code)
        return -(value - _SHELL) if value - _SHELL in _SIGNALS else value
    if name := groups.get("signal"):
        return -int(name) if name.isdigit() else -int(getattr(signal, name, 0)) or None
    if how := groups.get("how"):
        number = _WORDS_OF_SIGNALS.get(how.lower())
        return -int(number) if number is not None else 0
    return row.status


def _tasks(text: str) -> Iterator[int]:
    """Yield the numbers of ``0,2-4``."""
    num = 0
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            for task in range(int(first), int(last or first) + 1):
                num += 1
                if num > _MOST_TASKS:
                    return
                yield task


def _merged(endings: Iterable[Ending]) -> list[Ending]:
    """Return the first word about each process, with the cause that a later one adds."""
    found: dict[tuple[object, ...], Ending] = {}
    for ending in endings:
        # What names a process and its host tells of the same one, under whatever other name.
        name = (ending.pid, ending.host) if ending.pid and ending.host else ending.label
        key = (ending.rank, ending.local_rank, name, ending.is_whole_job, ending.is_vague)
        known = found.get(key)
        if known is None and len(found) < _MOST_ENDINGS:
            found[key] = ending
        elif known is not None:
            # One message names the class of an actor beside its process, another does not.
            is_fuller = known.label.startswith("pid=") and ending.label.endswith(known.label)
            found[key] = replace(
                known,
                cause=known.cause or ending.cause,
                label=ending.label if is_fuller else known.label,
            )
    return list(found.values())
