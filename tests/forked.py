"""Starts ranks of test programs by forking a process that has imported torch already.

Importing torch takes a rank some two seconds of a core, often longer than what a test program does.
`start` takes the place of `torchrun --standalone` for programs that do not look at how they were
started: each rank gets the arguments, environment, folder, streams and `__main__` of a process of
its own, and nothing of it has run before. What a launcher does is in a process of its own too, the
parent of the ranks. So are the guard and the monitor that a rank starts, which are forked from a
process that has imported them. `stand_in` is a `sys.executable` for code that runs torchrun by
itself. Tests of how ranks are started and ended run the real one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any, NoReturn

__all__ = ["MARK", "Job", "run", "stand_in", "start"]

REPOSITORY = Path(__file__).resolve().parents[1]
MARK = "DISTDIAG_TEST_MARK"
"""The variable by which the processes of a job are found; /proc shows it of forked ones, too."""
PRELOADED = (
    "numpy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "distdiag.check",
    "distdiag.cli.analyze",
    "distdiag.cli.parity",
    "distdiag.cli.report",
    "distdiag.monitor.guard",
    "distdiag.monitor.monitor",
)
"""What most programs import, or the first optimizer does, and the commands of many tests. The agent
then finds there what else it would see being imported, as in a program that attaches late."""
WALKED = ("distdiag.checks", "distdiag.probes", "distdiag.engine", "distdiag.monitor")
"""The packages of which all modules are."""
PRELOADED_FOR = {
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "lightning": ("lightning",),
    "transformers": (
        "accelerate",
        "transformers.trainer",
        "transformers.models.deepseek_v3.modeling_deepseek_v3",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.gpt_oss.modeling_gpt_oss",
        "transformers.models.mixtral.modeling_mixtral",
        "transformers.models.olmoe.modeling_olmoe",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ),
    "inductor": ("torch._inductor.compile_fx",),
}
"""What programs import besides that import one of these libraries, or name this compiler."""
TERMINATE_S = 10.0
"""A rank whose peer has failed has this long to end when it is told so; torchrun gives it 30."""

_MARK_LENGTH = 32
_MOST_BYTES = 1 << 20
_TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
_SERVE = """
from tests.forked import leave, serve
try:
    exec(*serve())
except BaseException as error:
    leave(error)
leave(None)
"""
_STAND_IN = """#!{executable} -IS
import sys
sys.path.insert(0, {repository!r})
from tests.forked import run_instead
run_instead({executable!r}, {address!r}, sys.argv[1:])
"""


class Job:
    """A launcher and its ranks; they end with the connection to it."""

    def __init__(self, address: str, request: Mapping[str, Any], streams: Sequence[int]) -> None:
        """Have it started by the server at this address."""
        self._launcher = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._launcher.connect(address)
        socket.send_fds(self._launcher, [json.dumps(request).encode()], streams)
        self.pid = int(self._launcher.recv(_MOST_BYTES))

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status of the launcher, or None when the time is up."""
        if not select.select([self._launcher], [], [], timeout_s)[0]:
            return None
        reported = self._launcher.recv(_MOST_BYTES)
        return int(reported) if reported else -signal.SIGKILL

    def close(self) -> None:
        """End what still runs."""
        self._launcher.close()


class _Server:
    """The process that ranks are forked from; it ends with the one that started it."""

    def __init__(self) -> None:
        self.address = f"\0forked-{os.getpid()}-{os.urandom(8).hex()}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(self.address)
        listening.listen(16)
        paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        own = {
            "PYTHONPATH": os.pathsep.join(paths),
            # A thread of OpenMP would be missing in what is forked.
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            MARK: "0" * _MARK_LENGTH,
        }
        with listening:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, str(listening.fileno()), self.address[1:]],
                env=os.environ | own,
                stdin=subprocess.PIPE,  # it ends when nobody holds the other side any more
                stdout=subprocess.DEVNULL,  # some libraries say that they are imported
                pass_fds=[listening.fileno()],
                start_new_session=True,
            )
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        self.executable = sys.executable
        self.stand_in = Path(self._folder.name, "python")
        text = _STAND_IN.format(
            executable=sys.executable, repository=str(REPOSITORY), address=self.address
        )
        self.stand_in.write_text(text)
        self.stand_in.chmod(0o700)


_SERVERS: dict[int, _Server] = {}


def _server() -> _Server:
    """Return the server of this process."""
    return _SERVERS.get(os.getpid()) or _SERVERS.setdefault(os.getpid(), _Server())


def start(
    command: Sequence[str],
    nproc: int,
    environ: Mapping[str, str],
    folder: Path | None,
    streams: Sequence[IO[Any]],
) -> Job:
    """Start `nproc` ranks of `script args…` or `-m module args…`; `streams` are the usual three.

    With `nproc=0` it is one process without a launcher; what the command line of distdiag launches
    is forked, too.
    """
    server = _server()
    is_cli = list(command[:2]) == ["-m", "distdiag.cli"]
    request = {
        "command": list(command),
        "nproc": nproc,
        "environ": dict(environ),
        "folder": str(folder or Path.cwd()),
        "executable": str(server.stand_in) if is_cli else server.executable,
    }
    return Job(server.address, request, [stream.fileno() for stream in streams])


def run(
    command: Sequence[str], *, nproc: int = 0, timeout: float, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a module or a script in processes of their own, as `subprocess.run` does with `text`."""
    paths = filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        MARK: uuid.uuid4().hex,
    }
    with (
        open(os.devnull) as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        job = start(command, nproc, os.environ | own, cwd, (stdin, stdout, stderr))
        status = job.wait(timeout)
        job.close()
        stdout.seek(0)
        stderr.seek(0)
        if status is None:
            raise subprocess.TimeoutExpired(command, timeout, stdout.read(), stderr.read())
        return subprocess.CompletedProcess(command, status, stdout.read(), stderr.read())


def stand_in() -> str:
    """Return an executable that is Python, but forks pytest, our commands and torchrun's ranks."""
    return str(_server().stand_in)


def run_instead(executable: str, address: str, arguments: list[str]) -> NoReturn:
    """Be the executable that `stand_in` returns."""
    command, nproc = arguments, 0
    if arguments[:4] == _TORCHRUN:
        command, nproc = arguments[5:], int(arguments[4])
    elif arguments[:1] == ["-mpytest"]:
        command = ["-m", "pytest", *arguments[1:]]
    elif arguments[:2] == ["-m", "distdiag.cli"]:
        executable = os.path.abspath(sys.argv[0])  # what it launches is forked, too
    else:
        os.execv(executable, [executable, *arguments])
    request = {
        "command": command,
        "nproc": nproc,
        "environ": {MARK: "0" * _MARK_LENGTH, **os.environ},
        "folder": os.getcwd(),
        "executable": executable,
    }
    job = Job(address, request, [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(job.pid, number))
    os._exit((job.wait() or 0) & 0xFF)


# From here on: the server, and what is forked from it.


class _KeptGroups(dict[Any, Any]):
    """The process groups of a rank, none of which is taken apart before the rank ends.

    A model may outlive `destroy_process_group`. Its end is then the end of the group, for which
    torch (seen in 2.13) waits until gloo's threads have ended, and holds the GIL meanwhile. A
    thread that lets go of a tensor at that moment waits for the GIL for ever. A busy machine with
    programs this short saw it in a quarter of all runs, without the agent too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []

    def __setitem__(self, group: Any, backend_and_store: Any) -> None:
        self._kept.append(group)
        super().__setitem__(group, backend_and_store)


def serve() -> tuple[CodeType, dict[str, Any]]:
    """Fork a launcher for each request; return in a rank only: what it has to run, and where.

    Requests for programs of large libraries go to a copy of this process that has imported these.
    A rank must run it at the bottom of the stack, where it would be in a process of its own.
    """
    _prepare()
    requests: Any = socket.socket(fileno=int(sys.argv[1]))
    monitor_process: Any = sys.modules["distdiag.agent.monitor_process"]
    monitor_process.run_guard = partial(_run_guard, f"\0{sys.argv[2]}")
    copies: dict[tuple[str, ...], socket.socket] = {}
    is_copy = False
    while requests in select.select([requests, 0], [], [])[0]:
        message, streams, client = _next_request(requests, is_copy)
        request = json.loads(message)
        libraries = () if is_copy or "guard" in request else _libraries_of(request)
        if libraries and libraries not in copies:
            copies[libraries], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                requests, is_copy = theirs, True
                _import(chain.from_iterable(map(PRELOADED_FOR.__getitem__, libraries)))
        if libraries and not is_copy:
            socket.send_fds(copies[libraries], [message], [*streams, client.fileno()])
        elif not libraries and os.fork() == 0:
            requests.close()
            if "guard" in request:
                _be_guard(request, streams[0], client)
            return _launch(request, streams, client)
        client.close()
        for descriptor in streams:
            os.close(descriptor)
    os._exit(0)


def _prepare() -> None:
    """Import what nearly all ranks do, and see that it can be forked."""
    sys.path[0] = str(REPOSITORY)
    _import(PRELOADED)
    sys.modules["torch.distributed.distributed_c10d"]._pg_map = _KeptGroups()  # type: ignore[attr-defined]
    for package in WALKED:
        path = importlib.import_module(package).__path__
        _import(module.name for module in pkgutil.walk_packages(path, f"{package}."))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the launchers


def _import(names: Iterable[str]) -> None:
    for name in names:
        with suppress(ImportError):  # some need what is not installed
            importlib.import_module(name)
    tasks = os.listdir("/proc/self/task")
    if len(tasks) != 1:
        raise RuntimeError(f"{len(tasks)} threads: what is forked would lack all but one")
    # Otherwise each of them would soon walk over all of this, which copies it.
    gc.collect()


def _libraries_of(request: Mapping[str, Any]) -> tuple[str, ...]:
    """Return for which of `PRELOADED_FOR` the script of a request asks."""
    paths = [Path(request["folder"], each) for each in request["command"]]
    script = next((path for path in paths if path.suffix == ".py" and path.is_file()), None)
    text = script.read_text(errors="replace") if script else ""
    # What a function imports may be intended to find something, as a variable of the environment.
    imported = set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE))
    compilers = {"inductor"} if "inductor" in request["command"] else set()
    return tuple(sorted((imported | compilers) & PRELOADED_FOR.keys()))


def _next_request(requests: socket.socket, is_copy: bool) -> tuple[bytes, list[int], socket.socket]:
    """Return what is asked for, the streams, and who asks."""
    if is_copy:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 4)
        if not message:  # whose copy it is has ended
            os._exit(0)
        return message, descriptors[:3], socket.socket(fileno=descriptors[3])
    client, _ = requests.accept()
    message, streams, _, _ = socket.recv_fds(client, _MOST_BYTES, 3)
    return message, streams, client


def _launch(
    request: Mapping[str, Any], streams: list[int], client: socket.socket
) -> tuple[CodeType, dict[str, Any]]:
    """Be the launcher, which never returns, and return in its ranks."""
    os.setsid()
    _be_as_asked(request, streams)
    sys.executable = request["executable"]
    nproc, failures = request["nproc"], tempfile.mkdtemp(prefix="forked-")
    listening = socket.create_server(("127.0.0.1", 0))
    pids = {}
    for rank in range(max(nproc, 1)):
        pid = os.fork()
        if pid == 0:
            port = listening.getsockname()[1]
            listening.close()
            client.close()
            if nproc:
                error_file = os.path.join(failures, f"{rank}.json")
                os.environ.update(_rank_environment(rank, nproc, port, error_file))
            return _main_of(request["command"])
        pids[pid] = rank
    status = 1
    try:
        client.send(str(os.getpid()).encode())
        if nproc:
            store = _store_on(listening)  # noqa: F841 (the ranks use it while it lives)
        status = _watch(pids, client, failures if nproc else None)
        shutil.rmtree(failures, ignore_errors=True)
    finally:
        with suppress(OSError):
            client.send(str(status).encode())
        os._exit(status & 0xFF)


def _run_guard(address: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have guard and monitor forked, in the place of `distdiag.agent.monitor_process.run_guard`."""
    request = {
        "guard": list(arguments),
        "rank": os.getpid(),
        "environ": dict(environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(address)
        socket.send_fds(client, [json.dumps(request).encode()], [2])
        if not client.recv(_MOST_BYTES):
            raise OSError("it was not forked")


def _be_guard(request: Mapping[str, Any], stream: int, client: socket.socket) -> NoReturn:
    """Be what runs `distdiag.monitor.guard`; its monitor is forked where it would be spawned."""
    from distdiag.monitor import guard

    os.setsid()
    _be_as_asked(request, [os.open(os.devnull, os.O_RDONLY), stream, os.dup(stream)])
    intermediate = os.fork()
    if intermediate:
        client.send(str(os.waitpid(intermediate, 0)[1]).encode())
        os._exit(0)
    client.close()
    # What the rank is a child of holds the other ranks.
    os.getppid = lambda: request["rank"]  # type: ignore[assignment]
    os.posix_spawn = partial(_fork_monitor, os.posix_spawn)  # type: ignore[assignment]
    os._exit(guard.main(request["guard"]))


def _fork_monitor(spawn: Any, path: str, command: Sequence[str], environ: object) -> int:
    """Take the place of `spawn` in a guard; the environment is the guard's own."""
    pid = os.fork()
    if pid:
        return pid
    os.posix_spawn = spawn
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # one was that of the listing
            if not os.get_inheritable(descriptor):
                os.close(descriptor)
    try:
        gc.freeze()  # as above: a monitor looks for no objects
        exec(*_main_of(command[2:]))
    finally:
        leave(sys.exc_info()[1])


def _be_as_asked(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    _set_environment(request["environ"])
    os.chdir(request["folder"])


def leave(error: BaseException | None) -> NoReturn:
    """End a rank as the interpreter does, but for taking apart what it has imported.

    That takes half a second, in which nothing of the program or the agent runs any more.
    """
    status: object = 0
    if isinstance(error, SystemExit):
        status = error.code
        if not isinstance(status, int | None):
            sys.stderr.write(f"{status}\n")
            status = 1
    elif error is not None:
        trace = error.__traceback__
        error = error.with_traceback(trace.tb_next if trace else None)
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(int(status or 0) & 0xFF)  # type: ignore[call-overload]


def _set_environment(environ: Mapping[str, str]) -> None:
    """Let this process have another environment; of that /proc shows the mark only."""
    os.environ.clear()
    os.environ.update(environ)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])
    block = ctypes.string_at(begin, end - begin)
    place = block.find(f"{MARK}=".encode())
    mark = environ[MARK].encode()
    assert place >= 0 and len(mark) == _MARK_LENGTH
    ctypes.memmove(begin + place + len(MARK) + 1, mark, _MARK_LENGTH)


def _rank_environment(rank: int, nproc: int, port: int, error_file: str) -> dict[str, str]:
    """Return what torchrun tells a rank."""
    values = {
        **dict.fromkeys(("LOCAL_RANK", "RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("LOCAL_WORLD_SIZE", "WORLD_SIZE", "ROLE_WORLD_SIZE"), nproc),
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "ROLE_NAME": "default",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": f"forked-{os.getppid()}",
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    return {name: str(value) for name, value in values.items()}


def _main_of(command: Sequence[str]) -> tuple[CodeType, dict[str, Any]]:
    """Make the process what Python makes of it for this command line; return what it runs."""
    import numpy

    numpy.random.seed()  # Python does so for its own generator
    sys.orig_argv = [sys.executable, *command]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if command[0] == "-m":
        spec = importlib.util.find_spec(command[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{command[1]}.__main__")
        assert spec is not None and spec.loader is not None
        path, first = str(spec.origin), os.getcwd()
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
    else:
        path, first = command[0], os.path.dirname(os.path.realpath(command[0]))
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        main.__package__, main.__loader__ = None, SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.argv = [path, *command[1 + (command[0] == "-m") :]]
    sys.path[0] = first
    return code, main.__dict__


def _store_on(listening: socket.socket) -> Any:
    from torch.distributed import TCPStore

    return TCPStore(
        "localhost",
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _watch(pids: dict[int, int], client: socket.socket, failures: str | None) -> int:
    """Wait for the ranks, as torchrun does: when one fails the others are told to end.

    Return the status of a process without a launcher, which has no folder for `failures`.
    """
    reported: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: reported.append(number))
    status = 0
    kill_s = float("inf")
    while pids:
        pid, how = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            rank = pids.pop(pid)
            ended = os.waitstatus_to_exitcode(how)
            if failures is None:
                return ended
            if ended and not reported:
                status = 1
                sys.stderr.write(f"rank {rank} failed, exitcode  : {ended} (pid: {pid})\n")
                sys.stderr.write(_error_message(failures, rank))
                reported.append(signal.SIGTERM)
            continue
        if reported and kill_s == float("inf"):
            status = 1
            kill_s = time.monotonic() + TERMINATE_S
            _signal(pids, reported[0])
        if time.monotonic() > kill_s:
            _signal(pids, signal.SIGKILL)
        if select.select([client], [], [], 0.01)[0]:  # nobody waits for them any more
            _signal(pids, signal.SIGKILL)
            break
    return status


def _signal(pids: dict[int, int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)


def _error_message(failures: str, rank: int) -> str:
    """Return what the rank left for the launcher to say."""
    try:
        text = Path(failures, f"{rank}.json").read_text()
    except OSError:
        return ""
    return f"{json.loads(text)['message']['message']}\n"
