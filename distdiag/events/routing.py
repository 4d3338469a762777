"""What probes observe of the routing of tokens to experts."""

import msgspec

from distdiag.events.base import CallSite, Event


class Choice(msgspec.Struct, frozen=True, array_like=True):
    """How many of how many experts each token is sent to, and by scores of which type.

    `api` is the function that chose. `num_experts` may be the number of groups of experts, where
    these are chosen first.
    """

    api: str
    num_tokens: int
    num_experts: int
    k: int
    dtype: str


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How the tokens of one choice spread over the experts of this rank's router.

    `peak` is what the most loaded expert gets, in multiples of an even share; `idle_share` of the
    experts get nothing. `dropped_share` of the choices are beyond the capacity of their expert; -1
    if it has none, or none that is known.
    """

    peak: float
    idle_share: float
    dropped_share: float = -1.0


class Routing(Event, frozen=True, kw_only=True):
    """A router has chosen experts for the tokens of one call.

    `layer` is the FQN of the module that chose, `call` numbers its calls in a step apart for first
    forward passes and for those that activation checkpointing repeats (`is_recompute`), `number`
    the choices in one call. `members` are the ranks that train the model together, empty if
    unknown. `given`, `scores` and `chosen` are digests of the tokens, of the scores and of the
    indices in ascending order; empty: not readable. `is_random`: the gate is meant to draw random
    numbers, or did so. `tie_share` of the tokens have equal scores at the boundary between the
    experts that were chosen and the next one, `near_share` scores that a rounding error of bfloat16
    could exchange; -1 if not known. `load` is None where the indices are not those of experts.
    """

    model: str
    layer: str
    members: tuple[int, ...]
    call: int
    number: int
    is_recompute: bool
    is_random: bool
    choice: Choice
    given: str
    scores: str
    chosen: str
    tie_share: float
    near_share: float
    load: Load | None
    site: CallSite


class CounterWritten(Event, frozen=True, kw_only=True):
    """A forward pass of a module that routes has changed a tensor that the module keeps.

    `name` is that of the buffer or attribute, `after` a digest of what it holds then. The rest is
    as for `Routing`.
    """

    model: str
    layer: str
    name: str
    call: int
    is_recompute: bool
    after: str
    site: CallSite


class TokensExchanged(Event, frozen=True, kw_only=True):
    """A layer that routes is about to exchange tokens by the collective with event number `call`.

    `ordinal` numbers the forward passes of the layer in a step. `num_tokens`, `num_experts` and `k`
    are those of its last choice; `capacity` is how many tokens an expert takes, 0 if not known.
    """

    model: str
    layer: str
    ordinal: int
    is_recompute: bool
    call: int
    num_tokens: int
    num_experts: int
    k: int
    capacity: int = 0


class CountsHeld(Event, frozen=True, kw_only=True):
    """A layer that routes has summed up how many tokens each expert gets, in a type of few bits.

    `how` they were summed up: ``added up`` or ``all-reduced``. `greatest` is the largest count.
    """

    model: str
    layer: str
    how: str
    dtype: str
    greatest: float
    site: CallSite


class AuxLoss(Event, frozen=True, kw_only=True):
    """What became of the auxiliary losses of a layer in the backward passes of one step.

    `num_passes` forward passes had scores through which gradients came back. In `num_computed` of
    them one number was made of the scores, in `num_injected` a function of the program was given
    such a number beside a tensor that it returns; in `num_used` a gradient came by any of these.
    `coefficient` is what the module says of it itself, such as ``aux_loss_coef = 0.01``.
    """

    model: str
    layer: str
    num_passes: int
    num_computed: int
    num_injected: int
    num_used: int
    coefficient: str
    site: CallSite
