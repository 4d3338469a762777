"""Turns what a step function returns into numbers that another process can compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from distdiag.testing.plan import Measured

MOST_VALUES: Final = 1 << 20
"""Of a larger tensor so many evenly spaced elements are compared."""


def measure(returned: Any) -> Measured:  # noqa: ANN401
    """Return the numbers of a loss, of a list of losses, or of a dict of such and of tensors.

    Raises:
        TypeError: it is something else.

    """
    named = returned if isinstance(returned, Mapping) else {"loss": returned}
    values: dict[str, list[float]] = {}
    dtypes: dict[str, str] = {}
    series: list[str] = []
    for key, value in named.items():
        name = str(key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            series.append(name)
            parts = [_numbers(each, name) for each in value]
            values[name] = [number for numbers, _ in parts for number in numbers]
            dtypes[name] = parts[0][1] if parts else "float32"
        else:
            values[name], dtypes[name] = _numbers(value, name)
    return Measured(values=values, dtypes=dtypes, series=tuple(series))


def _numbers(value: Any, name: str) -> tuple[list[float], str]:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        # A DTensor stands for the whole that its ranks hold together.
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        flat = whole.detach().flatten()
        flat = flat[:: -(-flat.numel() // MOST_VALUES) or 1]
        kind = str(whole.dtype).removeprefix("torch.")
        return flat.to("cpu", torch.float64).tolist(), kind
    if isinstance(value, int | float):
        # Most are the item() of a tensor of torch's default dtype.
        return [float(value)], str(torch.get_default_dtype()).removeprefix("torch.")
    raise TypeError(
        f"assert_parity compares numbers, tensors and lists of them; the step function returned "
        f"{type(value).__name__} for {name!r}"
    )
