"""Where two runs of one script route a token differently, as the comparison shows it to checks."""

from enum import StrEnum

import msgspec

from distdiag.events.base import Event, Frame
from distdiag.events.ranks import RankSet
from distdiag.events.routing import Choice

# What two runs of one script differ in, as the parity comparison shows it to the checks.


class Subject(StrEnum):
    """What differs, in the order of cause and consequence."""

    DATA = "data"
    START = "start"
    OUTPUT = "output"
    LOSS = "loss"
    GRADIENT = "gradient"
    UPDATE = "update"


class Reason(StrEnum):
    """What is behind a divergence, as far as it was measured."""

    UNKNOWN = "unknown"
    BATCH = "batch"  # a batch is more than its samples: each rank is right about its own
    SHARDS = "shards"  # an optimizer takes a rank's part of a parameter for the whole
    ORDER = "order"  # a function returns the parts of a sequence in another order
    AXIS = "axis"  # gradients of what the ranks of one axis share are off by its size


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity of both runs.

    `measured` is the difference relative to the reference, `bound` what rounding explains of it,
    and `ratio` how many times the bound it is: above 1 the quantity differs. `factor` is by what
    the reference would have to be multiplied to come closest.
    """

    name: str
    measured: float
    bound: float
    ratio: float
    factor: float = 1.0


class Divergence(Event, frozen=True, kw_only=True):
    """At `step` a run differs from its reference, and before it did not.

    `differences` begin with the one that came first (the forward order of modules, the backward
    order of gradients); `num_compared` were compared. `explanation` is what was found out about
    them, and `fix` what to do if that is more than the check knows. `culprits` are the ranks whose
    part differs, where known. `weights` are the shares with which the data of each coordinate
    enters, where they are known, and `due` those that it should have. `is_share`: it is in a part
    of the loss only. `padded` are the parts of batches, by this step, that were filled up with a
    value that nobody named: what differs may come of that alone. `is_filled`: some were filled up,
    be it with what their names suggest. `site` is the line of the program that is behind it, where
    known.
    """

    subject: Subject
    candidate: str
    reference: str
    differences: tuple[Difference, ...]
    num_compared: int
    explanation: str = ""
    fix: str = ""
    culprits: RankSet
    weights: tuple[float, ...] = ()
    due: tuple[float, ...] = ()
    details: tuple[str, ...] = ()
    is_share: bool = False
    reason: Reason = Reason.UNKNOWN
    padded: tuple[str, ...] = ()
    is_filled: bool = False
    site: Frame | None = None


# Where two runs of one script route a token differently.


class Nature(StrEnum):
    """What kind of difference led to other routes."""

    NUMERIC = "numeric"  # rounding
    LOGIC = "logic"  # other data, weights or random numbers
    MEANT = "meant"  # noise of a gate whose options ask for it


class Origin(StrEnum):
    """What differs first."""

    DATA = "data"
    WEIGHTS = "weights"
    DRAW = "draw"  # random numbers in a module
    MODULE = "module"  # given the same, a module returns something else
    TIE = "tie"  # the router's scores are the same, what is chosen by them is not
    GRADIENT = "gradient"
    UNKNOWN = "unknown"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """What differs first in two runs.

    `name` is that of the module or tensor and `kind` the class of the module, `ops` its calls that
    are not bound to one order of additions. `size` is how far apart the values are, relative to the
    greatest of them (-1 if not known), `dtype` the type in which they are. `details` tell more.
    """

    origin: Origin
    nature: Nature
    rank: int
    step: int
    micro: int
    name: str = ""
    kind: str = ""
    ops: tuple[str, ...] = ()
    size: float = -1.0
    dtype: str = ""
    details: tuple[str, ...] = ()


class Flip(msgspec.Struct, frozen=True, kw_only=True):
    """One token that the runs send to different experts.

    `margin` is how far the last score that was chosen lay above the first that was not, in the run
    where that is more; `roundings` is the same in units of rounding of the scores.
    """

    token: int
    experts: tuple[int, ...]
    experts_again: tuple[int, ...]
    margin: float
    roundings: float


class MarginBin(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens had a margin of up to `up_to` roundings, and how many of them were flipped.

    `num_flipped_first` counts those of the first step with any; later ones follow from them. A
    flip at such a margin `is_numeric` if rounding in the run's coarsest type may explain it.
    """

    up_to: float
    num_tokens: int
    num_flipped: int
    num_flipped_first: int
    is_numeric: bool


class RoutingDifference(Event, frozen=True, kw_only=True):
    """At this place two runs of one script choose different experts, and before it they did not.

    `layer`, `micro`, `call` and `number` say where, as for ``Routing``. `flip` is the first token;
    None if the number of tokens differs. `margins` are those of all choices that were compared.
    `culprits` are the ranks whose choices differ there.
    """

    layer: str
    micro: int
    call: int
    number: int
    is_recompute: bool
    choice: Choice
    flip: Flip | None
    num_flipped: int
    cause: Cause
    margins: tuple[MarginBin, ...]
    num_compared: int
    num_different: int
    culprits: RankSet
