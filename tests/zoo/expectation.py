"""Read what must be found in each zoo entry."""

import tomllib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from tests.zoo.patch import apply_patch

__all__ = ["ZOO", "Expectation", "ZooEntry", "load_entries", "read_expectation"]

ZOO = Path(__file__).resolve().parent

Outcome = Literal["hang", "fail", "silent"]
HangClass = Literal[
    "deadlock",
    "missing-rank",
    "dead-rank",
    "straggler",
    "data-loader",
    "file-system",
    "gil",
    "teardown",
    "initialisation",
    "checkpoint",
    "compilation",
    "store-wait",
    "lock",
]


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tool must say about one bug, and what the bug does on its own.

    A finding counts when its code is of one of `families` and it names one of `ranks`, `lines`
    (of bug.py) or `subjects`. Where there is a `tie`, the records of two ranks alone do not tell
    who is wrong, so that a finding may also name the peers beside `ranks`, but not instead of them.
    `evidence_lines` are the sides of a conflict: of each side the same finding must also show one
    line, as its location or in its evidence. `world_size` is the number of ranks to run.
    `codes` document the best answers, and `hang_class` the kind of hang; the score uses neither.
    `missed` says why distdiag does not find the bug yet. With `mode` "parity" only a comparison of
    runs can find it: `distdiag parity` with the options `parity_args` takes the place of one run.
    Where the packages that it `needs` are not installed, the entry is left out.
    """

    source: str
    title: str
    outcome: Outcome
    families: tuple[str, ...]
    codes: tuple[str, ...]
    ranks: tuple[int, ...]
    lines: tuple[int, ...]
    evidence_lines: tuple[tuple[int, ...], ...] = ()
    subjects: tuple[str, ...] = ()
    tie: bool = False
    hang_class: HangClass | None = None
    world_size: int = 2
    missed: str = ""
    mode: Literal["check", "parity"] = "check"
    parity_args: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


class ZooEntry(msgspec.Struct, frozen=True):
    """One folder of the zoo."""

    id: str
    folder: Path
    expectation: Expectation

    @property
    def missing(self) -> list[str]:
        """Return the packages that it needs and that are not installed."""
        return [name for name in self.expectation.needs if find_spec(name) is None]

    @property
    def bug(self) -> Path:
        """Return the script with the bug."""
        return self.folder / "bug.py"

    @property
    def fix_patch(self) -> Path:
        """Return the smallest right fix, a unified diff of the script."""
        return self.folder / "fix.patch"

    @property
    def fixed_text(self) -> str:
        """Return the text of the script with the fix."""
        return apply_patch(self.bug.read_text(), self.fix_patch.read_text())


def read_expectation(path: Path) -> Expectation:
    """Read one expect.toml."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Expectation)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error


def load_entries(only: Iterable[str] = ()) -> list[ZooEntry]:
    """Return the entries of the zoo by id, or those of `only`."""
    folders = {path.parent.name: path.parent for path in sorted(ZOO.glob("*/expect.toml"))}
    wanted = list(only) or list(folders)
    unknown = sorted(set(wanted) - set(folders))
    if unknown:
        raise ValueError(f"no such zoo entry: {', '.join(unknown)}; known: {', '.join(folders)}")
    return [
        ZooEntry(name, folders[name], read_expectation(folders[name] / "expect.toml"))
        for name in wanted
    ]
