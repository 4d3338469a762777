"""What probes observe of numbers that are not finite, or near the limit of their dtype."""

from typing import Literal

import msgspec

from distdiag.events.base import CallSite, Event

Stage = Literal[
    "parameter",
    "buffer",
    "input",
    "forward",
    "loss",
    "backward",
    "weight-gradient",
    "gradient",
    "update",
]
"""Where in a step a number was read.

``parameter`` and ``buffer`` are read before a forward pass, ``input`` is what a model is given,
``loss`` what a backward pass begins with. ``backward`` is the gradient of an activation and
``weight-gradient`` that of a parameter as this rank's own backward pass gives it; ``gradient`` is
what the optimizer finds, which other ranks may have had a part in. ``update`` is a parameter after
the step of its optimizer.
"""

LOCAL: tuple[Stage, ...] = ("input", "forward", "loss", "backward", "weight-gradient")
"""Stages at which a value is made by this rank's own computation, as a rule."""

Outcome = Literal["", "stepped", "masked", "dropped", "skipped", "ended"]
"""What became of a step that met such numbers.

``stepped``: an optimizer applied them, or a loss that was not finite. ``masked``: the loss and the
gradients were finite again. ``dropped``: the program went on without using the pass. ``skipped``:
no optimizer stepped, though a gradient scaler or the program came to its end. ``ended``: the rank
ended before. Empty: it is not known yet.
"""


class NonFinitePlace(msgspec.Struct, frozen=True, array_like=True):
    """One place at which a value was not finite.

    `module` is the module whose own computation made it, by its path in `model` (``""``: the code
    outside of all modules), `kind` its class and `what` the tensor. `value` is ``nan``, ``inf`` or
    ``-inf``. `number` is the place in the order of the step. `is_exact`: all modules were read, and
    not only whole blocks. `hidden_by` is the operation in the graph that took the value in and is
    made to hide it.
    """

    stage: Stage
    model: str
    module: str
    kind: str
    what: str
    value: str
    number: int
    is_exact: bool = True
    hidden_by: str = ""


class NonFinite(Event, frozen=True, kw_only=True):
    """A step met numbers that are not finite; `window` numbers such reports of one step.

    `places` are the first ones in their order, of `num_places`; `infinite` are places with
    negative infinity only, as masks have, before the first of them. A later event of the same step
    and window replaces an earlier one. `site` is the call of the backward pass, if there was one.
    `are_modules_read`: the outputs of modules were looked at in this step, and not the loss alone.
    """

    window: int
    outcome: Outcome
    places: tuple[NonFinitePlace, ...]
    num_places: int
    infinite: tuple[NonFinitePlace, ...] = ()
    is_loss_finite: bool | None = None
    site: CallSite = CallSite(())
    are_modules_read: bool = True

    @property
    def model(self) -> str:
        """The model in which it begins, as far as that is known."""
        return self.places[0].model if self.places else ""


class NearOverflow(Event, frozen=True, kw_only=True):
    """The output of a module came near the largest number of its dtype.

    `largest` is the greatest absolute value, `limit` the largest finite number of `dtype`;
    `earlier` is the greatest absolute value when it was read for the first time, at
    `earlier_step`.
    """

    model: str
    module: str
    module_class: str
    dtype: str
    largest: float
    limit: float
    earlier: float
    earlier_step: int
