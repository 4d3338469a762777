"""Which files are looked at, and their text."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from distdiag.events.errors import DamagedFileError, UsageError
from distdiag.lint.modules import MAX_BYTES

# A file without any of these words has nothing that a rule could say something about.
_WORDS: Final = (
    "main_process",
    "master_process",
    "is_main",
    "is_master",
    "process_zero",
    "global_zero",
    "process_index",
    "procid",
    "torch.distributed",
    "from torch import distributed",
    "import deepspeed",
    "from deepspeed",
    "wait_for_everyone",
    "distributedsampler",
    "fully_shard",
)
_RANK: Final = re.compile(r"rank(?!ing|ed)")


def python_files(given: Sequence[Path]) -> Iterator[Path]:
    """Yield the files that were named, and the ``*.py`` files below the folders that were.

    Hidden folders, virtual environments and caches below a named folder are left out.

    Raises:
        UsageError: something that was named does not exist.

    """
    seen: set[Path] = set()
    for path in given:
        if not path.exists() and path != STDIN:
            raise UsageError(f"{path}: no such file or folder")
        for file in _below(path) if path.is_dir() else (path,):
            if file not in seen:
                seen.add(file)
                yield file


STDIN: Final = Path("-")
"""Stands for the text that was piped in."""


def read_text(path: Path) -> str:
    """Return the text of a Python file; bytes that are no UTF-8 are replaced.

    Raises:
        DamagedFileError: it cannot be read or is beyond 2 MB.

    """
    try:
        if not path.is_file():
            raise DamagedFileError(f"{path}: not a regular file")
        if path.stat().st_size > MAX_BYTES:
            raise DamagedFileError(f"{path}: larger than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read: {error.strerror}") from error


def is_worth_parsing(text: str) -> bool:
    """Say whether a file can hold anything that depends on the ranks of a job."""
    lowered = text.lower()
    return any(word in lowered for word in _WORDS) or (
        "rank" in lowered and _RANK.search(lowered) is not None
    )


def _below(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if _is_entered(Path(where, f)))
        yield from (Path(where, file) for file in sorted(files) if file.endswith(".py"))


def _is_entered(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name == "__pycache__"
    return not hidden and not (folder / "pyvenv.cfg").exists()
