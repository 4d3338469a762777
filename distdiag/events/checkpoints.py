"""What probes observe of checkpoints: what was loaded, what came of it, and what was saved."""

from enum import StrEnum

import msgspec

from distdiag.events.base import CallSite, Event


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """What a load into a model has left out, as the next optimizer step finds it.

    `target` is the class of the model, with `num_tensors` of `num_bytes` that a checkpoint should
    hold; of the `num_given` tensors `num_loaded` fitted. `missing` (at most so many that they can
    be read) were not given and nobody has loaded them since; `num_untouched` of the `num_missing`
    still hold what they held at the load, for `num_unknown` this is not known. `unexpected` were
    given and have no place. `num_renamed` of these fit missing ones of the same shape if the prefix
    `given_prefix` is replaced by `wanted_prefix`. `holes` are missing ones of whose like, with the
    same shape, those with a lower and with a higher number were loaded. `is_refused`: a strict load
    raised, and the program went on. `at_step` is the step of the load.
    """

    target: str
    num_tensors: int
    num_bytes: int
    num_given: int
    num_loaded: int
    missing: tuple[str, ...]
    num_missing: int
    missing_bytes: int
    num_untouched: int
    num_unknown: int
    unexpected: tuple[str, ...]
    num_unexpected: int
    given_prefix: str
    wanted_prefix: str
    num_renamed: int
    renamed_bytes: int
    holes: tuple[str, ...]
    is_refused: bool
    at_step: int
    site: CallSite


class ChangedWhileSaved(Event, frozen=True, kw_only=True):
    """Tensors were changed in place between begin and end of a save on `thread`.

    `names` are the first of the `num_changed`, by their places in what was saved.
    """

    names: tuple[str, ...]
    num_changed: int
    num_saved: int
    thread: str
    site: CallSite


class Waste(StrEnum):
    """How a load came to nothing."""

    UNUSED = "unused"  # what was read never reached the model that has tensors of these names
    OVERWRITTEN = "overwritten"  # the model held it, and holds something unlike it now


class LoadWasted(Event, frozen=True, kw_only=True):
    """A model does not hold what was loaded for it when an optimizer steps for the first time.

    `api` is how it was loaded, `target` the class of the model; `names` are the `num_compared`
    tensors that were compared, none of which holds what was loaded.
    """

    api: str
    waste: Waste
    target: str
    names: tuple[str, ...]
    num_compared: int
    site: CallSite


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """One value of a state that is not sharded.

    `kind` is the name of its type; `text` is the value, shortened, and `digest` that of the whole.
    `is_stateful`: an object with a state of its own gave it.
    """

    key: str
    kind: str
    digest: str
    text: str
    is_stateful: bool = False


class StateSaved(Event, frozen=True, kw_only=True):
    """What a rank gives to a distributed checkpoint beside sharded tensors and weights.

    `number` counts the saves of these `members`; `checkpoint` is where it goes, where known.
    """

    number: int
    members: tuple[int, ...]
    checkpoint: str
    entries: tuple[StateEntry, ...]
    site: CallSite


class SavedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A plain tensor of floating-point numbers; of a large one the digest is of a sample.

    It is the tensor `name` of `model`, both as in a `ModelPlan`; empty: it may be a copy of one.
    """

    key: str
    shape: tuple[int, ...]
    digest: str
    model: str = ""
    name: str = ""


class WeightsSaved(Event, frozen=True, kw_only=True):
    """Plain tensors that a rank gives to a distributed checkpoint, which keeps one for each key.

    `number`, `members` and `checkpoint` are those of `StateSaved`.
    """

    number: int
    members: tuple[int, ...]
    checkpoint: str
    weights: tuple[SavedWeight, ...]
    site: CallSite


class StateRestored(Event, frozen=True, kw_only=True):
    """What a rank got back otherwise than it had given it to the same distributed checkpoint.

    The text of an entry tells both.
    """

    checkpoint: str
    entries: tuple[StateEntry, ...]
    site: CallSite


class TrainingResumed(Event, frozen=True, kw_only=True):
    """An optimizer that steps for the first time, after something was loaded.

    `num_parameters` are those that it holds, of which the weights of `num_loaded` were loaded and
    `num_stateless` have no state yet. `was_restored`: a state was loaded into this optimizer.
    `num_lost` entries of state were loaded into other optimizers of the same class that have never
    stepped. `offered` are the entries of state that the checkpoints with the weights held, -1 if
    that is not known. `schedule_step` is where a loaded scheduler of this optimizer stands, -1 if
    none was loaded. `num_left_out` entries of state were in the distributed checkpoint from which
    its settings were read, and not asked for, since it had no state then. Of those without a state
    `num_made` have one after the step.
    """

    optimizer: str
    num_parameters: int
    num_loaded: int
    num_stateless: int
    was_restored: bool
    num_lost: int
    offered: int
    schedule_step: int
    site: CallSite
    num_left_out: int = 0
    num_made: int = 0


class ScheduleRestarted(Event, frozen=True, kw_only=True):
    """An optimizer with a state that was loaded steps first at the beginning of a new schedule.

    A checkpoint that was read before holds a schedule with the same rates, which stands at
    `saved_step`, and was never loaded. `same` are settings that both have alike, apart from their
    rates; if some differ there is no such event.
    """

    optimizer: str
    schedule: str
    saved_step: int
    same: tuple[str, ...]
    site: CallSite


class AverageSaved(Event, frozen=True, kw_only=True):
    """Weights are saved at `path`, where the file that a training was resumed from had others.

    The file had those of the model at `first_path`, and nothing loaded the ones at `path`. The
    difference between what is saved there and the model now is the `share_of_file` of that between
    the old ones and the model now, and the `share_of_start` of that between the model in the file
    and the model now. `likeness` is the square of the cosine between these two, over some elements
    of `num_tensors` tensors. `site` is where the file was read.
    """

    path: str
    first_path: str
    num_tensors: int
    share_of_file: float
    share_of_start: float
    likeness: float
    site: CallSite


CheckpointEvent = (
    WeightsLoaded
    | LoadWasted
    | StateSaved
    | StateRestored
    | TrainingResumed
    | ScheduleRestarted
    | AverageSaved
)
KINDS = (
    WeightsLoaded,
    LoadWasted,
    StateSaved,
    StateRestored,
    TrainingResumed,
    ScheduleRestarted,
)
