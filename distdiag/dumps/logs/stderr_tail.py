"""The last lines that a rank wrote to stderr, where the launcher sends that to a file."""

import os
import re
import stat
from typing import Final

from distdiag.dumps.base import RankDumpSource
from distdiag.events.base import Value
from distdiag.events.stacks import Observed

MOST_BYTES: Final = 16 << 10
MOST_LINES: Final = 40
LONGEST_LINE: Final = 500

# Colours, cursor movements, and whatever else a terminal would obey.
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class StderrTail(RankDumpSource):
    """Read the end of the file that descriptor 2 of a rank is.

    A process that is gone has no descriptors: `watch` remembers the file while it lives.
    """

    name = "stderr"

    def __init__(self) -> None:
        """Remember no file yet."""
        self._paths: dict[int, str] = {}

    def watch(self, pid: int) -> None:
        """Remember which file a process writes to."""
        path = _regular_file(pid)
        if path is not None:
            self._paths[pid] = path

    def observe_rank(self, rank: int, pid: int, timeout_s: float) -> Observed:
        """Tell the last lines, the last one that is not empty as the summary."""
        link = f"/proc/{pid}/fd/2"
        path = _regular_file(pid)
        if path is None:
            # A pid that is used again by a process with another stderr is told as such.
            if os.path.lexists(link) or pid not in self._paths:
                return self.observed(rank, error=_why_not(link))
            path = link = self._paths[pid]
        try:
            data, size = _tail(link)
        except OSError as error:
            return self.observed(rank, error=f"{path} cannot be read: {error.strerror}")
        lines = _clean(data, is_cut=size > len(data))
        values: dict[str, Value] = {"path": path, "size_bytes": size, "tail": "\n".join(lines)}
        last = next((line for line in reversed(lines) if line.strip()), "")
        return self.observed(rank, last.strip() or "stderr is empty", values)


def _regular_file(pid: int) -> str | None:
    link = f"/proc/{pid}/fd/2"
    try:
        return os.readlink(link) if stat.S_ISREG(os.stat(link).st_mode) else None
    except OSError:
        return None


def _why_not(link: str) -> str:
    try:
        target = os.readlink(link)
    except FileNotFoundError:
        return "the process is gone, or has no stderr"
    except OSError as error:
        return f"stderr cannot be looked at: {error.strerror}"
    kind = target.partition(":")[0] if ":" in target else target
    return f"stderr is no file but {kind} (torchrun --log-dir DIR --redirects 3 makes files)"


def _tail(path: str) -> tuple[bytes, int]:
    """Return the end of a file, and how long the file is."""
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - MOST_BYTES))
        return file.read(MOST_BYTES) or b"", size


def _clean(data: bytes, *, is_cut: bool) -> list[str]:
    text = data.decode("utf-8", errors="replace").replace("\r\n", "\n")
    lines = text.split("\n")
    # What a progress bar wrote over with a carriage return was not meant to stay.
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines[1 if is_cut else 0 :]]
    return [_CONTROL.sub("", line)[:LONGEST_LINE] for line in lines if line.strip()][-MOST_LINES:]
