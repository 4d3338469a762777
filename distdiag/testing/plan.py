"""What pytest's own process and the ranks of a test exchange, as files in one folder.

<folder>/plan.json        what the ranks shall do
         options.pickle   the options of pytest, by name
         fixtures.pickle  the values of fixtures, by name, each pickled by itself
         rank-1.log       what rank 1 wrote to stdout and stderr
         rank-1.began     exists when rank 1 has met the others
         rank-1.result    how the test went there (`RankResult`)
         run/             the run directory of the observation
"""

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from distdiag.config import FailOn
from distdiag.events.errors import UNDECODABLE
from distdiag.record.run_dir import write_atomically

A = TypeVar("A")
R = TypeVar("R")

Reuse = Literal["module"]
"""For which tests the process that ranks are forked from is kept."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of ``@pytest.mark.distdiag``, checked."""

    world_size: tuple[int, ...] = (2,)
    backend: str = "gloo"
    timeout: float = 60.0
    fail_on: FailOn = "error"
    reuse: Reuse | None = None


class ParityRun(msgspec.Struct, frozen=True, kw_only=True):
    """Which call of `assert_parity` within the test is to be measured."""

    call: int


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank of one test does. `nodeid` is the test's, `file` the one that defines it."""

    nodeid: str
    file: str
    world_size: int
    backend: str
    timeout: float
    hang_timeout: float
    search_path: tuple[str, ...]
    parity: ParityRun | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a step function returned: `values` by name, and the dtype of each.

    The values of names in `series` belong to one step each.
    """

    values: dict[str, list[float]]
    dtypes: dict[str, str]
    series: tuple[str, ...] = ()


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """How the test went on one rank: pytest's reports as it serialises them, by phase."""

    reports: tuple[dict[str, Any], ...] = ()
    problem: str = ""
    measured: Measured | None = None


class Folder:
    """The paths of one run of one test."""

    def __init__(self, root: Path) -> None:
        """Name the paths; nothing is created."""
        self.root = root
        self.plan = root / "plan.json"
        self.options = root / "options.pickle"
        self.fixtures = root / "fixtures.pickle"
        self.run = root / "run"

    def log(self, rank: int) -> Path:
        """Return where the output of a rank goes."""
        return self.root / f"rank-{rank}.log"

    def began(self, rank: int) -> Path:
        """Exists when the process group is made on a rank and its test begins."""
        return self.root / f"rank-{rank}.began"

    def result(self, rank: int) -> Path:
        """Return where a rank leaves its `RankResult`."""
        return self.root / f"rank-{rank}.result"

    def read_result(self, rank: int) -> RankResult | None:
        """Return what a rank has reported so far, if anything."""
        try:
            return msgspec.msgpack.decode(self.result(rank).read_bytes(), type=RankResult)
        except (OSError, *UNDECODABLE):
            return None

    def write_result(self, rank: int, result: RankResult) -> None:
        """Keep what a rank reports; called again when there is more."""
        write_atomically(self.result(rank), msgspec.msgpack.encode(result, enc_hook=str))


def pickled(values: Mapping[str, object]) -> dict[str, bytes]:
    """Return the pickled form of those values that have one."""
    forms = {name: converted(pickle.dumps, value) for name, value in values.items()}
    return {name: form for name, form in forms.items() if form is not None}


def converted(convert: Callable[[A], R], given: A) -> R | None:
    """Return what pickle makes of the user's object; None if that raised anything."""
    try:
        return convert(given)
    except Exception:  # noqa: BLE001 (code of the object runs here)
        return None
