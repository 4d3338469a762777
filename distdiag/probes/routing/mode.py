"""Sees, while a module routes, which of its calls choose experts."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from distdiag.probes.guard import guard
from distdiag.probes.losses.aux_losses import is_scalar
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.bytes import is_readable
from distdiag.probes.untyped import Untyped

_DRAWS: Final = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor, torch.nn.functional)
    for name in (
        *("rand", "randn", "rand_like", "randn_like", "multinomial", "bernoulli", "normal"),
        *("uniform_", "normal_", "exponential_", "bernoulli_", "gumbel_softmax"),
        *("randint", "randint_like", "randperm", "random_", "cauchy_", "log_normal_"),
    )
    if hasattr(owner, name)
)
_TOP_K: Final = (torch.topk, torch.Tensor.topk)
_BEST: Final = (torch.max, torch.Tensor.max, torch.argmax, torch.Tensor.argmax)
_WRITES: Final = frozenset(
    ("__iadd__", "__isub__", "__setitem__", "add_", "sub_", "copy_", "index_add_", "scatter_add_")
)
_CHOICES: Final = frozenset((*_TOP_K, *_BEST))


class Chosen(NamedTuple):
    """A call that has chosen: its scores, with one row for each token, and the indices."""

    api: str
    scores: torch.Tensor
    indices: torch.Tensor
    is_sure: bool
    """Whether it chooses some of many, rather than looks for the largest."""
    node: Any = None
    """Where the graph says how the scores were made."""


def _ignore(*_: object) -> None:
    """Take no note."""


class RoutingMode(TorchFunctionMode):
    """Tells of calls that choose, draw, write or yield one number; all calls run as they would."""

    def __init__(
        self,
        on_choice: Callable[[Chosen], None],
        on_draw: Callable[[], None],
        on_write: Callable[[object], None],
        on_scalar: Callable[[torch.Tensor], None] = _ignore,
        on_call: Callable[[str, tuple[Any, ...], object, Chosen | None], None] = _ignore,
        *,
        fail: Callable[[Exception], None],
    ) -> None:
        """Notify these; they raise nothing. `on_call` gets each call, by its name.

        `fail` gets what goes wrong here.
        """
        super().__init__()
        self._fail = fail
        self._on_choice = on_choice
        self._on_draw = on_draw
        self._on_write = on_write
        self._on_scalar = on_scalar
        self._on_call = on_call

    def __torch_function__(
        self,
        func: Untyped,
        types: Untyped,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            with guard(self._fail):
                self._see(func, args, kwargs, result)
        return result

    def _see(
        self,
        func: Untyped,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Untyped,
    ) -> None:
        name = getattr(func, "__name__", "")
        chosen = _chosen(func, args, kwargs, result) if func in _CHOICES else None
        if chosen is not None:
            self._on_choice(chosen)
        elif func in _DRAWS:
            self._on_draw()
        elif name in _WRITES and args:
            self._on_write(args[0])
        elif is_scalar(result):
            self._on_scalar(result)
        self._on_call(name, args, result, chosen)


def _chosen(
    func: Untyped,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Untyped,
) -> Chosen | None:
    scores = args[0] if args else kwargs.get("input")
    if not isinstance(scores, torch.Tensor) or scores.ndim < 2 or not scores.is_floating_point():
        return None
    dim = _dim(func, args, kwargs)
    if dim is None or dim % scores.ndim != scores.ndim - 1 or kwargs.get("largest") is False:
        return None
    indices = result if isinstance(result, torch.Tensor) else result[1]
    scores, indices = local_part(scores), local_part(indices)
    if indices.ndim == scores.ndim - 1:
        indices = indices.unsqueeze(-1)
    if indices.shape[:-1] != scores.shape[:-1]:
        return None
    rows, picks = _rows(scores), _rows(indices)
    return Chosen(func.__name__, rows, picks, func in _TOP_K, scores.grad_fn)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as rows, and a mere shape in the place of one that cannot be read."""
    if not is_readable(tensor):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().reshape(-1, tensor.shape[-1])


def _dim(func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    place, default = (2, -1) if func in _TOP_K else (1, None)
    dim = kwargs.get("dim", args[place] if len(args) > place else default)
    return dim if isinstance(dim, int) and not isinstance(dim, bool) else None
