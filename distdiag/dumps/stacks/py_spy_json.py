"""The JSON that ``py-spy dump --json`` writes."""

import re
from collections.abc import Iterator
from typing import Final

import msgspec

from distdiag.dumps.reading import Dump, DumpReader, RankDump
from distdiag.dumps.stacks.stack_text import MOST_FRAMES, DumpedProcess, python_frame, rank_dumps
from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE, DamagedFileError
from distdiag.events.stacks import ThreadStack

_HEAD: Final = 4096
_SIGN: Final = re.compile(rb'"(?:thread_id|thread_name|owns_gil|os_thread_id)"')


class _SpyFrame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int = 0


class _SpyThread(msgspec.Struct, frozen=True):
    frames: tuple[_SpyFrame, ...]
    pid: int | None = None
    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False


_decode: Final = msgspec.json.Decoder(tuple[_SpyThread, ...]).decode


class PySpyJson(DumpReader):
    """Read the list of threads that py-spy writes; with subprocesses, of several processes."""

    name = "py-spy-json"

    def recognises(self, dump: Dump) -> bool:
        """Look for a list of objects that have py-spy's names."""
        head = dump.data[:_HEAD].lstrip()
        return head.startswith(b"[") and _SIGN.search(head) is not None

    def read(self, dump: Dump) -> Iterator[RankDump]:
        """Yield the stacks of each process."""
        try:
            threads = _decode(dump.data)
        except (*UNDECODABLE, ValueError) as error:
            raise DamagedFileError(f"{dump.path}: not a py-spy dump: {error}") from None
        by_pid: dict[int | None, list[ThreadStack]] = {}
        for thread in threads:
            by_pid.setdefault(thread.pid, []).append(_thread(thread))
        found = (DumpedProcess(tuple(stacks), pid) for pid, stacks in by_pid.items())
        yield from rank_dumps(found, dump.path, self.name)


def _thread(thread: _SpyThread) -> ThreadStack:
    return ThreadStack(
        name=thread.thread_name or f"thread {thread.os_thread_id or '?'}",
        frames=tuple(_frame(frame) for frame in thread.frames[:MOST_FRAMES]),
        holds_gil=thread.owns_gil,
        active=thread.active,
    )


def _frame(frame: _SpyFrame) -> Frame:
    if frame.line <= 0:  # native frames have no line
        return Frame(frame.filename, 0, frame.name, user=False)
    return python_frame(frame.filename, str(frame.line), frame.name)
