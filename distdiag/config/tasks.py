"""What the ranks of a parity run have to do: what to record, and which batches to use."""

from pathlib import Path
from typing import Literal, Self

import msgspec

from distdiag.events.base import Frame
from distdiag.events.errors import UNDECODABLE, UsageError


class RecordingTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the runs of a script that are compared.

    Each rank writes what it records below `folder`, and ends after `num_steps` optimizer steps.
    """

    folder: str
    num_steps: int

    def write(self, path: Path) -> None:
        """Keep the task in a file for the ranks."""
        path.write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, path: str) -> Self:
        """Return the task in a file.

        Raises:
            UsageError: it cannot be read, or is something else.

        """
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, *UNDECODABLE) as error:
            raise UsageError(f"{path}: not the task of a recording: {error}") from None


class RoutingTask(RecordingTask, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run whose choices of experts are compared with those of the same run again.

    `seed` seeds the default generators before the script does; None leaves them.
    """

    seed: int | None = None


# What the ranks of a parity run get, and what they report.

Dropout = Literal["on", "off"]


class ParityTask(RecordingTask, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run whose values are compared with those of runs on other numbers of ranks.

    `replayed` is the folder of a recorded run whose batches are used instead of the script's own:
    those of the ranks `sources`, one for each of its data coordinates, joined in this order and
    dealt out evenly to the data coordinates of this run. `perturbation` seeds a change of all
    initial parameters by one unit of rounding, of `perturbation_dtype` where that is the coarser
    one; None leaves them. `padding` has the values by which batches of unequal lengths are filled
    up, by the last part of the name. With `dropout` off nothing is dropped.
    """

    replayed: str = ""
    sources: tuple[int, ...] = ()
    perturbation: int | None = None
    perturbation_dtype: str = ""
    padding: dict[str, float] = {}
    dropout: Dropout = "on"


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its recording at the end.

    `num_given` counts what the outermost model was given where no batch was seen. `data_group` are
    the ranks that its model's wrapper feeds with different data (empty if no wrapper tells),
    `lengths` what `len()` of each data loader was, by the order of their first use. `iterators`
    tell where in the program each iterator of a data loader got its first batch: a rank that uses
    one alone has others behind it than its peers. Batches of those that are `trained` were followed
    by a backward pass, and those in `exhausted` came to their end. `draws_in_forward`: random
    numbers were drawn between a batch and its pass, by a program that had made its optimizer.
    `num_microsteps` are the backward passes of each step. `mesh_sizes` are those of the meshes
    that the parameters are on. `devices` are the types of devices that were used, `peak_memory`
    the most bytes of the host that the process held. `compute_dtype` is the coarsest one that a
    module returned something in or gradients were rounded to. `unreadable` are tensors that could
    not be recorded, with why. `padded` are the parts of batches, by their paths, that were filled
    up with a value that the program never named, and `padded_at` the first step that got one;
    `is_filled`: some were, be it with values that their names suggest. `optimizers` are the classes
    of those that hold the parameters, by name, and `optimizer_sites` the lines of the program where
    such a class asks for its rank's part of a tensor, else where its step begins.
    """

    rank: int
    world_size: int
    num_steps: int
    num_batches: int
    num_given: int = 0
    data_group: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    iterators: tuple[str, ...] = ()
    trained: tuple[int, ...] = ()
    exhausted: tuple[int, ...] = ()
    draws_in_forward: bool = False
    num_microsteps: tuple[int, ...] = ()
    mesh_sizes: dict[str, int] = {}
    devices: tuple[str, ...] = ()
    peak_memory: int = 0
    compute_dtype: str = ""
    unreadable: dict[str, str] = {}
    problem: str = ""
    padded: tuple[str, ...] = ()
    padded_at: int = 0
    is_filled: bool = False
    optimizers: dict[str, str] = {}
    optimizer_sites: dict[str, Frame] = {}

    def to_json(self) -> bytes:
        """Return the form in which it is kept."""
        return msgspec.json.encode(self)


def read_summary(data: bytes) -> RankSummary:
    """Return the summary in these bytes.

    Raises:
        msgspec.MsgspecError: they are something else.

    """
    return msgspec.json.decode(data, type=RankSummary)
