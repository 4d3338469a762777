"""Writes down what optimizers hold when they step."""

from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch import nn

from distdiag.events.base import CallSite
from distdiag.events.models import (
    ObjectKind,
    OptimizerState,
    TensorPlan,
    kept_ranks,
    reducing_ranks,
)
from distdiag.probes.call_sites import frames_of
from distdiag.probes.creations import Creations
from distdiag.probes.models.optimizer_state import (
    StepCounts,
    copy_instead,
    fields_of,
    foreign_parameters,
    forgotten,
    has_only_zeros,
    named_parameters,
    owners_of,
)
from distdiag.probes.models.own_steps import OwnSteps, is_due
from distdiag.probes.models.registry import LiveModels, ObjectRegistry
from distdiag.probes.models.tensor_plans import local_part
from distdiag.probes.tensors.by_identity import WeakMap
from distdiag.probes.tensors.content import Pending, contents
from distdiag.record.recorder import Recorder

_Change = tuple[Pending, Pending]
_MOST_SAMPLES: Final = 4
_MOST_FRAMES: Final = 6
_INITIALISER: Final = "/torch/distributed/checkpoint/state_dict.py"


class OptimizerSamples:
    """The optimizers of a rank, and what was seen of a step that is under way."""

    def __init__(
        self,
        recorder: Recorder,
        modules: LiveModels,
        optimizers: ObjectRegistry,
        steps: OwnSteps,
        name: Callable[[nn.Module], str],
        creations: Creations,
    ) -> None:
        """Watch these optimizers; `name` is what models are called."""
        self._creations = creations
        self._recorder = recorder
        self._modules = modules
        self._optimizers = optimizers
        self._steps = steps
        self._roots = modules.roots
        self._name = name
        self._counts = StepCounts()
        self._seen: WeakMap[Any, dict[str, Any]] = WeakMap()
        self._before: WeakMap[Any, Pending] = WeakMap()
        self._samples: WeakMap[Any, list[tuple[tuple[str, ...], Pending]]]
        self._samples = WeakMap()
        self._doubtful: list[tuple[dict[str, Any], _Change]] = []

    def alive(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that there are, the oldest first."""
        return self._optimizers.alive()

    def count(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count a step that begins; say whether to look at it."""
        self._counts.count(optimizer, self._recorder.num_backwards)
        return is_due(self._counts.of(optimizer))

    def labels(self) -> dict[int, str]:
        """Name optimizers, by their ids, after the models that they train."""
        labels: dict[int, str] = {}
        numbers: dict[str, int] = {}
        for optimizer in self.alive():
            roots = self._steps.roots_of(optimizer)
            of = f" of {self._name(roots[0])}" if roots else ""
            label = f"{type(optimizer).__name__}{of}"
            number = numbers[label] = numbers.get(label, 0) + 1
            labels[id(optimizer)] = label if number == 1 else f"{label}#{number}"
        return labels

    def begin(
        self, optimizer: torch.optim.Optimizer, plans: Iterable[TensorPlan], frame: FrameType
    ) -> None:
        """Look at an optimizer that is about to step."""
        counts = self._counts.fields(optimizer)
        is_dummy = has_only_zeros(optimizer) and counts["num_backwards"] == 0
        # Whoever asks torch for the state of a fresh optimizer does not know of such a step.
        if is_dummy and not _is_made_by_torch(frame):
            self._counts.found_zeros(optimizer)
        label = self.labels().get(id(optimizer), type(optimizer).__name__)
        self._creations.tell(ObjectKind.OPTIMIZER, label, optimizer)
        fields = {
            "optimizer": label,
            "step": counts["num_steps"],
            "members": tuple(sorted(kept_ranks(plans) or reducing_ranks(plans))),
            "site": CallSite(frames_of(frame, self._recorder.main_script)),
            **counts,
            **fields_of(optimizer, self.alive(), self._roots()),
        }
        is_idle = is_dummy or fields["num_without_gradient"] == fields["num_parameters"]
        fields |= self._counts.sampled(optimizer, is_idle=is_idle)
        fields |= self._elsewhere(optimizer, was_fed=fields["was_fed"])
        self._seen[optimizer] = fields
        if fields["replaced"]:
            self._before[optimizer] = _content(fields["replaced"], self._roots())

    def _elsewhere(self, optimizer: torch.optim.Optimizer, *, was_fed: bool) -> dict[str, Any]:
        """Look for parameters with a gradient that no optimizer holds; return them as fields."""
        alive, roots = self.alive(), self._roots()
        owners = owners_of(alive, {})
        copy, names = (None if was_fed else copy_instead(optimizer, owners, roots)) or (None, ())
        if copy is not None:
            if not self._stay(optimizer, names, [copy]):
                return {"forgotten": ()}
            return {"forgotten": (), "copied": names, "copied_model": self._name(copy)}
        # Optimizers that were made before anybody looked are not known.
        last = max((self._optimizers.number(each) for each in alive), default=-1)
        if alive and self._modules.newest > last:
            names = forgotten(roots, owners, lambda part: self._modules.number(part) > last)
        return {"forgotten": names if self._stay(optimizer, names, roots) else ()}

    def _stay(
        self, optimizer: torch.optim.Optimizer, names: tuple[str, ...], roots: Sequence[nn.Module]
    ) -> bool:
        """Say whether parameters held the same before two steps of an optimizer in a row.

        Else the program may train them by itself.
        """
        samples = [each for each in self._samples.get(optimizer, ()) if each[0] == names]
        if names:
            samples.append((names, _content(names, roots)))
        found = [_digests(content) for _, each in samples if (content := each.take()) is not None]
        self._samples[optimizer] = samples[-_MOST_SAMPLES:]
        return len(found) > 1 and None not in found[-1] and found[-1] == found[-2]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Write down what was seen, now that it has stepped."""
        fields, before = self._seen.pop(optimizer, None), self._before.pop(optimizer, None)
        if fields is None:
            return
        if before is None:
            self._recorder.event(OptimizerState, **fields)
            return
        if any(each.grad is not None for each in foreign_parameters(optimizer, self._roots())):
            fields["replaced"] = ()  # copies of another precision, which it gives gradients itself
        after = _content(fields["replaced"], self._roots())
        self._doubtful.append((fields, (before, after)))
        self.settle()

    def settle(self) -> None:
        """Write down what had to wait until it was known whether a step changed anything."""
        while self._doubtful:
            fields, (before, after) = self._doubtful[0]
            found = before.take(), after.take()
            if found[0] is None or found[1] is None:
                return
            del self._doubtful[0]
            if _digests(found[0]) != _digests(found[1]):
                fields["replaced"] = ()  # it changes them all the same
            self._recorder.event(OptimizerState, **fields)


def _content(names: Sequence[str], roots: Sequence[nn.Module]) -> Pending:
    wanted = {*names[:1], *names[-1:]}  # the gradient of one may be zero
    named = named_parameters(roots).values()
    pending = contents([local_part(each) for name, each in named if name in wanted])
    pending.guard()
    return pending


def _is_made_by_torch(frame: FrameType) -> bool:
    """Say whether a step creates the state of an optimizer for a distributed checkpoint."""
    caller: FrameType | None = frame
    for _ in range(_MOST_FRAMES):
        if caller is None:
            return False
        if caller.f_code.co_filename.endswith(_INITIALISER):
            return True
        caller = caller.f_back
    return False


def _digests(found: Sequence[Any]) -> list[str | None]:
    return [None if each is None else each.digest for each in found]
