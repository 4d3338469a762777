"""The ``[numerics]`` table of a configuration: which numbers of a training are findings."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class NumericsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds of the checks of numbers (`NUM`); docs/numerics.md has the reason of each.

    `smallest_gradient_norm` and `largest_gradient_norm` bound the norm of all gradients of a
    model, `module_imbalance` the ratio of the norms of two modules, `component_dominance` that of
    two terms of a loss. `entropy_share` is the share of the largest possible entropy,
    `codebook_use` that of the codes, `parameter_share` that of the parameters in one tensor.
    `cost_share` is the share of the time of a training that reading the numbers of modules may
    take, beside the first steps; 1 reads in each step.
    """

    smallest_gradient_norm: Positive = 1e-8
    largest_gradient_norm: Positive = 1e3
    module_imbalance: Positive = 100.0
    component_dominance: Positive = 100.0
    entropy_share: Share = 0.9
    codebook_use: Share = 0.1
    parameter_share: Share = 0.7
    cost_share: Share = 0.01


USUAL: Final = NumericsConfig()
"""The thresholds where the user sets none."""


def numerics_config_of(table: object) -> NumericsConfig:
    """Return what a ``[numerics]`` table says.

    Raises:
        ValueError: a value of the table does not fit; the message names the key.

    """
    try:
        return msgspec.convert(table, NumericsConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f'key "numerics": {error}') from None
