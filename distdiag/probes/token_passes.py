"""Sends numbered tokens through a program's split, attention and gather, and back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distdiag.probes.attended_tokens import AttentionPasses
from distdiag.probes.attention_gradients import attention_gradients
from distdiag.probes.token_codes import TokenCodes, by_token
from distdiag.sequence_event import TokenSpec

AnyFunction = Callable[..., Any]


class Functions(NamedTuple):
    """What a program does to a sequence. `attention` takes query, key and value of one part.

    Without a `gather` the parts are looked at, and neither attention nor gradients.
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
    """Run the functions and return what a `TokenPassport` says of them.

    Random numbers that they draw are drawn again by whoever comes next. What they raise is told,
    not raised.
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


def _ask_all(stage: str, function: AnyFunction, *values: Any, **options: Any) -> Any:  # noqa: ANN401
    try:
        return function(*values, **options)
    except Exception as error:  # noqa: BLE001 (it is the program's own, and part of what is seen)
        raise _StageError(stage, f"{type(error).__name__}: {error}") from None
