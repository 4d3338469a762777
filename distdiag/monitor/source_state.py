"""In which state the source of the program was when it was started."""

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Final

import xxhash

from distdiag.events.environment import SourceSeen
from distdiag.record.redaction import redacted
from distdiag.record.regular_file import read_regular

_TIMEOUT_S: Final = 20.0
"""A diff of a large working copy on a slow disk takes seconds; nobody waits for this."""
_MOST_SHOWN: Final = 64 << 10


class SourceLook:
    """Looks at the source on a thread of its own, once: git may take long."""

    def __init__(self, script: str | None, folder: str, rank: int) -> None:
        """Begin to look, as `look_at_source` does."""
        self._seen: SourceSeen | None = None
        self._asked = (script, folder, rank)
        threading.Thread(target=self._look, daemon=True).start()

    def poll(self) -> tuple[SourceSeen, ...]:
        """Return what was seen when it is there, once."""
        seen, self._seen = self._seen, None
        return () if seen is None else (seen,)

    def _look(self) -> None:
        self._seen = look_at_source(*self._asked)


def look_at_source(script: str | None, folder: str, rank: int) -> SourceSeen:
    """Read a script, and ask git about the folder that it runs in, in the name of a rank."""
    text = _text_of(script)
    commit = _ask(folder, "rev-parse", "HEAD").strip()
    changes = _ask(folder, "diff", "HEAD", "--no-color", "--no-ext-diff") if commit else ""
    return SourceSeen(
        rank=rank,
        seq=-1,
        time_ns=time.monotonic_ns(),
        script=_shown(text),
        script_digest=xxhash.xxh3_64_hexdigest(text.encode()),
        commit=commit,
        branch=_ask(folder, "rev-parse", "--abbrev-ref", "HEAD").strip() if commit else "",
        changes=_shown(changes),
        changes_digest=xxhash.xxh3_64_hexdigest(changes.encode()),
    )


def _ask(folder: str, *words: str) -> str:
    """Return what git answers, nothing where it does not."""
    # No lock: the user may work in the same copy. No pager, no prompt, no program of theirs.
    settings = ("--no-optional-locks", "--no-pager", "-c", "core.fsmonitor=false")
    try:
        answer = subprocess.run(
            ["git", "-C", folder, *settings, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.decode(errors="replace")


def _text_of(script: str | None) -> str:
    try:
        return read_regular(Path(script)).decode(errors="replace") if script else ""
    except OSError:
        return ""


def _shown(text: str) -> str:
    lines = text[:_MOST_SHOWN].splitlines()
    return "\n".join(" ".join(redacted(line.split(" "))) for line in lines)
