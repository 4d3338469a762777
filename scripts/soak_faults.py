"""What goes wrong in a trial of `soak.py`, and what its report has to say of it.

A fault is done by the program itself (`soak_program.py`), at a certain step, so that the same thing
happens at the same place in each run. It is done by the rank that it befalls; what befalls a
process beside the ranks is done by rank 1.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple

BEGIN, MIDDLE, END = "begin", "middle", "end"
"""When it happens: in the first line of the program, in the middle of its steps, after the last."""

Target = Literal["rank 0", "rank 1", "all ranks", "monitor", "torchrun", "nodes"]
RANKS: Final[tuple[Target, ...]] = ("rank 0", "rank 1")
CUT, CUT_DONE = "cut", "cut-done"
"""Files by which a program asks for the cable to be cut, and is told that it was."""
LIVES_ON_S: Final = 3.0
"""A child that outlives its rank does so for this long."""
STOPPED_S: Final = 1.0


class Scene(NamedTuple):
    """What a fault can reach. `run_dir` is None in a run without distdiag."""

    rank: int
    folder: Path
    run_dir: Path | None

    def watchers(self) -> list[int]:
        """Return the guard, the monitor, and who stands behind them; without distdiag nobody."""
        if self.run_dir is None:
            return []
        path = self.run_dir / "attempt-0" / "monitor.pids"
        return [int(line.split()[0]) for line in path.read_text().splitlines()]


class Story(NamedTuple):
    """What a report must say: the outcome, and of one finding the code, a word, the ranks.

    Without a code there is no finding above info. `ranks` are those that the fault befell, unless
    it says something else. `with_others`: the finding may name others as well, which a launcher
    ended in the same way within the same second.
    """

    outcomes: tuple[str, ...]
    codes: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    with_others: bool = False


HEALTHY: Final = Story(("finished",))
UNJUDGED: Final = Story(())
"""There is no place for a report, or none of it: the ranks must say so on stderr."""


class Fault(NamedTuple):
    """One kind of fault. `options` are those of distdiag, `launcher` those of torchrun.

    `limits` are put before the launcher; `disk` is the room in bytes that a file system of its own
    has for the run directory. `hangs`: without distdiag the program would run for ever.
    With `gloo` and `files` the ranks may meet by these; with `nodes` they may be on two nodes.
    """

    act: Callable[[Scene], object]
    story: Story
    targets: tuple[Target, ...] = RANKS
    when: tuple[str, ...] = (MIDDLE,)
    options: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    disk: int = 0
    hangs: bool = False
    gloo: bool = True
    files: bool = True
    nodes: bool = False


def _signal(*numbers: signal.Signals) -> Callable[[Scene], None]:
    def send(_: Scene) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
        time.sleep(60)

    return send


def _to_launcher(*numbers: signal.Signals) -> Callable[[Scene], None]:
    def send(_: Scene) -> None:
        for number in numbers:
            os.kill(os.getppid(), number)
            time.sleep(0.05)

    return send


def _to_watchers(number: signal.Signals, *which: int) -> Callable[[Scene], None]:
    def send(scene: Scene) -> None:
        watchers = scene.watchers()
        for place in which if watchers else ():
            os.kill(watchers[place], number)

    return send


GUARD, MONITOR, BEHIND = 0, 1, 2
_kill_monitor = _to_watchers(signal.SIGKILL, MONITOR)
_kill_guard = _to_watchers(signal.SIGKILL, GUARD)
_kill_both = _to_watchers(signal.SIGKILL, GUARD, MONITOR)
_kill_all = _to_watchers(signal.SIGKILL, BEHIND, GUARD, MONITOR)


def _kill_guard_then_monitor(scene: Scene) -> None:
    _kill_guard(scene)
    time.sleep(STOPPED_S)
    _kill_monitor(scene)


def _kill_often(scene: Scene) -> None:
    """Kill five monitors, each as soon as its guard has started it."""
    before = 0
    for _ in range(5):
        deadline = time.monotonic() + 3.0
        while (watchers := scene.watchers()) and watchers[MONITOR] == before:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        for pid in watchers[MONITOR:BEHIND]:
            before = pid
            os.kill(pid, signal.SIGKILL)


def _kill_both_and_raise(scene: Scene) -> None:
    _kill_both(scene)
    raise ValueError("no watchers any more")


def _kill_both_and_self(scene: Scene) -> None:
    _kill_both(scene)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_all_and_raise(scene: Scene) -> None:
    _kill_all(scene)
    raise ValueError("no watchers any more")


def _kill_monitor_and_raise(scene: Scene) -> None:
    _kill_monitor(scene)
    raise ValueError("no monitor for a while")


def _kill_monitor_and_self(scene: Scene) -> None:
    _kill_monitor(scene)
    os.kill(os.getpid(), signal.SIGKILL)


def _pause_monitor(scene: Scene) -> None:
    for pid in scene.watchers()[MONITOR:BEHIND]:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)


def _interrupt_twice(_: Scene) -> None:
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def _interrupt_launcher_twice(_: Scene) -> None:
    parent = os.getppid()
    os.kill(parent, signal.SIGINT)
    time.sleep(0.2)
    os.kill(parent, signal.SIGINT)


def _bus_error(scene: Scene) -> None:
    path = scene.folder / f"truncated-{scene.rank}"
    path.write_bytes(bytes(1 << 14))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
        file.truncate(0)
    mapped[1 << 13]


def _raise(_: Scene) -> None:
    raise ValueError("the batch is empty")


def _no_memory(_: Scene) -> None:
    bytearray(1 << 62)


def _recurse(scene: Scene) -> None:
    _recurse(scene)


def _out_of_address_space(_: Scene) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    [bytearray(1 << 20) for _ in range(1 << 12)]


def _close_all(_: Scene) -> None:
    os.closerange(3, 1024)


def _close_streams(_: Scene) -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.flush()
    os.closerange(0, 3)


def _leave_folder(scene: Scene) -> None:
    folder = scene.folder / f"gone-{scene.rank}"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()


def _child_outlives(_: Scene) -> None:
    if os.fork() == 0:
        time.sleep(LIVES_ON_S)
        os._exit(0)


def _child_is_killed(_: Scene) -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def _child_raises(_: Scene) -> None:
    pid = os.fork()
    if pid == 0:
        raise ValueError("in the child")
    os.waitpid(pid, 0)


def _child_of_child(_: Scene) -> None:
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os.setsid()
            time.sleep(LIVES_ON_S)
        os._exit(0)
    os.waitpid(pid, 0)


def _take_signals(_: Scene) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, lambda *_: None)


def _ignore_signals(_: Scene) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)


def _handle_and_raise(scene: Scene) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _raise(scene)


def _new_group(_: Scene) -> None:
    if os.getpid() != os.getsid(0):
        os.setsid()
    elif os.getpid() != os.getpgid(0):
        os.setpgid(0, 0)


def _pause(_: Scene) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def _stop(_: Scene) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def _fill_disk(scene: Scene) -> None:
    place = scene.run_dir or scene.folder
    with (place.parent / "filling").open("ab", buffering=0) as file:
        try:
            while scene.run_dir is not None:
                file.write(bytes(1 << 16))
        except OSError:
            return


def _fill_disk_and_raise(scene: Scene) -> None:
    _fill_disk(scene)
    raise ValueError("no room any more")


def _small_files(_: Scene) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def _few_files(_: Scene) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 64))


def _remove_run(scene: Scene) -> None:
    if scene.run_dir is not None:
        shutil.rmtree(scene.run_dir)


def _remove_attempt(scene: Scene) -> None:
    if scene.run_dir is not None:
        shutil.rmtree(scene.run_dir / "attempt-0")


def _clock(seconds: float) -> Callable[[Scene], None]:
    def jump(_: Scene) -> None:
        real, real_ns = time.time, time.time_ns
        time.time = lambda: real() + seconds
        time.time_ns = lambda: real_ns() + int(seconds * 1e9)

    return jump


def _replace_process(_: Scene) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", "print('another program')"])


def _raise_once(scene: Scene) -> None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        _raise(scene)


def _die_once(_: Scene) -> None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def _thread_raises(scene: Scene) -> None:
    thread = threading.Thread(target=_raise, args=(scene,))
    thread.start()
    thread.join()


def _forget_everything(_: Scene) -> None:
    os.environ.clear()
    os.umask(0o777)
    sys.path.clear()
    gc.collect()


def _nothing(_: Scene) -> None:
    pass


def _cut(scene: Scene) -> None:
    """Ask for the cable between two nodes to be cut, and wait until it is."""
    (scene.folder / CUT).touch()
    while not (scene.folder / CUT_DONE).exists():
        time.sleep(0.01)


def _raised(kind: str, *codes: str) -> Story:
    return Story(("failed",), codes or ("HNG001",), (kind,))


def _killed(name: str) -> Story:
    return Story(("killed",), ("HNG002",), (name,))


ALWAYS: Final = (BEGIN, MIDDLE, END)
_EARLY: Final = (BEGIN, MIDDLE)
_HANG: Final = ("--hang-timeout", "3", "--on-hang", "abort")
_RESTART: Final = ("--max-restarts", "1")
_MiB: Final = 1 << 20

FAULTS: Final[Mapping[str, Fault]] = {
    "nothing": Fault(_nothing, HEALTHY, ("rank 0",), nodes=True),
    # A rank ends.
    "SIGKILL": Fault(_signal(signal.SIGKILL), _killed("SIGKILL"), when=ALWAYS, nodes=True),
    "SIGTERM": Fault(
        _signal(signal.SIGTERM), _killed("SIGTERM")._replace(with_others=True), when=_EARLY
    ),
    "SIGINT twice": Fault(
        _interrupt_twice, Story(("failed", "killed"), ("HNG001", "HNG002"), ("SIGINT", "Keyboard"))
    ),
    "SIGSEGV": Fault(lambda _: ctypes.string_at(0), _killed("SIGSEGV"), when=_EARLY),
    "SIGBUS": Fault(_bus_error, _killed("SIGBUS")),
    "SIGFPE": Fault(_signal(signal.SIGFPE), _killed("SIGFPE")),
    "abort": Fault(lambda _: os.abort(), _killed("SIGABRT"), when=ALWAYS),
    "MemoryError": Fault(_no_memory, _raised("MemoryError")),
    "no address space": Fault(_out_of_address_space, _raised("MemoryError")),
    "RecursionError": Fault(_recurse, _raised("RecursionError")),
    "os._exit(7)": Fault(
        lambda _: os._exit(7), Story(("failed",), ("HNG002",), ("status 7",)), when=ALWAYS
    ),
    "sys.exit(3)": Fault(
        lambda _: sys.exit(3), Story(("failed",), ("HNG002",), ("status 3",)), when=ALWAYS
    ),
    "sys.exit(text)": Fault(
        lambda _: sys.exit("no data"), Story(("failed",), ("HNG002",), ("no data",))
    ),
    "exception": Fault(_raise, _raised("ValueError"), when=ALWAYS, nodes=True),
    "exception, SIGTERM handled": Fault(_handle_and_raise, _raised("ValueError")),
    "exception everywhere": Fault(_raise, _raised("ValueError"), ("all ranks",), _EARLY),
    "SIGKILL everywhere": Fault(
        _signal(signal.SIGKILL), Story(("killed",), ("HNG002",), ("SIGKILL",)), ("all ranks",)
    ),
    "another program": Fault(_replace_process, HEALTHY, when=(END,)),
    # A rank goes on.
    "exception in a thread": Fault(_thread_raises, HEALTHY),
    "closed descriptors": Fault(_close_all, HEALTHY, gloo=False, when=_EARLY),
    "closed streams": Fault(_close_streams, HEALTHY, when=(END,)),
    "few descriptors left": Fault(_few_files, HEALTHY, gloo=False),
    "removed working directory": Fault(_leave_folder, HEALTHY, (*RANKS, "all ranks"), _EARLY),
    "child outlives": Fault(_child_outlives, HEALTHY, (*RANKS, "all ranks"), ALWAYS),
    "child of a child outlives": Fault(_child_of_child, HEALTHY),
    "child is killed": Fault(_child_is_killed, HEALTHY),
    "child raises": Fault(_child_raises, HEALTHY),
    "all signals handled": Fault(_take_signals, HEALTHY, (*RANKS, "all ranks"), _EARLY),
    "all signals ignored": Fault(_ignore_signals, HEALTHY, (*RANKS, "all ranks"), _EARLY),
    "new session": Fault(_new_group, HEALTHY, ("all ranks",)),
    "clock one day later": Fault(_clock(86_400), HEALTHY, (*RANKS, "all ranks"), _EARLY),
    "clock one day earlier": Fault(_clock(-86_400), HEALTHY, (*RANKS, "all ranks"), _EARLY),
    "environment cleared": Fault(_forget_everything, HEALTHY, (*RANKS, "all ranks"), gloo=False),
    "SIGSTOP, SIGCONT": Fault(_pause, HEALTHY, when=_EARLY),
    "SIGSTOP": Fault(
        _stop,
        Story(("aborted",), ("HNG012",), ("stopped",)),
        options=_HANG,
        hangs=True,
        files=False,
    ),
    # The disk.
    "disk fills": Fault(_fill_disk, HEALTHY, (*RANKS,), _EARLY, disk=8 * _MiB),
    "disk fills, exception": Fault(_fill_disk_and_raise, _raised("ValueError"), disk=8 * _MiB),
    "full disk": Fault(_nothing, UNJUDGED, ("rank 0",), disk=64 << 10),
    "quota of files": Fault(_small_files, HEALTHY, (*RANKS, "all ranks"), _EARLY),
    "quota of files from the start": Fault(_nothing, UNJUDGED, ("rank 0",), limits=("-f", "64")),
    "64 descriptors": Fault(_nothing, HEALTHY, ("rank 0",), limits=("-n", "64")),
    "removed run directory": Fault(_remove_run, UNJUDGED, when=_EARLY),
    "removed attempt": Fault(_remove_attempt, UNJUDGED),
    "cut cable": Fault(_cut, HEALTHY, ("nodes",), gloo=False, files=False, nodes=True),
    # Restarts.
    "restart after exception": Fault(
        _raise_once, Story(("finished",), ("HNG001",), ("ValueError",)), launcher=_RESTART
    ),
    "restart after SIGKILL": Fault(
        _die_once, Story(("finished",), ("HNG002",), ("SIGKILL",)), launcher=_RESTART
    ),
    "two attempts fail": Fault(_raise, _raised("ValueError"), launcher=_RESTART),
    # Who watches.
    "monitor killed": Fault(_kill_monitor, HEALTHY, ("monitor",), ALWAYS, nodes=True),
    "monitor killed five times": Fault(_kill_often, HEALTHY, ("monitor",), _EARLY),
    "monitor paused": Fault(_pause_monitor, HEALTHY, ("monitor",), ALWAYS),
    "guard killed": Fault(_kill_guard, HEALTHY, ("monitor",), ALWAYS),
    "guard killed, then monitor": Fault(_kill_guard_then_monitor, HEALTHY, ("monitor",), ALWAYS),
    "guard and monitor killed": Fault(_kill_both, HEALTHY, ("monitor",), ALWAYS),
    "monitor killed, exception": Fault(_kill_monitor_and_raise, _raised("ValueError"), when=ALWAYS),
    "monitor killed, SIGKILL": Fault(_kill_monitor_and_self, _killed("SIGKILL"), when=ALWAYS),
    "guard and monitor killed, exception": Fault(
        _kill_both_and_raise, _raised("ValueError"), when=ALWAYS
    ),
    "guard and monitor killed, SIGKILL": Fault(
        _kill_both_and_self, _killed("SIGKILL"), when=ALWAYS
    ),
    "all watchers killed": Fault(_kill_all, HEALTHY, ("monitor",), ALWAYS),
    "all watchers killed, exception": Fault(
        _kill_all_and_raise, _raised("ValueError"), when=ALWAYS
    ),
    # The launcher.
    "torchrun SIGKILL": Fault(_to_launcher(signal.SIGKILL), HEALTHY, ("torchrun",), ALWAYS),
    "torchrun SIGTERM": Fault(
        _to_launcher(signal.SIGTERM), Story(("killed",), (), (), ()), ("torchrun",), _EARLY
    ),
    "torchrun SIGINT twice": Fault(
        _interrupt_launcher_twice, Story(("killed", "failed"), (), (), ()), ("torchrun",), _EARLY
    ),
    "torchrun SIGHUP": Fault(
        _to_launcher(signal.SIGHUP), Story(("killed",), (), (), ()), ("torchrun",)
    ),
}
