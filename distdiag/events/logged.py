"""What is observed of the numbers of a training: those that it logs, and those of its losses."""

from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from distdiag.events.base import CallSite, Event

NOWHERE = CallSite(())


class Logged(Event, frozen=True, kw_only=True):
    """A program logs numbers by name, at `logged_step` of its own (-1: it does not say).

    `logger` is the function that it calls. `site` is written with the first call of each place and
    set of names, and is empty in those that follow. `num_updates` steps of optimizers came before.
    """

    logger: str
    values: tuple[tuple[str, float], ...]
    logged_step: int = -1
    num_updates: int = 0
    site: CallSite = NOWHERE


class LossTerm(msgspec.Struct, frozen=True, array_like=True):
    """An addend of a loss, told apart by the operations from the root down to where it is wide.

    `factor` is the product of the numbers by which it is multiplied on the way, NaN where one is
    not known; `gradient` the largest absolute gradient that goes on below it. `mask_share` is the
    share of the elements of its masks and weights that are not zero, -1 where it has none.
    """

    operations: str
    factor: float
    gradient: float
    mask_share: float = -1.0


class PolicyRatio(msgspec.Struct, frozen=True, array_like=True):
    """The ratio of new to old probabilities that a policy loss weighs its advantages with.

    `deviation` is the mean absolute difference from 1 of those that are not 1, `num_ratios` the
    number of all, and `gradient` the largest absolute gradient that reaches one. `has_sampled`: the
    program has drawn samples since the step before, and this is the first ratio after them.
    """

    deviation: float
    num_ratios: int
    gradient: float
    has_sampled: bool


class Prediction(msgspec.Struct, frozen=True, array_like=True):
    """What a sample of the rows of logits predict.

    `entropy` is in nats, of `num_classes` classes. `cross_entropy` with the targets, in nats, is
    NaN without targets. `top_share` is the share of rows whose most probable class is that of the
    first row. `targets` are some of the labels.
    """

    num_classes: int
    num_rows: int
    entropy: float
    cross_entropy: float
    top_share: float
    targets: tuple[int, ...] = ()


class Clamped(msgspec.Struct, frozen=True, array_like=True):
    """A clamp in the graph of a loss: the share of its elements that lie outside of its bounds.

    No gradient passes through those. A bound is NaN where there is none.
    """

    least: float
    greatest: float
    num_elements: int
    outside: float


class LossNumbers(Event, frozen=True, kw_only=True):
    """What the graph of a loss holds before a backward pass, and what its terms send back.

    `is_coarse`: the loss is a number of half precision. `rate` is the largest learning rate of the
    last optimizer that stepped, NaN where none did. `site` is empty in a pass from the place of the
    one before.
    """

    loss: float
    is_coarse: bool
    rate: float
    terms: tuple[LossTerm, ...] = ()
    ratio: PolicyRatio | None = None
    prediction: Prediction | None = None
    clamps: tuple[Clamped, ...] = ()
    site: CallSite = NOWHERE


class CodesChosen(Event, frozen=True, kw_only=True):
    """How often each code of a codebook was chosen by its distance, in a window of steps.

    `num_codes` codes are rows of the tensor `codebook`. `counts` are the (code, count) pairs of the
    most frequent ones; `num_used` were chosen at all, in `num_choices` choices. `perplexity` is the
    exponential of the entropy of the choices.
    """

    codebook: str
    num_codes: int
    num_choices: int
    num_used: int
    perplexity: float
    counts: tuple[tuple[int, int], ...]
    site: CallSite = NOWHERE


WARNINGS: Final[Mapping[str, str]] = {
    "one-sample-variance": "degrees of freedom is <= 0",
    "scheduler-before-optimizer": "`lr_scheduler.step()` before `optimizer.step()`",
    "checkpoint-without-gradient": "None of the inputs have requires_grad=True",
    "broadcast-target": "Using a target size",
    "gradient-of-no-leaf": "The .grad attribute of a Tensor that is not a leaf Tensor",
    "mean-of-nothing": "Mean of empty slice",
    "operator-without-gradient": "an autograd kernel was not registered to the Autograd key(s)",
    "dropped-imaginary-part": "Casting complex values to real discards the imaginary part",
}
"""Warnings whose cause is known: a topic, and the words by which each is known."""


class Warned(Event, frozen=True, kw_only=True):
    """A warning of one of the topics of `WARNINGS` was shown."""

    topic: str
    text: str
    category: str
    site: CallSite


MOST_MARKED: Final = 64
"""So many graphs of losses are looked after: those of the last 512 steps."""


class MemoryUse(Event, frozen=True, kw_only=True):
    """How much memory a rank holds, in bytes.

    `memory` ``host``: `used_bytes` are resident in the process and belong to no file, and
    `limit_bytes` is what it may reach before the kernel ends it: what it holds, and what is left in
    its container or machine. `reserved_bytes` it has asked for, whether they are used yet or not.
    ``gpu``: those that tensors of the process hold on `device`, of all its memory; `reserved_bytes`
    are kept by torch's allocator, `peak_bytes` was the most that tensors have held. `num_batches`
    were made by loaders until then. `num_graphs` of the last `MOST_MARKED` looked-at backward
    passes are still alive, -1 if that is not known.
    """

    memory: Literal["host", "gpu"]
    used_bytes: int
    limit_bytes: int
    device: int = -1
    reserved_bytes: int = 0
    peak_bytes: int = 0
    num_batches: int = 0
    num_graphs: int = -1
