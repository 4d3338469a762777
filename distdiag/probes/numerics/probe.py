"""Finds the first number of a step that is not finite, in the module and on the rank that made it.

Each tensor is read by one reduction to its least and greatest value, both NaN if any value is. The
values stay on their device until they are there; nobody waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.numerics import NonFinite, NonFinitePlace, Stage
from distdiag.probes.base import AnyCallable, Probe, like
from distdiag.probes.gradients.leaves import Kept, Leaf, leaves_of
from distdiag.probes.guard import guard, guarded
from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.own_steps import EVERY
from distdiag.probes.models.registry import LiveModels, ModelNames
from distdiag.probes.models.wrappers import is_training
from distdiag.probes.numerics.activations import Activations
from distdiag.probes.numerics.bare_models import BareModels
from distdiag.probes.numerics.budget import Budget
from distdiag.probes.numerics.modules import TensorNames
from distdiag.probes.numerics.ranges import (
    Batch,
    NearLimits,
    PendingRanges,
    Reading,
    batches_of,
    range_of,
)
from distdiag.probes.numerics.windows import Detail, Window
from distdiag.probes.out_of_sight import is_grad_enabled
from distdiag.probes.tensors.by_identity import WeakMembers
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal

_FIRST_CLOSE: Final = 64
_FIRST_CLOSE_ON_GPU: Final = 4
_FIRST_CLOSE_IN_LIGHT: Final = 2
"""At so many first steps all modules are read: most that begin wrong are wrong by then. On a GPU,
where the host launches a step in the time of some hundred readings, each takes twice as long."""
_FIRST_USUAL: Final = 256
"""On CPUs so many steps are read whatever it costs: trials and tests are no longer."""
_FOR_MODULES: Final = 0.5
"""Modules are read while less than this part of the share is spent. The rest is for gradients:
without them a number that is made in a backward pass is seen in the next step only."""
_MOST_READINGS: Final = 20_000
"""A step with more passes than that is not read to its end."""
_MOST_WAITING: Final = 64
_FIRST_TOLD: Final = 8

_cuda: Any = torch.cuda  # some of it has no types


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """When to look, as `Signals` says."""

    model_started: Signal[nn.Module]
    inputs_seen: Signal[object]
    forward_started: Signal[object, nn.Module, object]
    forward_ended: Signal[object, object]
    backward_started: Signal[object]
    backward_ended: Signal[bool]
    optimizer_stepping: Signal[Any, FrameType]
    optimizer_stepped: Signal[Any]
    step_ended: Signal[[]]


class NumericsProbe(Probe):
    """Reads the range of activations, gradients and parameters in each step."""

    name: ClassVar[str] = "numerics"

    def __init__(
        self,
        recorder: Recorder,
        moments: Moments,
        models: LiveModels,
        names: ModelNames,
        budget: Budget,
        is_light: bool = False,
    ) -> None:
        """Know of no step yet; `models` are those that there are, `budget` what it may cost."""
        super().__init__(recorder)
        self._budget = budget
        self._moments = moments
        self._is_light = is_light
        self._models = names
        self._names = TensorNames(models.roots, self._models)
        self._activations = Activations(self._read, self.fail, budget, is_light=is_light)
        self._bare = BareModels(models, self.enter, self.leave)
        self._near = NearLimits(recorder)
        self._inside: object = None
        self._entered: dict[int, nn.Module] = {}
        self._window: Window | None = None
        self._num_windows = 0
        self._readings: list[tuple[Reading | Batch, list[torch.Tensor]]] = []
        self._pending: deque[tuple[PendingRanges, Window]] = deque()
        self._closed: deque[Window] = deque(maxlen=_MOST_WAITING)
        self._handles: list[Any] = []
        self._num_told = 0
        self._spoilt: WeakMembers[torch.Tensor] = WeakMembers()
        """Parameters that are known not to be finite."""

    def _install(self) -> None:
        moments = self._moments
        self._patches.wrap(torch.optim.Optimizer, "__init__", self._after_optimizer)
        self._subscribe(moments.model_started, self._add_bare)
        self._subscribe(moments.inputs_seen, self._find_bare)
        self._subscribe(moments.forward_started, self.enter)
        self._subscribe(moments.forward_ended, self.leave)
        self._subscribe(moments.backward_started, self._before_backward)
        self._subscribe(moments.backward_ended, self._after_backward)
        self._subscribe(moments.optimizer_stepping, self._before_update)
        self._subscribe(moments.optimizer_stepped, self._after_update)
        self._subscribe(moments.step_ended, self._after_step)

    def uninstall(self) -> None:
        """Take the hooks of modules and parameters away, too."""
        super().uninstall()
        self._let_go()
        self._bare.remove()
        self._activations.clear()

    @guarded
    def flush(self) -> None:
        """Write down what has been read by now: the rank ends."""
        if self._window is not None:
            self._window.has_ended = True
        self._close()

    # Models that nothing wraps

    def _after_optimizer(self, original: AnyCallable) -> AnyCallable:
        find = self._find_bare

        @like(original)
        def init(self_: object, *args: object, **kwargs: object) -> object:
            result = original(self_, *args, **kwargs)
            find()
            return result

        return init

    def _find_bare(self, *_: object) -> None:
        if not self._bare.is_current:
            self._look_for_bare()

    @guarded
    def _look_for_bare(self) -> None:
        self._bare.find()

    @guarded
    def _add_bare(self, root: nn.Module) -> None:
        self._bare.add(root)

    # Forward passes

    def enter(self, forward: object, root: nn.Module, given: object) -> None:
        """Begin to read a forward pass of the training, unless it is part of another one."""
        if self._inside is None and is_training(root) and not self._activations.is_in_backward:
            with self._budget:
                self._begin_forward(forward, root, given)

    @guarded
    def _begin_forward(self, forward: object, root: nn.Module, given: object) -> None:
        self._activations.clear()  # an exception may have ended the last pass
        if not is_grad_enabled():
            return
        self._inside = forward
        window = self._this_window()
        if self._entered.get(id(root)) is root:
            window.lost_forward = window.forward  # no backward pass came of it
            self._entered.clear()
        self._entered[id(root)] = root
        window.forward += 1
        self._poll()
        if window.is_close:
            self._read_state(root)
        if window.detail >= Detail.USUAL:
            name = self._models.name(root)
            self._activations.begin(root, name, given, is_close=window.is_close)

    def leave(self, forward: object, output: object) -> None:
        """End the reading of this forward pass."""
        if self._inside is forward:
            self._inside = None
            with self._budget:
                self._end_forward(output)

    @guarded
    def _end_forward(self, output: object) -> None:
        if self._this_window().detail >= Detail.USUAL:
            self._activations.end(output)
            self._push()

    def _read_state(self, root: nn.Module) -> None:
        parameters, buffers = list(root.parameters()), list(root.buffers())
        self._read_all("parameter", parameters, parameters)
        self._read_all("buffer", buffers, buffers)

    # Backward passes

    @guarded
    def _before_backward(self, outputs: object) -> None:
        with self._budget:
            self._look_before_backward(outputs)

    def _look_before_backward(self, outputs: object) -> None:
        self._inside = None  # whatever became of it
        window = self._this_window()
        _, frames = self.recorder.backward or ((), ())
        window.site = CallSite(frames)
        window.begin_backward()
        self._activations.look_for_hiding(outputs)
        for tensor in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(tensor, torch.Tensor):
                self._read(Reading("loss", "", "", "", "the loss"), tensor)
        self._push()
        if window.is_close:
            self._let_go()
            for root in self._entered.values():
                for leaf in leaves_of(root, Kept()):
                    self._watch(leaf, self._models.name(root))
        self._entered.clear()
        self._activations.is_in_backward = True

    def _watch(self, leaf: Leaf, model: str) -> None:
        module, _, name = leaf.name.rpartition(".")

        def hook(gradient: torch.Tensor) -> None:
            if not torch.compiler.is_compiling() and not self.is_off:
                with self._budget, guard(self.fail):
                    what = f"the gradient of its {name}"
                    reading = Reading("weight-gradient", model, module, "", what)
                    self._read(reading, leaf.of(gradient))

        self._handles.append(leaf.leaf.register_hook(hook))  # type: ignore[no-untyped-call]

    def _let_go(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    @guarded
    def _after_backward(self, _: bool) -> None:
        with self._budget:
            self._look_after_backward()

    def _look_after_backward(self) -> None:
        self._activations.is_in_backward = False
        self._activations.clear()
        self._let_go()
        self._push()

    # Optimizers

    @guarded
    def _before_update(self, optimizer: object, _: FrameType) -> None:
        with self._budget:
            self._look_before_update(optimizer)

    def _look_before_update(self, optimizer: object) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        parameters = parameters_of(optimizer)
        is_read = self._reads_parameters
        if is_read or all(each.grad is None for each in parameters):
            # A program may have dropped them all.
            held = [each for each in parameters if each.grad is not None] if is_read else []
            self._this_window().has_read_gradients = True
            gradients = [each.grad for each in held if each.grad is not None]
            self._read_all("gradient", held, gradients)
            self._push()

    @guarded
    def _after_update(self, optimizer: object) -> None:
        with self._budget:
            self._look_after_update(optimizer)

    def _look_after_update(self, optimizer: object) -> None:
        window = self._this_window()
        window.is_stepped = True
        is_read = self._reads_parameters and window.detail >= Detail.USUAL
        if is_read and isinstance(optimizer, torch.optim.Optimizer):
            held = [each for each in parameters_of(optimizer) if each.grad is not None]
            self._read_all("update", held, held)

    @property
    def _reads_parameters(self) -> bool:
        detail = self._this_window().detail
        return detail is Detail.CLOSE or (not self._is_light and detail is not Detail.LOSS)

    @guarded
    def _after_step(self) -> None:
        with self._budget:
            self._close()

    # Reading

    def _this_window(self) -> Window:
        if self._window is None:
            step = self.recorder.step
            self._window = Window(step, self._num_windows, self._detail_at(step))
            self._num_windows += 1
        return self._window

    def _detail_at(self, step: int) -> Detail:
        on_gpu = torch.cuda.is_available() and _cuda.is_initialized()
        first = _FIRST_CLOSE_ON_GPU if on_gpu else _FIRST_CLOSE
        if step < (_FIRST_CLOSE_IN_LIGHT if self._is_light else first):
            return Detail.CLOSE
        is_trial = not on_gpu and not self._is_light and step < _FIRST_USUAL
        if not is_trial and not self._budget.is_left(_FOR_MODULES):
            may_read = not self._is_light and self._budget.is_left()
            return Detail.GRADIENTS if may_read else Detail.LOSS
        return Detail.CLOSE if step % EVERY == 0 or step & (step - 1) == 0 else Detail.USUAL

    def _read(self, reading: Reading, tensor: torch.Tensor) -> None:
        found = range_of(tensor) if self._has_room else None
        if found is not None:
            reading.dtype = tensor.dtype
            self._add(reading, found)

    def _read_all(
        self, stage: Stage, parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> None:
        if self._has_room:
            for reading, found in batches_of(stage, parameters, tensors):
                self._add(reading, found)

    @property
    def _has_room(self) -> bool:
        return self._this_window().num_readings < _MOST_READINGS

    def _add(self, reading: Reading | Batch, values: list[torch.Tensor]) -> None:
        window = self._this_window()
        reading.number, reading.forward = window.next_number(), window.forward
        self._readings.append((reading, values))

    def _push(self) -> None:
        """Begin to bring to the host what was read since, and judge what is there."""
        readings, self._readings = self._readings, []
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if readings and not is_capturing:
            window = self._this_window()
            window.num_unread += 1
            self._pending.append((PendingRanges(readings), window))
        self._poll()

    def _poll(self) -> None:
        while self._pending:
            pending, window = self._pending[0]
            found = pending.take(are_all_wanted=bool(len(self._spoilt)))
            if found is None:
                break
            self._pending.popleft()
            window.num_unread -= 1
            for reading in found:
                self._tell_apart(reading)
                window.judge(reading)
                self._near.judge(reading, window.step)
        while self._closed and not self._closed[0].num_unread:
            self._finish(self._closed.popleft())
        if self._window is not None and self._window.begins:
            self._tell(self._window)

    def _tell_apart(self, reading: Reading) -> None:
        """Take a parameter after a step for what it was before, if it was not finite then."""
        is_strong = reading.is_strong
        if reading.parameter is None or not (is_strong or len(self._spoilt)):
            return
        held = reading.parameter() if reading.stage in ("parameter", "update") else None
        if held is None:
            return
        if not is_strong:
            self._spoilt.discard(held)
        elif held in self._spoilt:
            reading.stage = "parameter"
        else:
            self._spoilt.add(held)

    def _close(self) -> None:
        """End the step: what becomes of its numbers is known."""
        self._push()
        window, self._window = self._window, None
        self._entered.clear()
        if window is not None:
            window.is_closed = True
            self._closed.append(window)
        self._poll()

    def _finish(self, window: Window) -> None:
        if window.found and window.outcome == "masked":
            self._activations.suspects |= {each.place for each in window.found}
        self._tell(window)

    # Writing down

    def _tell(self, window: Window) -> None:
        state = (window.outcome, window.num_found)
        if not window.found or window.told == state:
            return
        if window.told is None:
            self._num_told += 1
        number = self._num_told
        is_known = window.told is not None and not window.is_closed
        if is_known and window.told is not None and window.told[0] == window.outcome:
            return  # more of the same: what counts is the first
        if number > _FIRST_TOLD and number & (number - 1):
            return
        window.told = state
        self.recorder.event(
            NonFinite,
            step=window.step,
            window=window.number,
            outcome=window.outcome,
            places=tuple(map(self._place, window.found)),
            num_places=window.num_found,
            infinite=tuple(map(self._place, window.infinite)),
            is_loss_finite=window.is_loss_finite,
            site=window.site,
            are_modules_read=window.detail >= Detail.USUAL,
        )

    def _place(self, reading: Reading) -> NonFinitePlace:
        self._names.name(reading)
        return NonFinitePlace(
            stage=reading.stage,
            model=reading.model,
            module=reading.module,
            kind=reading.kind,
            what=reading.what,
            value=reading.value,
            number=reading.number,
            is_exact=reading.is_exact,
            hidden_by=self._activations.hidden_by.get(reading.place, ""),
        )
