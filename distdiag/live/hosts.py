"""Dumps of other nodes: the command runs itself there and answers with a line of JSON."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import Final, NamedTuple

import psutil

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.live.job_dump import NodeDump, read_node_dump

AT_ONCE: Final = 32
"""So many nodes are asked at the same time."""
MOST_BYTES: Final = 256 << 20
WAYS: Final = {
    "ssh": "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}",
    "srun": "srun --overlap --nodes=1 --ntasks=1 --nodelist={host}",
}
"""Known commands that run another one on a node."""

_HOST: Final = re.compile(r"[A-Za-z0-9_][\w.:@-]*", re.ASCII)
_DAMAGED_WORD: Final = re.compile(r"[^\w./:=@+,-]", re.ASCII)


class Answer(NamedTuple):
    """What became of asking one node: a dump, or the reason why there is none."""

    host: str
    dump: NodeDump | None
    error: str = ""


def split_hosts(text: str) -> tuple[str, ...]:
    """Return the distinct names of a list like ``node0,node1``, in its order.

    Raises:
        UsageError: there is none, or one could be taken for an option.

    """
    hosts = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(f"{host!r} is not the name of a host")
    if not hosts:
        raise UsageError("--hosts names no host")
    return hosts


def split_words(text: str, option: str) -> list[str]:
    """Return the words of a command that an option holds, quotes removed.

    Raises:
        UsageError: the command cannot be split into words, or is empty.

    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is no command: {error}") from None
    if not words:
        raise UsageError(f"{option} is empty")
    return words


def way_to(host: str, via: str) -> list[str]:
    """Return the words that come before a command that should run on a host.

    `via` is one of `WAYS` or a command of the user's, in which ``{host}`` stands for the host; it
    comes at the end where it stands nowhere.
    """
    words = split_words(WAYS.get(via, via), "--via")
    if not any("{host}" in word for word in words):
        words.append("{host}")
    return [word.replace("{host}", host) for word in words]


def ask_hosts(
    hosts: Sequence[str],
    *,
    via: str,
    command: Sequence[str],
    timeout_s: float,
    say: Callable[[str], None],
) -> tuple[Answer, ...]:
    """Run a command on each host, each within `timeout_s`, and return the answers by host.

    `say` hears of each one as it comes. A host that fails costs its own answer only.

    Raises:
        UsageError: a word of the command would not pass a shell on the way unharmed.

    """
    for word in command:
        # ssh joins the words and gives them to a shell, srun does not: they must suit both.
        if _DAMAGED_WORD.search(word):
            raise UsageError(f"{word!r} cannot be passed on to other hosts")
    calls = {host: [*way_to(host, via), *command] for host in hosts}
    answers: list[Answer] = []
    with ThreadPoolExecutor(min(AT_ONCE, len(hosts)), thread_name_prefix="host") as pool:
        asked = [pool.submit(_ask, host, call, timeout_s) for host, call in calls.items()]
        for done in as_completed(asked):
            answers.append(done.result())
            say(_outcome(answers[-1], len(answers), len(hosts)))
    return tuple(sorted(answers, key=lambda answer: hosts.index(answer.host)))


def _outcome(answer: Answer, number: int, num_hosts: int) -> str:
    what = answer.error
    if answer.dump is not None:
        count = len(answer.dump.ranks)
        what = f"{count} rank{'' if count == 1 else 's'}"
    return f"{answer.host} ({number} of {num_hosts} hosts): {what}"


def _ask(host: str, call: Sequence[str], timeout_s: float) -> Answer:
    try:
        return Answer(host, read_node_dump(_output(call, timeout_s)))
    except subprocess.TimeoutExpired:
        return Answer(host, None, f"no answer within {timeout_s:.3g} s")
    except OSError as error:
        return Answer(host, None, f"{call[0]} cannot be run: {error.strerror}")
    except (DamagedFileError, _HostError) as error:
        return Answer(host, None, str(error))


class _HostError(Exception):
    """The command failed on the host or did not get there."""


def _output(call: Sequence[str], timeout_s: float) -> bytes:
    with subprocess.Popen(
        call, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            output, complaint = process.communicate(timeout=timeout_s)
        finally:
            _end_family(process)
    if len(output) > MOST_BYTES:
        raise _HostError(f"the answer has {len(output)} bytes")
    if process.returncode not in (0, 1):  # 1: a dump, though not of all ranks
        lines = [line for line in complaint.decode(errors="replace").splitlines() if line.strip()]
        raise _HostError(
            lines[-1].strip().removeprefix("distdiag: ")
            if lines
            else f"ended with status {process.returncode}"
        )
    return output


def _end_family(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the command, with what it started: a shell script starts others."""
    if process.poll() is None:
        for member in _family(process.pid):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                member.kill()


def _family(pid: int) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        yield from (parent, *parent.children(recursive=True))
