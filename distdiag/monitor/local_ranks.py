"""The ranks of one node, as a process beside them sees and reaches them."""

import os
import platform
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from distdiag.config import Config
from distdiag.dumps.process.memory import count_oom_kills
from distdiag.dumps.process.proc import Process, kill_families, wait_for_end
from distdiag.dumps.process.tree import ProcessTree
from distdiag.engine.rank_status import RankStatuses
from distdiag.events.base import Event
from distdiag.events.environment import NodeClock
from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import Exited, Finished
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.monitor.dump_sources import DumpSources
from distdiag.monitor.guard import HELD
from distdiag.record.run_dir import LaunchFile, RunDir
from distdiag.record.status_page import read_status
from distdiag.record.user_code import main_script
from distdiag.record.wire import Interner
from distdiag.transports.files import LocalFiles

BUSY_S: Final = 0.02
CALM_S: Final = 0.05
IDLE_S: Final = 0.2
IDLE_AFTER_S: Final = 30.0
NOBODY_CAME_S: Final = 120.0
LATE_COMER_S: Final = 10.0
LAST_DUMP_S: Final = 2.0
"""The launcher kills the peers of a rank that raised or died: their stacks are in a hurry."""


def _held_by_guard() -> dict[tuple[int, int], int]:
    """Return the descriptors that the guard has handed down, by pid and start of the process."""
    words = os.environ.get(HELD, "").split()
    numbers = [int(word) for word in words if word.isdecimal()]
    return {
        (pid, began): held
        for pid, began, held in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
    }


class LocalRanks:
    """Follow the files and processes of this node's ranks, and look at them from outside."""

    def __init__(
        self, run_dir: RunDir, launch_file: LaunchFile, config: Config, interner: Interner
    ) -> None:
        """Prepare to follow; nothing is read yet."""
        launch = launch_file.launch
        self.ranks = RankSet(launch.local_ranks)
        self.launcher = Process(launch.parent_pid)
        self._run_dir = run_dir
        self._processes: dict[int, Process] = {}
        self._held = _held_by_guard()
        tree = ProcessTree(lambda: self.pids.values())
        self._source = LocalFiles(run_dir, self.ranks, self._watch, interner, family=tree.use_of)
        self._sources = DumpSources(
            run_dir,
            main_script(launch_file.command, launch_file.cwd),
            lambda: self.pids,
            may_ask_nccl=config.on_hang == "abort",
        )
        self._started_s = self._moved_s = time.monotonic()
        self._all_came_s = 0.0
        self._num_oom_kills = count_oom_kills()
        self._answered: set[int] = set()
        self._has_seen_last = False

    def _watch(self, pid: int, start_ticks: int) -> Process:
        process = self._processes[pid] = Process(
            pid, start_ticks, held=self._held.pop((pid, start_ticks), -1)
        )
        self._sources.meet(pid)
        return process

    @property
    def pids(self) -> Mapping[int, int]:
        """The pids of the ranks that have begun, by rank, whether they still live or not."""
        return self._source.pids

    def clock(self, error_ns: int = 0) -> NodeClock:
        """Read the wall clock of this node beside the clock that orders events."""
        return NodeClock(
            rank=min(self.ranks),
            seq=-1,
            time_ns=time.monotonic_ns(),
            hostname=platform.node(),
            unix_ns=time.time_ns(),
            error_ns=error_ns,
        )

    def poll(self) -> Iterator[Event]:
        """Yield what is new of these ranks."""
        for event in self._source.poll():
            if isinstance(event, Exited) and event.status == -signal.SIGKILL:
                num_killed = count_oom_kills() - self._num_oom_kills
                event = msgspec.structs.replace(event, oom_kills=num_killed)
            self._sources.note(event)
            yield event

    def living(self, gone: RankSet) -> list[Process]:
        """Return the processes of the ranks that have begun, without those that are gone."""
        pids = self.pids
        left_out = {pids[rank] for rank in gone & pids.keys()}
        return [process for pid, process in self._processes.items() if pid not in left_out]

    def kill(self, gone: RankSet) -> None:
        """Kill the ranks that live, and their descendants."""
        kill_families(process.pid for process in self.living(gone))

    def see(self, ranks: Iterable[int], timeout_s: float) -> Iterator[Event]:
        """Yield all that can be seen of ranks that hang, their stacks within `timeout_s`."""
        wanted = set(ranks)
        pids = self._present(wanted)
        stacks = self._sources.stacks(pids, timeout_s)
        # The stacks come last: they are what a verdict waits for.
        yield from self._sources.outside(pids, timeout_s)
        yield from stacks
        for rank in sorted(wanted - pids.keys()):
            yield self._sources.no_process(rank)

    def _present(self, wanted: Iterable[int]) -> dict[int, int]:
        ranks = set(wanted) & self.pids.keys()
        return {r: self.pids[r] for r in ranks if not self._processes[self.pids[r]].is_gone}

    def see_native(self, ranks: Iterable[int]) -> tuple[Stacks, ...]:
        """Return stacks with native frames: it takes up to a minute."""
        return self._sources.native(self._present(ranks))

    def see_last(self, status: RankStatuses) -> Iterator[Event]:
        """When a rank raised or died, yield what can still be seen of its peers; only once."""
        if self._has_seen_last or not (status.raised or status.died):
            return
        self._has_seen_last = True
        yield from self._sources.stacks(self._present(status.undisturbed), LAST_DUMP_S)

    def unanswered(self, status: RankStatuses) -> list[int]:
        """Return the ranks that raised since the last call: they wait for their peers' dumps."""
        new = [rank for rank in status.raised & self.ranks if rank not in self._answered]
        self._answered.update(new)
        return new

    def wait(self, gone: RankSet, *, has_news: bool) -> None:
        """Let a moment pass, a short one while much happens or if a rank ends."""
        now_s = time.monotonic()
        if has_news:
            self._moved_s = now_s
            pause_s = BUSY_S
        else:
            pause_s = CALM_S if now_s - self._moved_s < IDLE_AFTER_S else IDLE_S
        wait_for_end(self.living(gone), pause_s)

    def are_over(self, ended: RankSet) -> bool:
        """Whether none of these ranks will do anything any more, of which so many have ended."""
        if self.ranks <= ended:
            return True
        came = RankSet(self.pids)
        now_s = time.monotonic()
        if not came:
            return self.launcher.is_gone or now_s - self._started_s > NOBODY_CAME_S
        if not came <= ended:
            self._all_came_s = 0.0
            return False
        # All that came have ended; others may still be on their way.
        self._all_came_s = self._all_came_s or now_s
        return self.launcher.is_gone or now_s - self._all_came_s > LATE_COMER_S

    def ends(self) -> Iterator[Event]:
        """Wait for the end of one rank after the other, by status pages and processes alone."""
        for rank in self.ranks:
            while (end := self._end_of(rank)) is None:
                time.sleep(IDLE_S)
            yield end

    def _end_of(self, rank: int) -> Finished | Exited | None:
        now_ns = time.monotonic_ns()
        try:
            status = read_status(self._run_dir.status(rank))
        except (OSError, DamagedFileError):
            is_gone = self.launcher.is_gone
        else:
            if status.finished:
                return Finished(rank=rank, seq=-1, time_ns=now_ns, exit_status=int(status.raised))
            is_gone = Process(status.pid, status.start_ticks).is_gone
        return Exited(rank=rank, seq=-1, time_ns=now_ns) if is_gone else None
