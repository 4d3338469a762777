"""One trial of `soak.py`: a program in which something goes wrong, with and without distdiag."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec
import psutil
from soak_faults import CUT, CUT_DONE, FAULTS, RANKS, UNJUDGED, Fault, Story

REPOSITORY: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))
from tests import forked  # noqa: E402 (the folder of a script is not that of the repository)
from tests.integration.nodes.hosts import MASTER, PORT, Hosts, NotPermittedError  # noqa: E402 (the same)

PROGRAM: Final = Path(__file__).with_name("soak_program.py")
TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
BOUND_S: Final = 120.0
GRACE_S: Final = 20.0
"""So long after the launcher has ended something of the run may still be there."""


class Plan(NamedTuple):
    """What goes wrong, to whom and when; how the ranks meet, and who starts them."""

    fault: str
    target: str
    when: str
    meets_by: str
    launcher: str

    @property
    def kind(self) -> Fault:
        """The fault itself."""
        return FAULTS[self.fault]

    @property
    def story(self) -> Story:
        """What the report has to say; `ranks` are there."""
        story = self.kind.story
        if story.ranks is not None or not story.codes:
            return story
        if self.target in RANKS:
            return story._replace(ranks=(RANKS.index(self.target),))  # type: ignore[arg-type]
        return story._replace(ranks=(0, 1) if self.target == "all ranks" else (1,))


class Ended(NamedTuple):
    """How a run ended. `left` are processes that had to be killed."""

    status: int | None
    stdout: tuple[str, ...]
    stderr: str
    left: tuple[str, ...]
    report: dict[str, Any] | None


class Result(msgspec.Struct, frozen=True):
    """A trial, and what was wrong in it."""

    fault: str
    target: str
    when: str
    meets_by: str
    launcher: str
    wrong: tuple[str, ...]
    seconds: float
    stderr: str = ""


def run(plan: Plan, *, checked: bool) -> Ended:
    """Run the program once, to its end."""
    if plan.launcher == "nodes":
        return _run_on_nodes(plan, checked=checked)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        disk = folder / "disk"
        disk.mkdir()
        if plan.kind.disk and checked:
            stack.enter_context(_small_disk(disk, plan.kind.disk))
        run_dir = disk / "run"
        arguments = [plan.fault, plan.target, plan.when, str(folder)]
        arguments += [str(run_dir)] if checked else []
        arguments += ["--gloo"] if plan.meets_by == "gloo" else []
        tool = ("-m", "distdiag.check", "--run-dir", str(run_dir), *plan.kind.options)
        command = [*(tool if checked else ()), str(PROGRAM), *arguments]
        streams = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        status, left = _run(plan, command, folder, streams)
        stdout, stderr = (_text(stream) for stream in streams[1:])
        path = run_dir / "report.json"
        report = msgspec.json.decode(path.read_bytes()) if path.exists() else None
        return Ended(status, tuple(sorted(stdout.splitlines())), stderr, left, report)


@cache
def may_mount() -> bool:
    """Say whether a file system of its own can be made for a run."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _small_disk(Path(folder), 1 << 16):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def _text(stream: IO[str]) -> str:
    stream.seek(0)
    return stream.buffer.read().decode(errors="replace")  # type: ignore[attr-defined,no-any-return]


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[None]:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "soak", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _run(
    plan: Plan, command: Sequence[str], folder: Path, streams: Sequence[IO[str]]
) -> tuple[int | None, tuple[str, ...]]:
    """Return the status of the launcher, and what was left behind."""
    mark = uuid.uuid4().hex
    environ = _environment(mark)
    if plan.launcher == "forked":
        job = forked.start(command, 2, environ, folder, streams)
        status = job.wait(BOUND_S)
        left = _wait_for_rest(mark, GRACE_S if status is not None else 0.0)
        job.close()
        return status, left
    limits = ("bash", "-c", f'ulimit {" ".join(plan.kind.limits)}; exec "$@"', "bash")
    process = subprocess.Popen(
        [
            *(limits if plan.kind.limits else ()),
            *(sys.executable, *TORCHRUN, *plan.kind.launcher, *command),
        ],
        cwd=folder,
        env=environ,
        stdin=streams[0],
        stdout=streams[1],
        stderr=streams[2],
        start_new_session=True,
    )
    try:
        status = process.wait(BOUND_S)
    except subprocess.TimeoutExpired:
        status = None
    left = _wait_for_rest(mark, GRACE_S if status is not None else 0.0)
    process.wait()
    return status, left


def _run_on_nodes(plan: Plan, *, checked: bool) -> Ended:
    """Run one rank on each of two nodes, without a launcher; the status is that of both."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Hosts(folder) as hosts:
        for host in (0, 1):
            arguments = [str(PROGRAM), plan.fault, plan.target, plan.when, folder]
            arguments += [str(hosts.run_dir(host))] if checked else []
            tool = ("-m", "distdiag.check", "--run-dir", str(hosts.run_dir(host)))
            ranks = {"RANK": str(host), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            hosts.start(
                host,
                *(sys.executable, *(tool if checked else ()), *arguments, "--gloo"),
                **(ranks | {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}),
                MASTER_ADDR=MASTER,
                MASTER_PORT=str(PORT),
            )
        ended = _until_nodes_end(hosts, Path(folder))
        left = _wait_for_rest(hosts.mark, GRACE_S if ended else 0.0)
        statuses = [process.poll() for process in hosts.processes]
        said = [line for host in (0, 1) for line in hosts.output(host).splitlines()]
        stdout = sorted(line for line in said if line.startswith("rank "))
        status = (statuses[0] or 0) * 1000 + (statuses[1] or 0) if ended else None
        return Ended(status, tuple(stdout), "\n".join(said), left, hosts.report())


def _until_nodes_end(hosts: Hosts, folder: Path) -> bool:
    """Wait until both ranks have ended; cut the cable when they ask for it."""
    deadline = time.monotonic() + BOUND_S
    while any(process.poll() is None for process in hosts.processes):
        if (folder / CUT).exists() and not (folder / CUT_DONE).exists():
            hosts.cut()
            (folder / CUT_DONE).touch()
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@cache
def may_have_nodes() -> bool:
    """Say whether network namespaces can be made."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Hosts(folder):
                return True
        except NotPermittedError:
            return False


def _environment(mark: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    paths = [str(REPOSITORY), environ.get("PYTHONPATH", "")]
    own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", forked.MARK: mark}
    return environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _wait_for_rest(mark: str, grace_s: float) -> tuple[str, ...]:
    """Wait for what the run has started, kill what does not end, and say what that was."""
    deadline = time.monotonic() + grace_s
    while (living := _living(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for process in living:
        try:
            names.append(" ".join(process.cmdline())[-120:])
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(living, timeout=GRACE_S)
    return tuple(names)


def _living(mark: str) -> list[psutil.Process]:
    """Return the processes of a run, by what they inherited."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get(forked.MARK) == mark
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


class Judge:
    """Knows how each program ends without distdiag, and compares."""

    MOST_PLAIN: Final = 3
    """What ends in several ways by itself is run so often before a difference counts."""

    def __init__(self) -> None:
        self._plain: dict[Plan, list[Ended]] = {}

    def try_out(self, plan: Plan) -> Result:
        """Make a trial, and say what was wrong in it."""
        started = time.monotonic()
        ended = run(plan, checked=True)
        wrong = [*self._disturbed(plan, ended), *_left(ended), *_untrue(plan, ended)]
        return Result(
            *plan,
            wrong=tuple(wrong),
            seconds=time.monotonic() - started,
            stderr=ended.stderr[-6000:] if wrong else "",
        )

    def _disturbed(self, plan: Plan, ended: Ended) -> Iterator[str]:
        """Yield what a user sees that would not be so without distdiag."""
        if plan.kind.hangs:
            return
        known = self._plain.setdefault(plan, [])
        while True:
            if any((e.status, e.stdout) == (ended.status, ended.stdout) for e in known):
                return
            if len(known) >= self.MOST_PLAIN:
                break
            known.append(run(plan, checked=False))
        plain = known[-1]
        if plain.status != ended.status:
            yield f"exit status {ended.status}, {plain.status} without distdiag"
        if plain.stdout != ended.stdout:
            yield f"stdout {ended.stdout}, {plain.stdout} without distdiag"


def _left(ended: Ended) -> Iterator[str]:
    if ended.status is None:
        yield f"it did not end within {BOUND_S:.0f} s"
    for name in ended.left:
        yield f"left running: {name}"


def _untrue(plan: Plan, ended: Ended) -> Iterator[str]:
    """Yield what the report says and is not so, or does not say."""
    story, report = plan.story, ended.report
    if story == UNJUDGED:
        if "distdiag: " not in ended.stderr:
            yield "nothing says that the run was not judged"
        return
    if report is None:
        yield "there is no report"
        return
    outcome = report["run"]["outcome"]
    if not report["complete"]:
        yield f"the report is not complete (outcome {outcome})"
    elif outcome not in story.outcomes:
        yield f"outcome {outcome}"
    loud = [each for each in report["findings"] if each["severity"] != "info"]
    told = [each for each in report["findings"] if each["code"] in story.codes]
    if story.codes and not any(_tells(story, each) for each in told):
        yield f"does not tell it: {[_shown(each) for each in report['findings']]}"
    for each in loud:
        if each not in told:
            yield f"false alarm: {_shown(each)}"


def _tells(story: Story, finding: Mapping[str, Any]) -> bool:
    words = f"{finding['message']} {finding['evidence']}"
    ranks = tuple(finding["ranks"])
    is_who = set(story.ranks or ()) <= set(ranks) if story.with_others else ranks == story.ranks
    return is_who and any(word in words for word in story.words)


def _shown(finding: Mapping[str, Any]) -> str:
    return f"{finding['severity']} {finding['code']} {finding['ranks']} {finding['message'][:200]}"
