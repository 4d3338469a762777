"""Ranks that no launcher of ours started join the run when they call `init_process_group`.

A process that is checked, and is no rank of a launcher, `invite`s those that come from it: what it
forks, and by `agent.children` what it starts. The first of them that calls `init_process_group` for
several ranks opens an attempt of the run for this job, and the others of the job join it. A rank
that has joined invites nobody: what it starts are helpers.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from distdiag.agent import children
from distdiag.agent.agent import RankAgent
from distdiag.agent.ends import watch_end
from distdiag.agent.monitor_process import Pid
from distdiag.config import Config
from distdiag.events.collectives import WITHOUT_PROCESSES
from distdiag.events.errors import UNDECODABLE, DamagedFileError, RankError
from distdiag.frameworks.ray import is_worker
from distdiag.probes.base import AnyCallable, Patches, wrap_like
from distdiag.probes.patching.post_import import ImportHook
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import Guard, unobserved, warn
from distdiag.record.regular_file import read_regular
from distdiag.record.run_dir import Job, Launch, RunDir, attempts_of, locked, write_atomically
from distdiag.record.status_page import read_status

_C10D: Final = "torch.distributed.distributed_c10d"
_INVITATION: Final = "join.json"


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """What a process must know to join a run: that of the process that invites, and its options.

    `is_alone`: a job of one rank may join, too: the process that invites is observed by nobody.
    """

    config: dict[str, Any]
    launch: Launch
    command: tuple[str, ...]
    main_script: str | None
    is_alone: bool

    def leave(self, root: Path) -> None:
        """Put it where the processes find it."""
        write_atomically(root / _INVITATION, msgspec.json.encode(self))


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Who a process says that it is when it calls `init_process_group`."""

    rank: int
    job: Job


class Joiner:
    """Waits for the `init_process_group` of this process, and of those that are forked from it."""

    current: ClassVar[Joiner | None] = None

    def __init__(self, root: Path, needs: tuple[str, ...] = (_C10D,)) -> None:
        """Prepare to join the run in this directory, when these modules have been imported."""
        self._root = root
        self._patches = Patches()
        self._needs = set(needs)
        self._hook = ImportHook(needs, self._on_import)
        self._has_joined = False
        self.children = children.Children(root)

    def start(self) -> None:
        """Wait for it from now on."""
        self._hook.start()

    def stop(self) -> None:
        """Do not join any more; what this process starts does not either."""
        self._has_joined = True
        self.children.stop()
        self._hook.stop()
        self._patches.undo()

    def _on_import(self, name: str) -> None:
        self._needs.discard(name)
        if not self._needs:
            module = sys.modules[_C10D]
            self._patches.wrap_everywhere(module, "init_process_group", self._joining)

    def _joining(self, original: AnyCallable) -> AnyCallable:
        signature = inspect.signature(original)

        @wrap_like(original)
        def function(*args: object, **kwargs: object) -> object:
            given = {} if self._has_joined else _given(signature, args, kwargs)
            if not given:
                return original(*args, **kwargs)
            with Guard(self._give_up):
                self._join(_member(given))
            if not self._has_joined:
                result = original(*args, **kwargs)
                with Guard(self._give_up):  # some backends tell a process its rank
                    self._join(_member_after(given))
                return result
            # The agent is there now: the probe of process groups must see the call.
            return vars(sys.modules[_C10D])["init_process_group"](*args, **kwargs)

        return function

    def _give_up(self, error: Exception) -> None:
        self._has_joined = True
        unobserved("joining the run", error)

    def _join(self, member: Member | None) -> None:
        if member is None:
            return
        invitation = msgspec.json.decode(read_regular(self._root / _INVITATION), type=Invitation)
        if member.job.world_size == 1 and not invitation.is_alone:
            return
        if is_worker():
            raise RankError("this rank is an actor of Ray, whose end looks like a crash")
        entered = _enter(self._root, member)
        self._has_joined = True
        self.children.stop()
        children.forget()
        if entered is None:
            if member.rank == 0:
                warn(
                    f"a second job of {member.job.world_size} ranks began while the first one runs:"
                    " its ranks are not observed"
                )
            return
        run_dir, is_first = entered
        self._start_agent(invitation, member, run_dir, is_first=is_first)

    def _start_agent(
        self, invitation: Invitation, member: Member, run_dir: RunDir, *, is_first: bool
    ) -> None:
        before, RankAgent.current = RankAgent.current, None
        is_inviting = os.getpid() == invitation.launch.parent_pid
        if before is not None:
            before.make_way()
        config = Config.from_json(msgspec.json.encode(invitation.config))
        agent = RankAgent(
            _launch(invitation.launch, member, run_dir.attempt),
            msgspec.structs.replace(config, run_dir=self._root, overwrite=False),
            invitation.command,
            main_script=invitation.main_script or _main_file(),
            starts_monitor=is_first,
            awaits_verdict=is_inviting,
        )
        RankAgent.current = agent
        agent.start()
        if not is_inviting or before is None:
            watch_end(agent)


def stand_alone() -> None:
    """Join no run any more, in this process and in those that it starts: it has one of its own."""
    if Joiner.current is not None:
        Joiner.current.stop()
        Joiner.current = None
    children.forget()


def invite(agent: RankAgent, command: tuple[str, ...], main_script: str | None) -> None:
    """Let the ranks that this process starts, or becomes itself, join its run."""
    root = agent.run_dir.root
    Invitation(
        config=msgspec.json.decode(agent.config.to_json()),
        launch=agent.launch,
        command=command,
        main_script=main_script,
        is_alone=False,
    ).leave(root)
    # After the probe of process groups, which must not see the call before the agent of the rank.
    Joiner.current = joiner = Joiner(root, ("torch", _C10D))
    joiner.children.start()
    joiner.start()


def invite_to(root: Path, config: Config, launch: Launch, command: tuple[str, ...]) -> None:
    """Let ranks join the run in this directory that a command starts, which nobody observes."""
    Invitation(
        config=msgspec.json.decode(config.to_json()),
        launch=launch,
        command=command,
        main_script=None,
        is_alone=True,
    ).leave(root)


def expect_to_join() -> None:
    """In a process that was told of a run: join it at `init_process_group`."""
    root = os.environ.get(children.VARIABLE)
    if root and Joiner.current is None:
        Joiner.current = joiner = Joiner(Path(root))
        joiner.start()


def _given(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, Any]:
    """Return what a call is given; nothing if torch refuses it or no processes stand behind it."""
    try:
        given = signature.bind(*args, **kwargs)
    except TypeError:
        return {}
    given.apply_defaults()
    backend = str(given.arguments.get("backend"))
    return {} if any(kind in backend for kind in WITHOUT_PROCESSES) else given.arguments


def _member(given: dict[str, Any]) -> Member | None:
    """Return who this process is, as `init_process_group` will find it; None if that is not said.

    It takes the numbers from its arguments, else from the URL, else from the environment.
    """
    store, url = given.get("store"), urlsplit(str(given.get("init_method") or "env://"))
    query = {name: values[-1] for name, values in parse_qs(url.query).items()}
    numbers = []
    for name in ("rank", "world_size"):
        value = given.get(name)
        if value is None or value < 0:
            told = query.get(name) or (url.scheme == "env" and os.environ.get(name.upper()))
            value = int(told) if told else -1
        numbers.append(int(value))
    rank, world_size = numbers
    if not 0 <= rank < world_size:
        return None
    place = _place(store) if store is not None else str(url.port or url.path)
    if store is None and url.scheme == "env":
        place = os.environ.get("MASTER_PORT", "")
    return Member(rank=rank, job=Job(world_size=world_size, place=place))


def _member_after(given: dict[str, Any]) -> Member | None:
    """Return who this process is when its group is there."""
    group: Untyped = sys.modules[_C10D]
    if not group.is_initialized():
        return None
    store = given.get("store") or group._get_default_store()
    job = Job(world_size=group.get_world_size(), place=_place(store))
    return Member(rank=group.get_rank(), job=job)


def _place(store: Untyped) -> str:
    """Return where the ranks of a job meet, alike on all of them.

    A host has several names, so its port tells; a store in memory has no place.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "port", None) or getattr(store, "path", ""))


def _launch(inviting: Launch, member: Member, attempt: int) -> Launch:
    """Return who this process is, on one node unless the environment tells of more."""
    rank, world_size = member.rank, member.job.world_size
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    told = [int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()]
    local_rank, local_world_size = rank, world_size
    if len(told) == len(names) and told[0] == rank and told[1] < told[2] <= world_size:
        local_rank, local_world_size = told[1:]
    return msgspec.structs.replace(
        inviting,
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        attempt=attempt,
        first_attempt=1,
        is_alone=False,
        max_attempts=attempt + 1,
        master_addr=os.environ.get("MASTER_ADDR", ""),
    )


def _enter(root: Path, member: Member) -> tuple[RunDir, bool] | None:
    """Return the attempt that is the job of this rank, and whether it begins with it.

    None while another job runs. A job that has ended makes room for the next one, and so does a
    rank that has: the job is started again.
    """
    with locked(root):
        newest = RunDir(root, max(attempts_of(root), default=0))
        job = _job_of(newest)
        if job == member.job and not newest.status(member.rank).exists():
            return newest, False
        if job is not None and not all(_is_over(each) for each in newest.statuses()):
            return None
        following = RunDir(root, newest.attempt + 1)
        following.create()
        write_atomically(following.job, msgspec.json.encode(member.job))
        return following, True


def _job_of(run_dir: RunDir) -> Job | None:
    try:
        return msgspec.json.decode(read_regular(run_dir.job), type=Job)
    except (OSError, *UNDECODABLE):
        return None


def _is_over(path: Path) -> bool:
    """Whether the rank of this status page has ended, or is ending."""
    try:
        status = read_status(path)
    except FileNotFoundError:  # it is just being made
        return False
    except DamagedFileError:
        return True
    return status.finished or status.detached or not Pid(status.pid, status.start_ticks).lives


def _main_file() -> str | None:
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path else None
