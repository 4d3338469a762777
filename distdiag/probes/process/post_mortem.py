"""Lets the monitor have the stacks and the flight recorder of a rank that is stuck.

Two ways lead to the stacks where nobody may read them from outside. While the agent's thread runs,
it writes them itself. Once the GIL is held for ever, faulthandler writes them in the handler of a
signal, which the monitor sends to the agent's thread and to no other: no system call of the script
or of a library is interrupted.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from typing import ClassVar, Final

import msgspec

from distdiag.probes.base import Probe
from distdiag.record.guard import Guard
from distdiag.record.private_file import KeptDescriptor, open_private
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import RunDir, StackSignal, write_atomically

# The flight recorder of torch, dumped from within, as JSON: that resolves no stacks.

_DUMPS: Final = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
"""That of NCCL, in builds that have it, and that of all other backends."""
_SIZES: Final = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_ENTRIES: Final = b'"entries"'
"""The JSON of a recorder that has recorded nothing lacks this key."""


def dump_flight_recorder() -> tuple[bytes, bytes | None]:
    """Return the recorder's JSON, and that of a second recorder where both have recorded.

    Where there is nothing to return, the JSON is ``{"error": "why"}``.
    """
    c10d = sys.modules.get("torch._C._distributed_c10d")
    if c10d is None:
        return _error("torch.distributed is not imported"), None
    size_name = next((name for name in _SIZES if name in os.environ), None)
    if size_name is not None and os.environ[size_name].strip() == "0":
        return _error(f"the flight recorder is off: {size_name} is 0"), None
    known = [dump for name in _DUMPS if (dump := getattr(c10d, name, None)) is not None]
    if not known:
        return _error("this torch has no flight recorder that writes JSON"), None
    try:
        dumps = [data for dump in known if _ENTRIES in (data := bytes(dump()))]
    except RuntimeError as error:
        return _error(f"the flight recorder failed: {error}"), None
    if not dumps:
        return _error("the flight recorder has no entries"), None
    return dumps[0], dumps[1] if len(dumps) > 1 else None


def _error(reason: str) -> bytes:
    return msgspec.json.encode({"error": reason})


# The probe.

# The ends of the real-time range are taken: the C library's threads, debuggers.
_CANDIDATES: Final = range(signal.SIGRTMAX - 5, signal.SIGRTMIN + 8, -1)
_DEFAULT: Final = 0
_IGNORE: Final = 1
_MOST_NAMES: Final = 512
_MOST_LOST: Final = 16
_LONGEST_NAME: Final = 100
_ROOM: Final = 512
"""Bytes that no C library's ``struct sigaction`` needs; it begins with the handler's address."""


class PostMortem(Probe):
    """Answers the monitor from the agent's own thread, or from a signal handler."""

    name: ClassVar[str] = "post-mortem"

    def __init__(self, recorder: Recorder, run_dir: RunDir) -> None:
        """Answer nothing until `install`."""
        super().__init__(recorder)
        self._run_dir = run_dir
        self._file: KeptDescriptor | None = None
        self._signal = 0
        self._handler = _DEFAULT
        self._reported: StackSignal | None = None
        self._num_lost = 0

    def _install(self) -> None:
        file = self._open()
        self._signal = _free_signal()
        self._take(file)

    def _open(self) -> KeptDescriptor:
        # No file object: Python would warn at its end that nobody closed it.
        path = self._run_dir.stacks(self.recorder.rank)
        return KeptDescriptor(open_private(path, os.O_WRONLY | os.O_APPEND))

    def _take(self, file: KeptDescriptor) -> None:
        # What faulthandler puts back when Python ends: a late signal then changes nothing.
        _set_handler(self._signal, _IGNORE)
        self._handler = _IGNORE
        self._file = file
        faulthandler.register(self._signal, file=file.number, all_threads=True, chain=False)
        self._handler = _handler_of(self._signal)

    def uninstall(self) -> None:
        """Answer no longer; the signal is free again."""
        super().uninstall()
        self._run_dir.stack_signal(self.recorder.rank).unlink(missing_ok=True)
        if self._handler == _DEFAULT or _handler_of(self._signal) != self._handler:
            return  # somebody else has it, and may put ours back later: its file stays open
        faulthandler.unregister(self._signal)
        _set_handler(self._signal, _DEFAULT)
        self._handler = _DEFAULT
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def beat(self) -> None:
        """Do what the monitor asks for; the agent's own thread calls this again and again."""
        if self._file is None or self.is_off:
            return
        with Guard(self._give_up):
            file = self._checked(self._file)
            self._tell_signal(file)
            self._answer(file)

    def _checked(self, file: KeptDescriptor) -> KeptDescriptor:
        """Return what stacks are written to, opened again if the script has closed it.

        Until that is seen here nobody writes to the number, which may be a file of the script: the
        monitor sends its signal only after it has looked where the number leads.
        """
        found = _handler_of(self._signal)
        if found not in (_DEFAULT, self._handler):
            raise RuntimeError(f"the handler of signal {self._signal} was replaced by another one")
        if not file.is_ours:
            faulthandler.unregister(self._signal)
            self._take(self._open())
        elif found == _DEFAULT:
            # Frameworks put all signals back when they end, as far as Python knows them.
            self._num_lost += 1
            if self._num_lost > _MOST_LOST:
                raise RuntimeError(
                    f"the handler of signal {self._signal} is removed time and again"
                )
            faulthandler.unregister(self._signal)
            self._take(file)
        return self._file or file

    def _tell_signal(self, file: KeptDescriptor) -> None:
        now = StackSignal(
            pid=os.getpid(),
            thread=threading.get_native_id(),
            signal=self._signal,
            descriptor=file.number,
            names=_thread_names(),
        )
        if now != self._reported:
            path = self._run_dir.stack_signal(self.recorder.rank)
            write_atomically(path, msgspec.json.encode(now))
            self._reported = now

    def _answer(self, file: KeptDescriptor) -> None:
        rank = self.recorder.rank
        wanted = self._run_dir.wanted(rank, "stacks")
        if wanted.exists() and file.is_ours:
            faulthandler.dump_traceback(file.number, all_threads=True)
            wanted.unlink(missing_ok=True)
        wanted = self._run_dir.wanted(rank, "flight")
        if wanted.exists():
            first, second = dump_flight_recorder()
            if second is not None:
                write_atomically(self._run_dir.second_flight(rank), second)
            write_atomically(self._run_dir.flight(rank), first)
            wanted.unlink(missing_ok=True)


def _thread_names() -> dict[int, str]:
    # Not threading.enumerate(): it takes a lock that a stuck thread may hold.
    threads = list(threading._active.items())[:_MOST_NAMES]  # type: ignore[attr-defined]
    names = {ident: thread.name[:_LONGEST_NAME] for ident, thread in threads}
    return {threading.get_ident(): "distdiag", **names}


def _free_signal() -> int:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in _CANDIDATES:
        if number not in blocked and _handler_of(number) == _DEFAULT:
            return number
    raise LookupError("every real-time signal is in use")


def _handler_of(number: int) -> int:
    """Return the address of the handler of a signal, whoever installed it."""
    action = ctypes.create_string_buffer(_ROOM)
    if ctypes.CDLL(None).sigaction(number, None, action) != 0:
        raise OSError(f"sigaction() of signal {number} failed")
    return int.from_bytes(action.raw[: ctypes.sizeof(ctypes.c_void_p)], sys.byteorder)


def _set_handler(number: int, handler: int) -> None:
    # Not signal.signal(): it is for the main thread alone, and the script could see it.
    ctypes.CDLL(None).signal(number, ctypes.c_void_p(handler))
