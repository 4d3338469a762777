"""What models that ranks train together are given, from batch to backward pass."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.data_event import Draw, ModelFed
from distdiag.event import CallSite
from distdiag.probes.base import AnyCallable, Probe, like
from distdiag.probes.batch_norms import NormReading, local_norms
from distdiag.probes.by_identity import WeakMap
from distdiag.probes.guard import guard
from distdiag.probes.keepers import keeper_of, unwrapped
from distdiag.probes.out_of_sight import is_grad_enabled
from distdiag.probes.sample_rows import first_tensors
from distdiag.probes.stack import frames_of
from distdiag.probes.tensor_content import Pending, contents
from distdiag.recorder import Recorder

_FIRST: Final = 6
_EVERY: Final = 100
_MOST_DRAWS: Final = 16


class Batch(NamedTuple):
    """The last batch that came from a data loader."""

    stream: str = ""
    digest: str = ""
    size: int = 0
    num_samples: int = -1
    contents: Pending | None = None
    since: int = -1


@dataclass(slots=True)
class _Fed:
    """What a model was given, until a backward pass shows that it is trained on it."""

    model: str
    members: tuple[int, ...]
    contents: Pending
    batch_sizes: tuple[int, ...]
    norm_layers: dict[str, nn.Module]
    begin: int
    site: CallSite
    norms: NormReading | None = None


_Waiting = tuple[Pending, Pending | None, NormReading | None, dict[str, Any]]


class StepFeeds(Probe):
    """Writes down inputs, random draws and batches of some backward passes."""

    name: ClassVar[str] = "step-feeds"

    def __init__(self, recorder: Recorder) -> None:
        """Nothing was fed yet."""
        super().__init__(recorder)
        self.members: tuple[int, ...] = ()
        """The ranks that train the model together which was fed last."""
        self._batch = Batch()
        self._fed: _Fed | None = None
        self._draws: list[Draw] = []
        self.is_inside = False
        """Whether a wrapped model is in its forward pass."""
        self._names: WeakMap[nn.Module, tuple[str, tuple[int, ...]]] = WeakMap()
        self._counts: dict[str, int] = {}
        self._last, self._is_fed = "", False
        self._num_passes: dict[str, int] = {}
        self._waiting: deque[_Waiting] = deque()

    def _install(self) -> None:
        kind = DistributedDataParallel
        for name, around in (
            ("_pre_forward", self._before_forward),
            ("_post_forward", self._after_forward),
        ):
            self._patches.wrap(kind, name, around)
        self.recorder.before_model, self.recorder.after_model = self.enter, self.leave
        self.recorder.on_backward.append(self._before_backward)
        self.recorder.on_step.append(self._after_step)

    def flush(self) -> None:
        """Write down what has been read by now."""
        self._guard(self._write)

    def _guard(self, action: Callable[..., None], *args: Any) -> None:  # noqa: ANN401
        if not self.is_off:
            with guard(self.fail):
                action(*args)

    # Models. Without the mark that other wrappers bear: DDP may be compiled as a whole.

    def _before_forward(self, original: AnyCallable) -> AnyCallable:
        number = len(_FEEDS)
        _FEEDS.append(self)

        @like(original)
        def pre_forward(self_: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not torch.compiler.is_compiling():
                _FEEDS[number].enter(self_, (args, kwargs))
            return original(self_, *args, **kwargs)

        return pre_forward

    def _after_forward(self, original: AnyCallable) -> AnyCallable:
        number = len(_FEEDS)
        _FEEDS.append(self)

        @like(original)
        def post_forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not torch.compiler.is_compiling():
                _FEEDS[number].leave((args[1:], kwargs))
            return original(*args, **kwargs)

        return post_forward

    def enter(self, module: nn.Module, given: object) -> bool:
        """Take note that a wrapped model is given its inputs; False: it is part of another one."""
        if self.is_inside:
            return False
        self.is_inside = True
        self._guard(self._enter_forward, module, given)
        return True

    def leave(self, output: object) -> None:
        """Take note that the forward pass of a wrapped model is over."""
        self.is_inside = False
        self._guard(self._leave_forward, output)

    def _leave_forward(self, output: object) -> None:
        fed = self._fed
        if fed is not None and fed.norms is None and fed.norm_layers:
            fed.norms = NormReading(output, fed.norm_layers)

    def _enter_forward(self, module: nn.Module, given: object) -> None:
        if not (is_grad_enabled() and module.training and dist.is_initialized()):
            return
        for tell in self.recorder.on_given:
            tell(given)
        model, self.members = self._name(module)
        if self._is_fed:
            return  # the pass is known by the model that was fed first
        self._last, self._is_fed = model, True
        if not self._is_due:
            return
        tensors, pending = first_tensors(given), self._read(given)
        frames = frames_of(sys._getframe(2), self.recorder.main_script)
        sizes = tuple(dict.fromkeys(tensor.shape[0] for tensor in tensors))
        begin = self.recorder.num_events
        norms = local_norms(unwrapped(module))
        self._fed = _Fed(model, self.members, pending, sizes, norms, begin, CallSite(frames))

    @staticmethod
    def _read(given: object) -> Pending:
        pending = contents(first_tensors(given))
        pending.guard()
        return pending

    def _name(self, module: nn.Module) -> tuple[str, tuple[int, ...]]:
        known = self._names.get(module)
        if known is None:
            keeper = keeper_of(module, "")
            kind, ranks = (keeper.kind, keeper.ranks) if keeper is not None else ("", ())
            name = f"{kind} {type(unwrapped(module)).__name__.removeprefix('FSDP')}".strip()
            number = self._counts[name] = self._counts.get(name, 0) + 1
            known = (name if number == 1 else f"{name}#{number}", ranks)
            self._names[module] = known
        return known

    # Batches and draws

    def after_batch(self, batch: Batch, given: object) -> None:
        """Take note of a batch; what was drawn before belongs to another one."""
        if batch.digest and not self.is_off and self._is_due:
            batch = batch._replace(contents=self._read(given), since=self.recorder.num_events)
        self._batch = batch
        self._draws.clear()
        for tell in self.recorder.on_given:
            tell(given)

    @property
    def wants_draws(self) -> bool:
        """Whether it matters now what the program draws."""
        # What is drawn before the first pass may be weights or the data themselves.
        return self._number > 0 and not self.is_off and self._is_due and self._has_room

    @property
    def _has_room(self) -> bool:
        return len(self._draws) < _MOST_DRAWS

    def add_draw(self, draw: Draw) -> None:
        """Take note of random numbers that were drawn."""
        self._draws.append(draw)

    @property
    def _number(self) -> int:
        """How many passes the model has had that is or was fed; all, if none has been fed yet."""
        if not self._last:
            return self.recorder.num_backwards
        return self._num_passes.get(self._last, 0)

    @property
    def _is_due(self) -> bool:
        return self._number < _FIRST or self._number % _EVERY < 2

    # Backward passes

    def _before_backward(self) -> None:
        self.is_inside = False  # whatever became of it
        self._guard(self._backward)

    def _backward(self) -> None:
        self._write()
        fed, self._fed = self._fed, None
        number = self._number
        if self._is_fed:
            self._is_fed, self._num_passes[self._last] = False, number + 1
        draws, self._draws = tuple(self._draws), []
        if fed is None:
            return
        batch = self._batch
        fields = {
            "model": fed.model,
            "number": number,
            "members": fed.members,
            "batch_sizes": fed.batch_sizes,
            "stream": batch.stream,
            "batch": batch.digest,
            "num_batch": batch.size,
            "num_samples": batch.num_samples,
            "num_local_norms": len(fed.norm_layers),
            "draws": draws,
            "begin": fed.begin,
            "end": self.recorder.num_events,
            "since": batch.since,
            "site": fed.site,
        }
        self._waiting.append((fed.contents, batch.contents, fed.norms, fields))
        self._write()

    def _after_step(self) -> None:
        self._guard(self._write)

    def _write(self) -> None:
        while self._waiting:
            inputs, batch, reading, fields = self._waiting[0]
            found = inputs.take(), [] if batch is None else batch.take()
            norms = () if reading is None else reading.take()
            if found[0] is None or found[1] is None or norms is None:
                return
            self._waiting.popleft()
            given, samples = (_digests(each) for each in found if each is not None)
            self.recorder.event(ModelFed, inputs=given, samples=samples, norms=norms, **fields)


def _digests(found: Sequence[Any]) -> tuple[str, ...]:
    return tuple("" if each is None else each.digest for each in found)


_FEEDS: Final[list[StepFeeds]] = []
"""Who is told of forward passes; a traced function may hold a list, but not a probe."""
