"""What is observed of the steps of optimizers: what they change, in which types, what they skip."""

import math

import msgspec

from distdiag.events.base import CallSite, Event


class TensorUpdate(msgspec.Struct, frozen=True, array_like=True):
    """What one step did to one parameter, as far as this rank holds it.

    All counts are of evenly spaced elements, at most 4,096, whose gradient is not zero: there are
    `num_sampled`, and the step left `num_unchanged` of them as they were, bit for bit; `num_moved`
    are not what they were at the first look. `num_small` have an update, as the state of the
    optimizer tells it, of less than a quarter of the spacing of numbers around the weight; of these
    `num_small_changed` changed, and with stochastic rounding `expected_changes` would have.
    `update` is the mean size of such an update (nan: the optimizer is of an unknown kind), `weight`
    that of the weights, `spacing` that of the spacing. `gradient_norm` is that of the whole local
    part. `state` are names and types of the tensors that the optimizer keeps for it.
    `keeps_precision`: the optimizer keeps a wider copy of the parameter, or what rounding cut off.
    """

    name: str
    dtype: str
    gradient_dtype: str
    num_elements: int
    learning_rate: float
    state: tuple[tuple[str, str], ...] = ()
    num_sampled: int = 0
    num_unchanged: int = 0
    num_moved: int = 0
    num_small: int = 0
    num_small_changed: int = 0
    expected_changes: float = 0.0
    update: float = math.nan
    weight: float = math.nan
    spacing: float = math.nan
    gradient_norm: float = math.nan
    keeps_precision: bool = False

    @property
    def is_narrow(self) -> bool:
        """Whether the optimizer holds the parameter itself in 16 bits or fewer."""
        return self.dtype in NARROW or self.dtype.startswith("float8")


NARROW = ("bfloat16", "float16")
"""The types of 16 bits in which a small update may get lost."""


class OptimizerUpdate(Event, frozen=True, kw_only=True):
    """A step of an optimizer that was looked at; `number` counts its own steps, from 0.

    `rate` is the highest learning rate of its groups, `full_rate` the highest that a schedule says
    that they start from, or the highest at any look so far. `keeps_copies`: it has wider tensors of
    the size of its parameters in its attributes. `rounds_to_nearest`: it is one of torch's own,
    whose arithmetic rounds so and keeps nothing of what it cuts off.
    """

    optimizer: str
    model: str
    number: int
    rate: float
    full_rate: float
    tensors: tuple[TensorUpdate, ...]
    site: CallSite
    keeps_copies: bool = False
    rounds_to_nearest: bool = False


class ScalerStep(Event, frozen=True, kw_only=True):
    """A gradient scaler was asked to step an optimizer; `number` counts its calls from 0.

    `is_skipped`: it found a gradient that is infinite or NaN, and the optimizer did not step.
    `num_skipped` calls in a row were skipped up to this one, and `num_stepped` stepped in all.
    `scale` is its factor before this call, nan where reading it would wait for the device.
    """

    scaler: str
    optimizer: str
    number: int
    is_skipped: bool
    num_skipped: int
    num_stepped: int
    scale: float
    site: CallSite


class ReducedInType(Event, frozen=True, kw_only=True):
    """A gradient is summed over an axis of a mesh in another type than the policy of its unit says.

    `dtype` is that of the sum over `axis`, `reduce_dtype` what the policy asks for.
    """

    parameter: str
    dtype: str
    reduce_dtype: str
    axis: str
    axis_size: int
    site: CallSite


class PositionsRounded(Event, frozen=True, kw_only=True):
    """A cast of a whole module rounded a buffer whose products with positions are angles.

    `largest_error` is the largest change of an element by the cast from `dtype_before` to `dtype`;
    `largest_angle` was given to `function` in the forward pass of the buffer's module, and
    `largest_value` is that of the buffer, so positions go up to their quotient.
    """

    buffer: str
    model: str
    dtype_before: str
    dtype: str
    largest_error: float
    largest_value: float
    largest_angle: float
    function: str
    site: CallSite


class CastsReused(Event, frozen=True, kw_only=True):
    """A pass ran on casts of weights that autocast had kept since before the optimizer's step.

    `dtype` is that of autocast; `step_site` is where the optimizer stepped inside the region.
    """

    optimizer: str
    dtype: str
    site: CallSite
    step_site: CallSite
