"""Sends numbered tokens through a program's split, attention and gather, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from distdiag.events.sequences import Context, Run, TokenSpec
from distdiag.probes.sequence.token_codes import TokenCodes, by_token
from distdiag.probes.untyped import Untyped
from distdiag.record.guard import Guard

# Over which tokens each token attends, read from what attention makes of marked values.
#
# Queries and keys are zero, so that all tokens that one may see weigh alike.

_LEAST_WEIGHT: Final = 1e-6
_ROOM: Final = 0.02
_MOST_LANES: Final = 40
_MOST_RUNS: Final = 64
_MOST_RUNS_IN_ALL: Final = 8192

OnTensor = Callable[..., Tensor]


class AttentionPasses:
    """Marks as many tokens at a time as there are channels."""

    def __init__(self, spec: TokenSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._hidden = spec.shape[-1]
        self._num_heads = spec.shape[1 if spec.dim == 2 else 2] if len(spec.shape) == 4 else 1

    def run(
        self,
        split: OnTensor,
        attend: OnTensor,
        gather: OnTensor,
        gradient_of: OnTensor,
        tokens: tuple[int, ...],
    ) -> dict[str, Any]:
        """Return what a `TokenTrace` says of attention; the rank holds these `tokens`."""
        seen: dict[str, Any] = {}
        weights = []
        for first in range(0, self._spec.length, self._hidden):
            whole = self._whole(self._marks(first)).requires_grad_(self._spec.has_backward)
            part = split(whole)
            result = attend(*self._zeros(split), part)
            weights.append(self._rows_first(result.detach()))
            seen["attention_shape"] = tuple(result.shape)
            if first == 0 and self._spec.has_backward:
                counts = self._counts()
                gradient = gradient_of(gather(result), whole, counts)
                if result.shape == part.shape:
                    seen["attended"] = by_token(self._spec, gradient)
        lanes = attend(*self._zeros(split), split(self._whole(self._lane_numbers())))
        if result.shape != part.shape or len(tokens) != weights[0].shape[0] * weights[0].shape[1]:
            return seen
        shares = torch.cat(weights, dim=-1)[..., : self._spec.length]
        seen["contexts"] = tuple(self._contexts(tokens, shares, self._rows_first(lanes.detach())))
        return seen

    def _zeros(self, split: OnTensor) -> list[Tensor]:
        zeros = torch.zeros(self._spec.shape, dtype=self._dtype, device=self._device)
        return [split(zeros.clone().requires_grad_(self._spec.has_backward)) for _ in range(2)]

    # Tensors here have the dimensions row, position, head and hidden.

    def _marks(self, first: int) -> Tensor:
        marks = torch.zeros(self._spec.length, self._hidden, device="cpu")
        for channel in range(min(self._hidden, self._spec.length - first)):
            marks[first + channel, channel] = 1
        return marks[None, :, None, :]

    def _lane_numbers(self) -> Tensor:
        # bfloat16 holds them all, and tells an average of one from its neighbours.
        lanes = torch.arange(self._spec.batch * self._num_heads, device="cpu")
        numbers = 2 + lanes % _MOST_LANES
        return numbers.reshape(self._spec.batch, 1, self._num_heads, 1)

    def _counts(self) -> Tensor:
        counts = [len(self._spec.context(position)) for position in range(self._spec.length)]
        return self._whole(torch.tensor(counts, device="cpu")[None, :, None, None])

    def _whole(self, values: Tensor) -> Tensor:
        """Return a tensor of the program's form."""
        form = (self._spec.batch, self._spec.length, self._num_heads, self._hidden)
        whole = values.to(self._device, self._dtype).expand(form)
        whole = whole if len(self._spec.shape) == 4 else whole.squeeze(2)
        return whole.movedim(1, self._spec.dim).contiguous()

    def _rows_first(self, values: Tensor) -> Tensor:
        values = values.cpu().double().movedim(self._spec.dim, 1)
        return values if values.ndim == 4 else values.unsqueeze(2)

    def _contexts(
        self, tokens: tuple[int, ...], shares: Tensor, lanes: Tensor
    ) -> Iterator[Context]:
        total = shares.sum(-1, keepdim=True)
        least = shares.masked_fill(shares < _LEAST_WEIGHT, float("inf")).amin(-1, keepdim=True)
        times = (shares / least).round().long().flatten(0, 1)
        padding = (1 - total).flatten(0, 1).squeeze(-1)
        wanted = self._lane_numbers().double()
        is_mixed = ((lanes / total - wanted).abs() > _ROOM * wanted).any(-1).flatten(0, 1)
        left = _MOST_RUNS_IN_ALL
        for index, token in enumerate(tokens):
            if token < 0 or left <= 0:
                continue
            patterns = dict.fromkeys(tuple(each) for each in times[index].tolist())
            for pattern in patterns:
                of_heads = (times[index] == torch.tensor(pattern, device="cpu")).all(-1)
                share = padding[index][of_heads].max().item()
                runs = _runs(pattern)
                left -= max(len(runs), 1)
                yield Context(
                    token,
                    runs,
                    round(share, 4) if share > _ROOM else 0.0,
                    bool(is_mixed[index][of_heads].any()),
                    () if of_heads.all() else tuple(of_heads.nonzero().flatten().tolist()),
                )


def _runs(times: tuple[int, ...]) -> tuple[Run, ...]:
    runs: list[Run] = []
    for count, group in groupby(enumerate(times), key=lambda item: item[1]):
        places = [place for place, _ in group]
        if count:
            runs.append((places[0], places[-1] + 1, count))
    return tuple(runs[:_MOST_RUNS])


# The gradients of a program's split attention beside those of plain attention over whole rows.
#
# Queries, keys and values are random numbers here, the same on all ranks. Of each token the sum
# over its channels with fixed weights is kept, which is the same for a sum of gradients.

_MOST_SCORES: Final = 1 << 23
_LEAST_ROOM: Final = 1e-3
_MANY_UNITS: Final = 32
_SEED: Final = 20_260_301

Gradients = Callable[[Tensor, list[Tensor], Tensor], list[Tensor]]


def attention_gradients(
    spec: TokenSpec,
    device: torch.device,
    functions: tuple[OnTensor, OnTensor, OnTensor],
    gradients_of: Gradients,
) -> dict[str, Any]:
    """Return what a `TokenTrace` says of these gradients; nothing if there would be too many.

    `functions` are split, attention and gather.
    """
    split, attend, gather = functions
    dtype: torch.dtype = getattr(torch, spec.dtype)
    wholes, weights = _random(spec, dtype)
    heads = math.prod(spec.shape) // spec.num_tokens // spec.shape[-1]
    if spec.batch * heads * spec.length**2 > _MOST_SCORES:
        return {}
    sources = [each.to(device).requires_grad_() for each in wholes]
    out = gather(attend(*(split(each) for each in sources)))
    found = gradients_of(out, sources, weights.to(device))
    room = max(_LEAST_ROOM, _MANY_UNITS * torch.finfo(dtype).eps)
    for scale in (spec.shape[-1] ** -0.5, 1.0):
        exact = [each.double().requires_grad_() for each in wholes]
        plain = _plain(spec, exact, scale)
        if out.shape == plain.shape and _is_near(out.detach().cpu().double(), plain, room):
            due = torch.autograd.grad(plain, exact, weights.double())
            return {
                "gradients": tuple(_by_token(spec, each) for each in found),
                "due_gradients": tuple(_by_token(spec, each) for each in due),
            }
    return {}  # another kind of attention, or one that is wrong already


def _random(spec: TokenSpec, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    tensors = [torch.randn(spec.shape, generator=generator).to(dtype) for _ in range(4)]
    return tensors[:3], tensors[3]


def _is_near(out: Tensor, plain: Tensor, room: float) -> bool:
    return bool((out - plain.detach()).norm() <= room * plain.detach().norm())


def _plain(spec: TokenSpec, sources: list[Tensor], scale: float) -> Tensor:
    """Return softmax attention over whole rows."""
    query, key, value = (_heads_first(spec, each) for each in sources)
    seen = torch.zeros(spec.length, spec.length, dtype=torch.bool)
    for position in range(spec.length):
        seen[position, list(spec.context(position))] = True
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))
    out = (scores.softmax(-1) @ value).transpose(1, 2)  # rows, positions, heads, channels
    out = out if len(spec.shape) == 4 else out.squeeze(2)
    return out.movedim(1, spec.dim)


def _heads_first(spec: TokenSpec, tensor: Tensor) -> Tensor:
    rows = tensor.movedim(spec.dim, 1)
    return (rows if rows.ndim == 4 else rows.unsqueeze(2)).transpose(1, 2)


def _by_token(spec: TokenSpec, gradient: Tensor) -> tuple[float, ...]:
    rows = gradient.detach().cpu().double().movedim(spec.dim, 1)
    channels = rows.reshape(spec.num_tokens, -1)
    weights = torch.cos(2.399963 * torch.arange(channels.shape[1], dtype=torch.float64))
    return tuple((channels @ weights).tolist())


# Sends the tokens through, forward and backward.

AnyFunction = Callable[..., Any]


class Functions(NamedTuple):
    """What a program does to a sequence. `attention` takes query, key and value of one part.

    Without a `gather` the parts are compared, and neither attention nor gradients.
    """

    split: AnyFunction
    gather: AnyFunction | None
    attention: AnyFunction | None = None


class _StageError(Exception):
    """A function of the program raised, or returned something that is no tensor."""

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage


def seen_by(functions: Functions, spec: TokenSpec, device: torch.device) -> dict[str, Any]:
    """Run the functions and return what a `TokenTrace` says of them.

    Random numbers that they draw are drawn again by whoever comes next. What they raise is
    reported, not raised.
    """
    seen: dict[str, Any] = {}
    with ExitStack() as stack:
        devices = [torch.cuda.current_device()] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        passes = _Passes(functions, spec, device)
        try:
            seen |= passes.there_and_back()
            if functions.gather is not None and functions.attention is not None:
                seen |= passes.attention(seen["parts"])
        except _StageError as error:
            seen |= {"stage": error.stage, "error": str(error)[:500]}
    return seen


class _Passes:
    def __init__(self, functions: Functions, spec: TokenSpec, device: torch.device) -> None:
        self._functions = functions
        self._spec = spec
        self._device = device
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._codes = TokenCodes(spec, self._dtype, device)
        self._goes_back = spec.has_backward and self._dtype.is_floating_point

    def there_and_back(self) -> dict[str, Any]:
        """Send each digit through split and gather, and its gradient back."""
        parts: list[Tensor] = []
        gathered: list[Tensor] = []
        ratios: list[Tensor] = []
        for index in range(self._codes.num_digits):
            whole = self._codes.digit(index).requires_grad_(self._goes_back)
            weights = whole.detach().clone()
            part = _ask("split", self._functions.split, whole)
            parts.append(part.detach().clone())
            if self._functions.gather is None:
                continue
            joined = _ask("gather", self._functions.gather, part)
            gathered.append(joined.detach().clone())
            if self._goes_back:
                ratios.append(gradient_of(joined, whole, weights) / weights)
        seen: dict[str, Any] = {
            "part_shape": tuple(parts[0].shape),
            "parts": self._codes.tokens(parts),
        }
        if gathered:
            seen["gathered_shape"] = tuple(gathered[0].shape)
            seen["gathered"] = self._codes.tokens(gathered)
        if ratios and gathered[0].shape == weights.shape:
            stacked = torch.stack([ratio.double() for ratio in ratios], dim=-1)
            seen["scales"] = by_token(self._spec, stacked)
        return seen

    def attention(self, tokens: tuple[int, ...]) -> dict[str, Any]:
        """Let the tokens attend to one another, all of them alike."""

        def split(whole: Tensor) -> Tensor:
            return _ask("split", self._functions.split, whole)

        def attend(*values: Tensor) -> Tensor:
            assert self._functions.attention is not None
            return _ask("attention", self._functions.attention, *values)

        def gather(part: Tensor) -> Tensor:
            assert self._functions.gather is not None
            return _ask("gather", self._functions.gather, part)

        passes = AttentionPasses(self._spec, self._dtype, self._device)
        seen = passes.run(split, attend, gather, gradient_of, tokens)
        if self._goes_back:
            functions = (split, attend, gather)
            seen |= attention_gradients(self._spec, self._device, functions, gradients_of)
        return seen


def gradient_of(result: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the weighted sum of a result, zeros where nothing leads back."""
    return gradients_of(result, [source], weights)[0]


def gradients_of(result: Tensor, sources: list[Tensor], weights: Tensor) -> list[Tensor]:
    """Return the gradients of the weighted sum of a result, by its sources."""
    if not result.requires_grad:
        return [torch.zeros_like(source) for source in sources]
    if result.shape != weights.shape:
        # Useless, but ranks whose result has the right form may wait in their backward pass.
        weights = torch.ones_like(result)
    gradients = _ask_all(
        "backward",
        torch.autograd.grad,
        result,
        sources,
        grad_outputs=weights.to(result.dtype),
        allow_unused=True,
    )
    return [
        torch.zeros_like(source) if gradient is None else gradient
        for source, gradient in zip(sources, gradients, strict=True)
    ]


def _ask(stage: str, function: AnyFunction, *values: Tensor) -> Tensor:
    result = _ask_all(stage, function, *values)
    if not isinstance(result, Tensor):
        raise _StageError(stage, f"it returned {type(result).__name__}, not a tensor")
    return result


def _ask_all(stage: str, function: AnyFunction, *values: object, **options: object) -> Untyped:
    problems: list[Exception] = []
    with Guard(problems.append):  # what the program's own function raises is part of what is seen
        return function(*values, **options)
    raise _StageError(stage, f"{type(problems[0]).__name__}: {problems[0]}")
