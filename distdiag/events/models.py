"""What probes observe of models: how each tensor is sharded, who owns it, and what it holds."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

import msgspec

from distdiag.events.base import CallSite, Event, Frame

# Where things were made that other events name.


class ObjectKind(StrEnum):
    """What was made."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    LOADER = "data loader"
    SAMPLER = "sampler"
    MESH = "device mesh"
    GROUP = "process group"


class ObjectCreated(Event, frozen=True, kw_only=True):
    """What events from here on call `name` was made by this line of the user's code.

    For a loader or a sampler `name` is that of the stream that it feeds. None: nobody saw it, or no
    line of the user's code is on the stack.
    """

    object_kind: ObjectKind
    name: str
    place: Frame | None


# What probes observe of the sharding plans that programs have themselves.


class PlanSource(StrEnum):
    """Who takes a plan."""

    PARALLELIZE_MODULE = "parallelize_module"
    VEOMNI = "VeOmni"
    TRANSFORMERS = "transformers"
    DDP_IGNORED = "DDP ignore"


class PlanFault(StrEnum):
    """What may be wrong about a pattern that matches."""

    CLASH = "clash"  # an earlier pattern has taken the name and says something else
    UNEVEN = "uneven"  # the size of the axis does not divide what it splits
    UNLIKE = "unlike"  # the tensor is not as the pattern says


class NamedFault(msgspec.Struct, frozen=True, array_like=True):
    """A fault of one tensor or module; `text` says what is there."""

    fault: PlanFault
    name: str
    text: str


class PatternMatches(msgspec.Struct, frozen=True, array_like=True):
    """One pattern of a plan: what it wants, how much of the model it matches, and the first few.

    `closest` is a name that is probably meant, if nothing matches.
    """

    pattern: str
    wanted: str
    num_matches: int
    matches: tuple[str, ...] = ()
    closest: str = ""
    faults: tuple[NamedFault, ...] = ()


class PlanPatterns(Event, frozen=True, kw_only=True):
    """A program applies a plan to a model, or part of one, of class `model`."""

    source: PlanSource
    model: str
    patterns: tuple[PatternMatches, ...]
    site: CallSite


# How each tensor of a model is sharded, who owns it, and what it holds.

MOST_NAMES: Final = 64
"""So many parameters an event names at most, of those that it only counts otherwise."""


class Moment(StrEnum):
    """When the content of a model's tensors was looked at."""

    START = "start"  # when it was wrapped, or else before its first backward pass
    STEP = "step"  # parameters and buffers as an optimizer step finds them
    BACKWARD = "backward"  # gradients as a backward pass leaves them
    GRADIENT = "gradient"  # gradients as an optimizer step finds them
    EVALUATION = "evaluation"  # statistics of normalisation as an evaluation has used them


class ReplicaEvidence(StrEnum):
    """From what it is known which ranks hold the same tensor."""

    MESH = "mesh"  # the placements of a DTensor
    WRAPPER = "wrapper"  # the process group of DDP, FSDP or ZeRO
    UNSYNCED = "unsynced"  # DDP's, but the model has stepped on gradients that it did not reduce
    BYPASSED = "bypassed"  # DDP's, but nobody called its forward pass for this step
    LONE = "lone"  # DDP was given a group of one rank, though there are more
    REDUCED = "reduced"  # the program itself reduced its gradient for this step
    SENT = "sent"  # the program itself once sent the parameter round
    MARKED = "marked"  # not marked as a part, as Megatron marks others of the same model
    MODEL = "model"  # other tensors of the same model are sharded over these ranks
    FROZEN = "frozen"  # a frozen model of ranks that train another one together
    OWN = "own"  # no others: it is marked as what ranks with the same experts alone hold
    ROUTER = "router"  # the router of its layer is trained, and stays the same on them
    LAYER = "layer"  # the rest of its layer is, and does, and its experts are spread over them
    OTHER_GROUPS = "other-groups"  # groups that were made in the same split reduce gradients
    WORLD = "world"  # nothing: all ranks, by guess


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """A device mesh as one rank knows it. `ranks` are global ranks in row-major order."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return " x ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))


class Policy(msgspec.Struct, frozen=True, array_like=True):
    """How a wrapper should compute with a tensor and keep it; empty: as it is.

    `reshard_after_forward` is ``True``, ``False`` or the number of ranks of a smaller group.
    """

    param_dtype: str = ""
    reduce_dtype: str = ""
    offload: str = ""
    reshard_after_forward: str = ""


class TensorPlan(msgspec.Struct, frozen=True, array_like=True):
    """One parameter or buffer of a model: how it is kept on one rank.

    `name` is the FQN as the user knows it, `shape` the global one. `wrapper` is what synchronises
    it (``FSDP2``, ``DDP``, …, or an empty string), `unit` the FQN of the module that was wrapped.
    `replicas` are the global ranks that hold the same content. `owners` are the optimizers that
    hold the parameter. `is_late`: it was added after its model had been sharded. `untied_from` is
    the tensor that it should be one with, and is not: by the configuration of the model, or because
    it was until `untied_by` was called.
    `is_shared`: it is marked as one of several copies that stages hold under names of their own.
    `heads_divided_by`: its module has so many times fewer attention heads than at first, or than
    its configuration says, and is itself not sharded. `policy` is that of its unit.
    `is_routing_bias`: no gradient trains it, and a router adds it to scores that choose experts.
    `is_ignored`: the wrapper around it was told to leave it to each rank. `emptied` is the digest
    of what `to_empty` left in it, where that made it and nothing wrote to it since. `split_over`
    are the ranks that have pieces of it, empty ones too, where it is a part of a flat parameter.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_parameter: bool = True
    requires_grad: bool = False
    wrapper: str = ""
    unit: str = ""
    placements: tuple[str, ...] = ()
    mesh: Mesh | None = None
    replicas: tuple[int, ...] = ()
    evidence: ReplicaEvidence = ReplicaEvidence.WORLD
    owners: tuple[str, ...] = ()
    tied_to: str = ""
    is_late: bool = False
    untied_from: str = ""
    untied_by: str = ""
    is_shared: bool = False
    heads_divided_by: int = 1
    policy: Policy = Policy()
    is_routing_bias: bool = False
    is_ignored: bool = False
    emptied: str = ""
    split_over: tuple[int, ...] = ()

    @property
    def is_flat_part(self) -> bool:
        """Whether it is what one rank has of a flat parameter: a piece that may begin anywhere."""
        return self.wrapper == "FSDP1" and self.is_parameter and not self.replicas


KNOWN: Final = (
    ReplicaEvidence.MESH,
    ReplicaEvidence.WRAPPER,
    ReplicaEvidence.BYPASSED,
    ReplicaEvidence.MODEL,
)


def kept_ranks(plans: Iterable[TensorPlan]) -> set[int]:
    """Return the ranks that keep a model together, as its plan tells; empty if it does not."""
    ranks: set[int] = set()
    for plan in plans:
        if plan.mesh is not None:
            ranks.update(plan.mesh.ranks)
        if plan.evidence in KNOWN:
            ranks.update(plan.replicas)
    return ranks


def reducing_ranks(plans: Iterable[TensorPlan]) -> set[int]:
    """Return the ranks over which the program itself reduces all gradients; empty if not all."""
    groups = {
        frozenset(plan.replicas) if plan.evidence is ReplicaEvidence.REDUCED else frozenset()
        for plan in plans
        if plan.requires_grad and not plan.tied_to
    }
    return set(*groups) if len(groups) == 1 else set()


class ModelPlan(Event, frozen=True, kw_only=True):
    """A part of the plan of one model: its tensors from number `first` on, of `total`.

    `model` is the name of its class after those of its wrappers, with a number if there are several
    of them; `site` is where the program was then.
    """

    model: str
    moment: Moment
    first: int
    total: int
    tensors: tuple[TensorPlan, ...]
    site: CallSite


class Content(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's part of a tensor holds.

    Equal bytes have equal digests if the digests begin with the same letter. The figures are over
    finite values (nan if there are none), the shares from 0 to 1; of a large tensor they may be
    those of a sample.
    """

    digest: str
    num_elements: int
    least: float
    greatest: float
    mean: float
    nan_share: float = 0.0
    zero_share: float = 0.0
    subnormal_share: float = 0.0


class ModelState(Event, frozen=True, kw_only=True):
    """What the tensors of a model hold, from number `first` on in its last plan.

    At `BACKWARD` and `GRADIENT` these are the gradients. None: there is no gradient, or nothing
    that can be read.
    """

    model: str
    moment: Moment
    first: int
    total: int
    contents: tuple[Content | None, ...]
    site: CallSite


class OptimizerState(Event, frozen=True, kw_only=True):
    """An optimizer right before it stepped; `step` counts its own steps.

    `members` are the ranks that keep its model together, or reduce all of its gradients, where
    known. `num_without_gradient` of its `num_parameters` have no gradient. `replaced` are
    parameters of models that have a gradient and no owner, while the optimizer holds parameters
    that belong to no model any more. `least_count` and `greatest_count` are the step counters in
    its state, -1 if there are none; `num_backwards` passes were made since the step before, and
    `num_gradients` parameters of all models have a gradient. It has stepped `num_steps` times
    before, `num_zero_steps` of them with gradients that were all zero. `num_stale_states` entries
    of its state are those of parameters that neither it nor a model holds; `num_stateless`
    parameters have none, of which `stateless` are some. `forgotten` are parameters with a gradient
    that no optimizer holds and that were made after all of them. `without_gradient` are trainable
    parameters of models that it holds and that have none; at most `MOST_NAMES`. At `num_idle`
    samples in a row, this one included, none of its parameters had a gradient; `was_fed`: some had,
    at a sample before. `copied` are parameters of `copied_model` that have gradients, never change
    and are in no optimizer, while those that this one holds are the same ones of another copy.
    `rate_changes` are the last steps from which on its learning rates were others, with the rates
    (-1: one that is no plain number); `rate_history` is a digest of all such steps so far.
    """

    optimizer: str
    members: tuple[int, ...]
    num_backwards: int
    num_gradients: int
    num_steps: int
    num_zero_steps: int
    num_stale_states: int
    num_stateless: int
    stateless: tuple[str, ...]
    forgotten: tuple[str, ...]
    num_parameters: int
    num_without_gradient: int
    num_foreign: int
    replaced: tuple[str, ...]
    learning_rates: tuple[float, ...]
    least_count: int
    greatest_count: int
    site: CallSite
    without_gradient: tuple[str, ...] = ()
    num_idle: int = 0
    was_fed: bool = False
    copied: tuple[str, ...] = ()
    copied_model: str = ""
    rate_changes: tuple[tuple[int, tuple[float, ...]], ...] = ()
    rate_history: int = 0

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same step."""
        return (self.optimizer, self.step)


class PartialRead(Event, frozen=True, kw_only=True):
    """The program took a number out of a DTensor that is only this rank's part of a sum or norm.

    `api` is the method (``item``); `placements` are those of the tensor.
    """

    api: str
    placements: tuple[str, ...]
    site: CallSite


class ShardsCombined(Event, frozen=True, kw_only=True):
    """The program reduces or broadcasts, over `ranks`, the memory of their parts of one parameter.

    Or those of its gradient. `reduce_op` is empty where nothing is reduced.
    """

    parameter: str
    is_gradient: bool
    ranks: tuple[int, ...]
    reduce_op: str
    site: CallSite


class PartsSummed(Event, frozen=True, kw_only=True):
    """A module in training adds up what its matrices make, over the ranks of a process group.

    `module` is the name of its model and, after a slash, its own; `number` counts the sums of one
    forward pass. `digest` is of what this rank gives, `weights` are the matrices of the module with
    the digests of what this rank holds of them; nothing of all that is zero.
    """

    module: str
    number: int
    members: tuple[int, ...]
    digest: str
    weights: tuple[tuple[str, str], ...]
    site: CallSite

    @property
    def place(self) -> tuple[str, int]:
        """What is the same on all ranks for the same sum."""
        return (f"{self.module} {self.number}", self.step)


class SliceSaved(Event, frozen=True, kw_only=True):
    """The program saves this rank's parts of sharded parameters as plain tensors.

    `names` are the parameters, `members` the global ranks that hold their parts. `are_own`: they
    are not sharded, but the wrapper of their model was told to leave them to each rank.
    """

    names: tuple[str, ...]
    members: tuple[int, ...]
    site: CallSite
    are_own: bool = False
