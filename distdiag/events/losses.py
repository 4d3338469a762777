"""What probes observe of losses: how much each element weighs in the gradient of a step."""

import msgspec

from distdiag.events.base import CallSite, Event


class Factor(msgspec.Struct, frozen=True, array_like=True):
    """A number by which a loss is multiplied (``*``) or divided (``/``) on its way to the root.

    ``mean`` is the division of a mean over several losses or elements. `num_terms` losses were
    added up before. `is_float`: the program gave it as a floating-point number, as weights are;
    numbers of ranks are whole.
    """

    op: str
    value: float
    num_terms: int = 1
    is_float: bool = False


class AuxTerm(msgspec.Struct, frozen=True, array_like=True):
    """An auxiliary (load-balancing) loss that is a term of a loss, made of the scores of routers.

    `factors` are those from the root on, of which the first `num_outer` are also those of other
    terms. `is_own_mean`: it was divided by the number of this rank's tokens, and by no greater one.
    """

    layer: str
    factors: tuple[Factor, ...]
    num_outer: int
    is_own_mean: bool


class LossPass(msgspec.Struct, frozen=True, array_like=True):
    """The loss of one backward pass: `num_counted` of its `num_elements` elements have a weight.

    `kind` is ``nll`` (a cross entropy), ``pixels`` (one over images), ``masked`` (a sum or mean
    over what a mask lets through) or ``dense``; `reduction` is that of the innermost loss.
    `weight` is what each counted element has in the gradient of this rank. `num_rows` is the number
    of sequences, 0 if it is not known.
    `place` numbers the lines from which passes of one step were started. `num_first` further
    labels, the first ones of sequences, would count if the loss did not leave them out by its
    shift; -1 if that is not known. The tensor that holds them has `num_shifted` labels without the
    first ones. The model was given `num_targets` valid labels in `num_target_rows` rows that were
    shifted already, -1 if none. `aux` are auxiliary losses that were added to it.
    """

    kind: str
    reduction: str
    num_counted: int
    num_elements: int
    num_rows: int
    weight: float
    factors: tuple[Factor, ...] = ()
    place: int = 0
    num_first: int = -1
    aux: tuple[AuxTerm, ...] = ()
    num_shifted: int = -1
    num_targets: int = -1
    num_target_rows: int = 0

    @property
    def mass(self) -> float:
        """What all elements weigh together."""
        return self.num_counted * self.weight


class LossWeights(Event, frozen=True, kw_only=True):
    """The backward passes that led to one step of an optimizer.

    `members` are the ranks whose gradients are combined, empty where nothing tells; their sum is
    divided by `divisor`, 0 if that is not known. A pass whose loss could not be read is None.
    `groups` are the ranks of the process groups that this rank belongs to. The configuration
    declares `aux_coefficient` for auxiliary losses, 0 if it does not.
    """

    optimizer: str
    members: tuple[int, ...]
    divisor: float
    passes: tuple[LossPass | None, ...]
    site: CallSite
    groups: tuple[tuple[int, ...], ...] = ()
    aux_coefficient: float = 0.0
