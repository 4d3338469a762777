"""The ``[routing]`` table: which modules route tokens to experts, where names do not tell."""

from __future__ import annotations

from typing import Annotated

import msgspec

Pattern = Annotated[str, msgspec.Meta(min_length=1)]


class RoutingPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Patterns of the names of modules that are given the experts of tokens, or return them.

    ``*`` stands for anything, dots too. What is read is the first tensor of integers with a row for
    each token, or of booleans with a column for each expert: of the arguments, else of the result.
    """

    modules: tuple[Pattern, ...] = ()


def routing_plan_of(table: object) -> RoutingPlan:
    """Return what a ``[routing]`` table says.

    Raises:
        ValueError: the table is no such plan; the message names the key.

    """
    try:
        return msgspec.convert(table, RoutingPlan)
    except msgspec.ValidationError as error:
        raise ValueError(f'key "routing": {error}') from None
