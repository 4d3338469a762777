"""The files below what the user named that may hold curves."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from distdiag.dumps.bystanders import is_skipped_folder, kind_by_name

MOST_FILES: Final = 100_000
_DEEPEST: Final = 32
_EVENTS: Final = "tfevents"
_TABLES: Final = (".csv", ".tsv")
# Files in the folders of runs that hold settings, weights or results, and no curve.
_NO_CURVES: Final = frozenset(
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "model.safetensors.index.json",
        "adapter_config.json",
        "pytorch_model.bin.index.json",
        "wandb-metadata.json",
        "wandb-summary.json",
        "requirements.txt",
        "all_results.json",
        "train_results.json",
        "eval_results.json",
        "args.json",
        "ds_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "chat_template.json",
        "diff.patch",
    ]
)


class TooManyFilesError(Exception):
    """A folder holds more files than are read."""


def files_below(root: Path) -> Iterator[Path]:
    """Yield the files below a folder that may hold curves, in the order of their names.

    Links are not followed, and nothing but regular files is opened later.

    Raises:
        TooManyFilesError: the folder holds more than `MOST_FILES` files.
        OSError: a folder cannot be listed.

    """
    num_files = 0
    depth = len(root.parts)
    for folder, folders, names in os.walk(root, onerror=_raise):
        place = Path(folder)
        is_deep = len(place.parts) - depth >= _DEEPEST
        folders[:] = [] if is_deep else sorted(n for n in folders if not is_skipped_folder(n))
        for name in sorted(names, key=_in_order):
            num_files += 1
            if num_files > MOST_FILES:
                raise TooManyFilesError
            if may_hold_curves(place / name):
                yield place / name


def _raise(error: OSError) -> None:
    raise error


def may_hold_curves(path: Path) -> bool:
    """Whether a file of a folder is worth opening, by its name and kind."""
    name = path.name.lower()
    if name in _NO_CURVES or name.startswith("."):
        return False
    if kind_by_name(name) and _EVENTS not in name and not name.endswith(_TABLES):
        return False
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def is_named_so(path: Path) -> bool:
    """Whether the name says that a file of a folder holds curves, so that it is missed if not."""
    return _EVENTS in path.name or path.name == "trainer_state.json" or path.suffix == ".wandb"


def _in_order(name: str) -> tuple[str, int, str]:
    """Sort ``log.2`` before ``log.10``."""
    digits = "".join(c for c in name if c.isdigit())[:18]
    letters = "".join(c for c in name if not c.isdigit())
    return letters, int(digits) if digits.isascii() and digits else -1, name
