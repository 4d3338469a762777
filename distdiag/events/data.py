"""What probes observe of the data that each rank is fed."""

import msgspec

from distdiag.events.base import CallSite, Event

MOST_INDICES = 1 << 16
"""Of passes over so many samples at most it is known exactly which ones were read."""


MOST_LEAST = 512
"""So many digests of samples are kept, the least ones."""


class SamplerState(msgspec.Struct, frozen=True, array_like=True):
    """What a sampler and those inside it say of themselves; None: they do not.

    `chain` are the classes from the outermost to the innermost. `replica` of `num_replicas` parts
    is this rank's. `num_skipped` batches are left out at the beginning. `uses_epoch`: the code that
    yields the indices reads the epoch. `dividers` are the classes in the chain that know a rank and
    a number of ranks.
    """

    chain: tuple[str, ...]
    epoch: int | None = None
    seed: int | None = None
    shuffle: bool | None = None
    num_replicas: int | None = None
    replica: int | None = None
    num_skipped: int = 0
    uses_epoch: bool = True
    dividers: tuple[str, ...] = ()


class GeneratorUse(msgspec.Struct, frozen=True, array_like=True):
    """A generator that a fetch has drawn from: digests of its state before and after.

    `name` is ``python``, ``numpy``, ``torch``, or class and attribute of what the data set holds.
    It took `num_drawn` raw numbers; -1: it was seeded meanwhile, or they cannot be counted.
    `is_seeded`: the program seeded it in this worker, not by the seed that torch gives each.
    `is_for_batch`: it was where a batch is made of the samples.
    """

    name: str
    before: str
    after: str
    num_drawn: int
    is_seeded: bool
    is_for_batch: bool = False


class Fetch(msgspec.Struct, frozen=True, array_like=True):
    """One of the first fetches of a worker (-1: the rank itself), the `number`-th of its own.

    `batch` is a digest of the indices of its `num_samples` samples.
    """

    worker: int
    number: int
    batch: str
    num_samples: int
    generators: tuple[GeneratorUse, ...]


class EpochFed(Event, frozen=True, kw_only=True):
    """A rank has iterated over a data set, once; `number` counts the passes over this `stream`.

    `stream` names data set and sampler alike on all ranks. `digest` is that of the indices in their
    order, `first` are some of them, and `indices` a bitmap of all (empty: there were too many).
    `contents` are digests of the samples that were read, as far as they were looked at. Of the
    pass before `last_digest` and `last_epoch` are known, of the sampler the highest epoch that it
    had before this pass, `epoch_before`. `num_before_training` batches were fetched before the
    first backward pass, and `num_backwards` were made in all; `is_trained`: one of them was the
    first thing after a batch, before another one was fetched. `members` are the ranks that train
    one model on these data, empty if unknown. What the rank did in the meantime has the event
    numbers from `begin` to `end` (-1: it has not come to its end). `fetches` are the first ones,
    and `fetched_by` is what seeds workers, or reads a sample. `parts` are what each sample consists
    of, with whether they are whole numbers; `samples` are digests of the parts of some samples,
    behind their index. `least` are the least digests of all samples of the first pass, in their
    order, where nothing divides the data set; empty if two were equal, or not all were looked at.
    """

    stream: str
    number: int
    dataset: str
    num_samples: int
    sampler: SamplerState
    num_indices: int
    num_batches: int
    digest: str
    first: tuple[int, ...]
    indices: bytes
    contents: tuple[str, ...]
    is_complete: bool
    is_ascending: bool
    last_digest: str
    last_epoch: int | None
    epoch_before: int | None
    num_before_training: int
    num_backwards: int
    members: tuple[int, ...]
    site: CallSite
    begin: int = -1
    end: int = -1
    is_trained: bool = False
    fetches: tuple[Fetch, ...] = ()
    fetched_by: CallSite | None = None
    parts: tuple[tuple[str, bool], ...] = ()
    samples: tuple[tuple[int, tuple[str, ...]], ...] = ()
    least: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same pass."""
        return (self.stream, self.number)

    @property
    def is_training(self) -> bool:
        """Whether there were backward passes in the meantime."""
        return self.num_backwards > 0


class LoaderResumed(Event, frozen=True, kw_only=True):
    """A loader that was given a state has come to the end of its first pass since then.

    `loader` and `dataset` are classes, `number` counts these passes. It handed out `num_batches`,
    in `epoch` of its sampler. A state like the one that it was given was saved at `saved_at`, in
    passes of the `saved_epochs`; None: not in this process.
    """

    loader: str
    dataset: str
    number: int
    num_batches: int
    epoch: int | None
    saved_epochs: tuple[int, ...]
    saved_at: CallSite | None
    site: CallSite

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same pass."""
        return (f"{self.loader} of {self.dataset}", self.number)

    @property
    def members(self) -> tuple[int, ...]:
        """Who trains together is not known here."""
        return ()


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """Random numbers that the program drew; `state` is a digest of the generator before.

    `is_inside`: it was in the forward pass of the model, in its `module` (name and class).
    `is_given`: the program named the generator. `activation` is a digest of the tensor that they
    were drawn for, such as the input of dropout; empty if there is none, or it cannot be read.
    """

    api: str
    sizes: tuple[int, ...]
    state: str
    is_inside: bool
    is_given: bool
    site: CallSite
    module: str = ""
    activation: str = ""


class NormStatistics(msgspec.Struct, frozen=True, array_like=True):
    """By what a layer of batch normalisation has normalised on one rank, in some channels.

    They are of `num_values` values for each channel, from `num_samples` samples.
    """

    name: str
    num_samples: int
    num_values: int
    means: tuple[float, ...]
    variances: tuple[float, ...]


class ModelFed(Event, frozen=True, kw_only=True):
    """What a model was given for one backward pass of it.

    `number` counts these passes. `members` are the ranks that a wrapper trains it together on,
    empty if it has none. `inputs` are digests of the tensors it was given that hold more than one
    value, `batch_sizes` the sizes of their first dimension. `batch` is a digest of the indices of
    the last batch from a data loader (empty: there was none, or it has no indices), of `num_batch`
    samples out of `num_samples`; `samples` are digests of its tensors. `draws` were made since that
    batch, which came at event number `since`. `num_local_norms` layers normalise by the statistics
    of this rank's own samples, `norms` are those of some of them. What the rank did in the forward
    pass has the event numbers from `begin` to `end`. `seeded` is where the program seeded torch
    last. `has_drawn`: random numbers were drawn between the pass before and this one.
    """

    model: str
    number: int
    members: tuple[int, ...]
    inputs: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    stream: str
    batch: str
    num_batch: int
    num_samples: int
    samples: tuple[str, ...]
    num_local_norms: int
    draws: tuple[Draw, ...]
    begin: int
    end: int
    site: CallSite
    norms: tuple[NormStatistics, ...] = ()
    since: int = -1
    seeded: CallSite | None = None
    has_drawn: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same backward pass."""
        return (self.model, self.number)


class ScheduleState(Event, frozen=True, kw_only=True):
    """How far a learning-rate scheduler has come, in how many steps of its optimizer.

    `name` is its class with a number. It was advanced `num_advances` times, always `least_pace` to
    `greatest_pace` times for each optimizer step after which it was at all; `last_rate` holds since
    optimizer step `settled_at`, and `peak_rate` was the highest. It was made for `num_planned`
    training steps (0: it does not say). `follows_metric`: it goes by values that it is given, and
    is advanced whenever it is given one; a pace counts how often that was the same value.
    """

    name: str
    num_advances: int
    num_steps: int
    least_pace: int
    greatest_pace: int
    peak_rate: float
    last_rate: float
    settled_at: int
    site: CallSite
    num_planned: int = 0
    follows_metric: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks at the same moment."""
        return (self.name, self.num_steps)

    @property
    def members(self) -> tuple[int, ...]:
        """Who trains together is not known here."""
        return ()


class RowsGathered(Event, frozen=True, kw_only=True):
    """The program gathered rows of the last batch of a pass without backward passes, all of them.

    Of the `num_rows` rows that all ranks hold together `num_real` are samples that no batch had
    before; the others fill it up, from the beginning of the `num_samples` samples. `tensors` are
    what was gathered, such as ``int64 8``. `is_dropped_elsewhere`: other rows of this batch were
    gathered so that these are dropped. `name` says where, `number` counts.
    """

    name: str
    number: int
    dataset: str
    num_samples: int
    num_rows: int
    num_real: int
    tensors: tuple[str, ...]
    is_dropped_elsewhere: bool
    site: CallSite

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same call."""
        return (self.name, self.number)

    @property
    def members(self) -> tuple[int, ...]:
        """All ranks take part."""
        return ()


class MetricGiven(Event, frozen=True, kw_only=True):
    """A scheduler that goes by a metric is given its value number `number`, at `site`."""

    name: str
    number: int
    value: float
    site: CallSite

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same value."""
        return (self.name, self.number)

    @property
    def members(self) -> tuple[int, ...]:
        """Who trains together is not known here."""
        return ()
