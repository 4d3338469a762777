"""The tables of a configuration that name functions or numbers of the program."""

from typing import Annotated, Final, Literal

import msgspec

from distdiag.events.sequences import Reduction

# The ``[routing]`` table: which modules route tokens to experts, where names do not tell.

Pattern = Annotated[str, msgspec.Meta(min_length=1)]


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Patterns of the names of modules that are given the experts of tokens, or return them.

    ``*`` stands for anything, dots too. What is read is the first tensor of integers with a row for
    each token, or of booleans with a column for each expert: of the arguments, else of the result.
    """

    modules: tuple[Pattern, ...] = ()


def routing_config_of(table: object) -> RoutingConfig:
    """Return what a ``[routing]`` table says.

    Raises:
        ValueError: a value of the table does not fit; the message names the key.

    """
    try:
        return msgspec.convert(table, RoutingConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f'key "routing": {error}') from None


# The ``[aux_loss]`` table: what the loss graph shows only as a number.


class AuxLossConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what the program multiplies its auxiliary (load-balancing) losses; 0 if not declared.

    It is the whole coefficient, before any division by ranks, micro-steps or layers.
    """

    coefficient: Annotated[float, msgspec.Meta(ge=0)] = 0.0


def aux_loss_config_of(table: object) -> AuxLossConfig:
    """Return what an ``[aux_loss]`` table says.

    Raises:
        ValueError: a value of the table does not fit; the message names the key.

    """
    try:
        return msgspec.convert(table, AuxLossConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f'key "aux_loss": {error}') from None


# The ``[sequence]`` table: which functions split and gather sequences, and how to verify them.

MOST_TOKENS: Final = 8192
MOST_ATTENDING: Final = 1024
"""So many tokens at most are numbered, and so many where attention is compared."""
_MANY: Final = 32
"""With more ranks a row has fewer tokens for each."""

Dtype = Literal["float64", "float32", "float16", "bfloat16", "int64", "int32"]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
_REFERENCE: Final = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
Reference = Annotated[str, msgspec.Meta(pattern=_REFERENCE)]


class SequenceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to verify: the n-th split with the n-th gather and, if any are named, attention.

    Functions are named as ``package.module:function``. The numbered tensor has the dimensions
    batch, heads and hidden (0: has none), with the length, in tokens, put in at `dim`; a length of
    0 means eight tokens for each rank. `group` are the ranks that share a sequence, or a function
    that returns them; without it they are those of the process group that the functions use.
    """

    split: tuple[Reference, ...] = ()
    gather: tuple[Reference, ...] = ()
    attention: tuple[Reference, ...] = ()
    group: Annotated[str, msgspec.Meta(pattern=_REFERENCE + "|^$")] = ""
    dim: Annotated[int, msgspec.Meta(ge=0, le=3)] = 1
    length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    batch: Count = 2
    heads: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    hidden: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 8
    dtype: Dtype = "float32"
    causal: bool = False
    documents: tuple[Count, ...] = ()
    reduction: Reduction = ""
    backward: bool = True

    def length_over(self, num_ranks: int) -> int:
        """Return how many tokens a row has on so many ranks."""
        return self.length or sum(self.documents) or num_ranks * (8 if num_ranks <= _MANY else 2)


def sequence_config_of(table: object) -> SequenceConfig:
    """Return what a ``[sequence]`` table says.

    Raises:
        ValueError: a value of the table does not fit; the message names the key.

    """
    try:
        config = msgspec.convert(table, SequenceConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f'key "sequence": {error}') from None
    if len(config.split) != len(config.gather):
        raise ValueError(
            f'key "sequence": split names {len(config.split)} and gather {len(config.gather)}: '
            "each function needs its counterpart"
        )
    if len(config.attention) not in (0, len(config.split)):
        raise ValueError('key "sequence": name an attention for each pair, or none')
    return config
