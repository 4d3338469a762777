"""Whether a process went on after a traceback that it wrote: then somebody caught the exception."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

from distdiag.dumps.log_lines import Log
from distdiag.dumps.logs.tracebacks import LOG_LINE

SURVIVED_AFTER: Final = 50
"""A process that wrote so many lines after a traceback has survived it, whatever they say."""
ALIVE_LINES: Final = 3
"""So many lines of output are more than what exit handlers write as a rule (one or two)."""

# What launchers, schedulers and containers write when a process has failed.
_FAILURES: Final = (
    b"Root Cause (first observed failure)",
    b"failed (exitcode: ",
    b"closing signal SIGTERM",
    b"exits with return code = ",
    b"Killing subprocess ",
    b"ChildFailedError",
    b"CalledProcessError",
    b"ProcessRaisedException",
    b"ProcessExitedException",
    b"Exited with exit code ",
    b"exited with code ",
    b"noticed that ",
    b"exited on signal",
    b"non-zero",
    b"slurmstepd: error",
    b"srun: error",
    b"Job step aborted",
)
# Lines that come from below Python, from launchers or from the end of the interpreter.
_NOT_ALIVE: Final = re.compile(
    r"\[?[IWEF]\d{3,4} \d\d:|\[[IWEF]\d{0,4}\b|.{0,120}(?:NCCL (?:INFO|WARN)|ProcessGroup\w{1,8}\.)"
    r"|terminate called|  what\(\)|Fatal Python error|Current thread 0x|Thread 0x|Exception ignored"
    r"|.{0,200}(?:Warning: |warnings\.warn|resource_tracker)|wandb: |srun: |slurmstepd: |\*{3} "
    r"|Traceback \(most|  File \"|    |\.{3}|[-=*#_]{5,}|\[\d\]:$|  \w[\w ]{0,12}: |Root Cause"
    r"|Failures:|.{0,80}(?:closing signal|torch[./]distributed[./](?:elastic|run)|exitcode)"
    r"|.{0,60}launch\.py:|Aborted|Killed|Segmentation fault|Bus error|\(core dumped\)|make: "
    r"|(?:END|Process exited|Command exited|exit(?:ed)? )\b",
    re.IGNORECASE,
)
# What a program says that has caught an exception and goes on.
_GOES_ON: Final = re.compile(
    r"\b(?:re-?try(?:ing)?|will (?:try|retry)|trying again|attempt \d+|falling? back|fallback"
    r"|skip(?:ping|ped)?|ignor(?:ing|ed)|continu(?:e|ing)|recover(?:ed|ing)|caught)\b",
    re.IGNORECASE,
)
# The same, in words that no message of an exception uses.
_TRIES_AGAIN: Final = re.compile(
    r"^\W{0,4}(?:re-?trying|will (?:try|retry)|trying again|falling back)\b", re.IGNORECASE
)
_NUMBERS: Final = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_COUNTED: Final = "#"
_BAR: Final = re.compile(r"\s{0,8}(?:.{0,40}: )?\s{0,3}\d{1,3}%\|")


def has_failed(log: Log) -> bool:
    """Say whether the log tells of a process that failed, beside tracebacks."""
    return any(word in log.data for word in _FAILURES)


def restarted_at(log: Log) -> int:
    """Return the place before which all ends are of attempts that torchrun followed by another.

    It says so at the level of information only. Without that, many lines of output after the end of
    a rank show it, since a launcher that gives up says so at once. 0: there was no other attempt.
    """
    told = max(log.places(_RESTARTS), default=0)
    ends = log.places(_AT_ONCE)
    if not ends or log.data.find(_GIVES_UP, ends[-1]) >= 0:
        return told
    alive = (line for line in log.after(ends[-1]) if not _NOT_ALIVE.match(line))
    went_on = sum(1 for _ in islice(alive, 2 * SURVIVED_AFTER)) == 2 * SURVIVED_AFTER
    return max(told, ends[-1] + 1) if went_on else told


_RESTARTS: Final = b"will restart worker group"
_AT_ONCE: Final = b"failed (exitcode: "
_GIVES_UP: Final = b"ChildFailedError"


def has_survived(
    before: Callable[[], Iterator[str]],
    message: Callable[[], Iterator[str]],
    after: Callable[[], Iterator[str]],
    *,
    is_known: bool,
    failed: bool,
) -> bool:
    """Say whether a process lived on after a traceback between these lines.

    `message` are lines that may be the rest of the exception's message, or what followed it.
    `is_known`: the lines are one process's; else other ranks may have written those after it.
    `failed`: a launcher says that some process failed.
    """
    following = list(after())
    if len(following) >= SURVIVED_AFTER and (is_known or not failed):
        return True
    if failed and not is_known:
        tries = [line for line in [*message(), *following][:ALIVE_LINES] if _GOES_ON.search(line)]
        return bool(tries) or len(following) >= 2 * SURVIVED_AFTER
    alive = [line for line in following if not _NOT_ALIVE.match(line)]
    if len(_output(alive)) >= ALIVE_LINES:
        return True
    if any(_GOES_ON.search(line) for line in alive[:ALIVE_LINES]):
        return True
    following = [*message(), *alive]
    if any(_TRIES_AGAIN.search(line) for line in following[:ALIVE_LINES]):
        return True
    # Progress changes its numbers; a message that is repeated word for word is none.
    preceding = set(before())
    earlier = {_form(line) for line in preceding}
    return any(
        line not in preceding and (form := _form(line)) in earlier and _COUNTED in form
        for line in following
    )


def _output(lines: list[str]) -> list[str]:
    """Return the lines that a program writes as it goes on, and no message of an exception holds.

    They begin as lines of a logger do, or several have one form with other numbers.
    """
    forms = Counter(_form(line) for line in lines)
    return [
        line
        for line in lines
        if LOG_LINE.match(line) or (forms[form := _form(line)] > 1 and _COUNTED in form)
    ]


def _form(line: str) -> str:
    """Return a line without its numbers: lines of one form are written in one place."""
    return f"bar {_COUNTED}" if _BAR.match(line) else _NUMBERS.sub(_COUNTED, line)
