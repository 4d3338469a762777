"""Compares what a step function returned on one rank with what it returned on several."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from distdiag.testing.plan import Measured

Rtol = float | Literal["auto"]

ROUNDINGS: Final = 32
"""Another order of summing may change a value by so many units of rounding in each step."""
NOISE_FACTOR: Final = 8
"""It may differ by so many times what two equal runs differ."""
SMALLEST_SHARE: Final = 1e-3
"""A value that is smaller than this share of the largest one of its name counts as so large."""
SAME_RATIO: Final = 0.01
MOST_SHOWN: Final = 5

_UNITS: Final[Mapping[str, float]] = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}

MOST_VALUES: Final = 1 << 20
"""Of a larger tensor so many evenly spaced elements are compared."""


# What a step function returned, as numbers that another process can compare.


def measure(returned: object) -> Measured:
    """Return the numbers of a loss, a list of losses, a dict of such and of tensors, or a model.

    Of a model these are its parameters, in its order and under the names without those of wrappers.

    Raises:
        TypeError: it is something else.

    """
    named = returned if isinstance(returned, Mapping) else _named(returned)
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


def _named(returned: object) -> dict[str, Any]:
    import torch

    from distdiag.probes.models.modules import clean_name

    if isinstance(returned, torch.nn.Module):
        return {clean_name(name): value for name, value in returned.named_parameters()}
    return {"loss": returned}


def _numbers(value: object, name: str) -> tuple[list[float], str]:
    import torch

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


# How far the values of several ranks are from those of one.


class Difference(NamedTuple):
    """Where the values of one name differ most beyond what they may."""

    name: str
    place: int
    is_series: bool
    base: float
    other: float
    bound: float
    ratio: float | None

    def sentence(self, world_size: int) -> str:
        """Say what differs, by how much, how much it may, and what the ratio reminds of."""
        place = f" at step {self.place}" if self.is_series else f"[{self.place}]"
        measured = abs(self.other - self.base)
        times = f", {measured / self.bound:.3g} times as much" if 0 < self.bound < measured else ""
        text = (
            f"{self.name}{place} is {self.other:.9g} on {world_size} ranks and {self.base:.9g} on "
            f"one: they differ by {measured:.3g}, and may by {self.bound:.3g}{times}"
        )
        return f"{text}; {_ratio_phrase(self.ratio, world_size)}"


def replicas_problem(by_rank: Mapping[int, Measured]) -> str | None:
    """Say where the ranks of one run return other values than rank 0, if they do."""
    for rank, measured in by_rank.items():
        for difference in differences(by_rank[0], measured, noise=None, rtol="auto", world_size=1):
            place = f" at step {difference.place}" if difference.is_series else ""
            return (
                f"the ranks do not agree on {difference.name}{place}: {difference.base:.9g} on "
                f"rank 0, {difference.other:.9g} on rank {rank}. If each rank returns its own "
                "part, reduce it over the ranks before returning it"
            )
    return None


def parity_problem(
    base: Measured, other: Measured, noise: Measured | None, *, rtol: Rtol, world_size: int
) -> str | None:
    """Say where a run on several ranks differs from that on one, if it does.

    `noise` is what a second run on one rank returned.
    """
    absent = base.values.keys() ^ other.values.keys()
    if absent:
        return f"only one of the runs returned {', '.join(sorted(absent))}"
    found = list(differences(base, other, noise=noise, rtol=rtol, world_size=world_size))
    if not found:
        return None
    lines = [difference.sentence(world_size) for difference in found[:MOST_SHOWN]]
    if len(found) > 1:
        lines[0] = f"{len(found)} of {len(base.values)} names differ, the first is {lines[0]}"
    if len(found) > MOST_SHOWN:
        lines.append(f"and {len(found) - MOST_SHOWN} more names differ")
    return "\n".join([*lines, _allowance(base, found[0].name, rtol, noise)])


def differences(
    base: Measured,
    other: Measured,
    *,
    noise: Measured | None,
    rtol: Rtol,
    world_size: int,
) -> Iterator[Difference]:
    """Yield for each name the worst difference that is more than may be."""
    for name, ours in base.values.items():
        theirs = other.values.get(name, [])
        is_series = name in base.series
        if len(ours) != len(theirs):
            yield Difference(name, min(len(ours), len(theirs)), is_series, *(math.nan,) * 3, None)
            continue
        again = noise.values.get(name, ours) if noise is not None else ours
        bounds = _bounds(ours, theirs, again, base.dtypes[name], rtol, is_series=is_series)
        worst = _worst(ours, theirs, bounds)
        if worst is not None:
            ratio = _ratio(ours, theirs)
            yield Difference(
                name, worst, is_series, ours[worst], theirs[worst], bounds[worst], ratio
            )


def _bounds(
    ours: list[float],
    theirs: list[float],
    again: list[float],
    dtype: str,
    rtol: Rtol,
    *,
    is_series: bool,
) -> list[float]:
    largest = max((abs(value) for value in ours if math.isfinite(value)), default=0.0)
    unit = _UNITS.get(dtype, 0.0)
    bounds = []
    for index, (a, b, c) in enumerate(zip(ours, theirs, again, strict=True)):
        # The elements of a tensor are sums of terms as large as the largest; losses stand alone.
        scale = max(abs(a), abs(b), SMALLEST_SHARE * largest) if is_series else largest
        if rtol != "auto":
            bounds.append(rtol * scale)
            continue
        num_steps = index + 1 if is_series else 1
        bounds.append(ROUNDINGS * unit * num_steps * scale + NOISE_FACTOR * abs(a - c))
    return bounds


def _worst(ours: list[float], theirs: list[float], bounds: list[float]) -> int | None:
    """Return the place of the first difference that is not finite, or of the worst one."""
    worst, excess = None, 1.0
    for index, (a, b, bound) in enumerate(zip(ours, theirs, bounds, strict=True)):
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        if not (math.isfinite(a) and math.isfinite(b)):
            return index
        times = abs(a - b) / bound if bound else math.inf
        if times > excess:
            worst, excess = index, times
    return worst


def _ratio(ours: list[float], theirs: list[float]) -> float | None:
    """Return the one ratio that nearly all values have, if they have one."""
    largest = max((abs(value) for value in ours), default=0.0)
    pairs = zip(ours, theirs, strict=True)
    ratios = [b / a for a, b in pairs if a and abs(a) > SMALLEST_SHARE * largest]
    if not ratios:
        return None
    middle = median(ratios)
    num_same = sum(abs(ratio - middle) <= SAME_RATIO * abs(middle) for ratio in ratios)
    return middle if num_same >= 0.9 * len(ratios) else None


def _ratio_phrase(ratio: float | None, world_size: int) -> str:
    if ratio is None:
        return "the values have no common ratio"
    root = math.sqrt(world_size)
    known = {
        "the world size: a sum over ranks stands where a mean belongs": float(world_size),
        "1 / the world size: a mean over ranks is taken twice, or of a sum": 1 / world_size,
        "the square root of the world size": root,
        "1 / the square root of the world size": 1 / root,
    }
    for what, factor in known.items():
        if world_size > 1 and abs(ratio - factor) <= SAME_RATIO * factor:
            return f"their ratio is {ratio:.4g}, {what}"
    return f"their ratio is {ratio:.4g}"


def _allowance(base: Measured, name: str, rtol: Rtol, noise: Measured | None) -> str:
    if rtol != "auto":
        return f"allowed: rtol={rtol:g} of the larger value"
    text = f"allowed: {ROUNDINGS} roundings of {base.dtypes[name]} a step"
    if noise is not None:
        text += f", and {NOISE_FACTOR} times what two runs on one rank differ"
    return text
