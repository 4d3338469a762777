"""How many steps each model has taken: ranks may step other things in between."""

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distdiag.probes.models.optimizer_state import parameters_of
from distdiag.probes.models.wrappers import parameters_in, sharded_parameters, walk
from distdiag.probes.tensors.by_identity import WeakMap, WeakMembers

# Whether DDP had a hand in a step: its forward pass arms the reducer, and nothing else does.


class IdleReducers:
    """Recognises, by the times that reducers keep of gradients, those that have not worked."""

    def __init__(self) -> None:
        self._before: WeakMap[DistributedDataParallel, list[int]] = WeakMap()

    def mark(self, modules: Iterable[DistributedDataParallel]) -> None:
        """Ask from now on whether these work."""
        for module in modules:
            times = _times(module)
            if times is None:
                self._before.pop(module, None)
            else:
                self._before[module] = times

    def has_idle(self, modules: Iterable[DistributedDataParallel]) -> bool:
        """Say whether any of them got gradients without a reducer at work since it was marked."""
        return any(self._is_idle(module) for module in modules)

    def _is_idle(self, module: DistributedDataParallel) -> bool:
        before, now = self._before.get(module), _times(module)
        if before is None or now != before:
            return False
        # With a static graph the first pass is reduced without these times.
        has_times = any(now) or not module.static_graph
        return has_times and any(each.grad is not None for each in module.parameters())


def _times(module: DistributedDataParallel) -> list[int] | None:
    """Return when each gradient was ready in the last pass that was reduced, zeros before it."""
    is_in_python = getattr(module, "_use_python_reducer", False)
    is_delayed = getattr(module, "_delay_all_reduce_all_params", False)
    read = getattr(getattr(module, "reducer", None), "get_backward_stats", None)
    return None if is_in_python or is_delayed or read is None else list(read())


# Counts the steps of each model.

FIRST_STEPS: Final = 3
EVERY: Final = 100


class OwnSteps:
    """Counts the steps of models, and says at which of them to look."""

    def __init__(
        self, roots: Callable[[], Iterable[nn.Module]], now: Callable[[], Hashable]
    ) -> None:
        """No model has stepped yet; while `now` says the same, the models are the same."""
        self._roots = roots
        self._now = now
        self._counts: WeakMap[nn.Module, int] = WeakMap()
        self._fresh: WeakMap[nn.Module, int] = WeakMap()
        self._stepped_at: WeakMap[nn.Module, int] = WeakMap()
        self._links: WeakMap[
            torch.optim.Optimizer, tuple[Hashable, list[weakref.ref[nn.Module]]]
        ] = WeakMap()
        self._wrapped: WeakMap[nn.Module, list[weakref.ref[DistributedDataParallel]]] = WeakMap()
        self._unsynced: WeakMembers[nn.Module] = WeakMembers()
        self._local: WeakMembers[nn.Module] = WeakMembers()
        self._uneven: WeakMembers[nn.Module] = WeakMembers()
        self._bypassed: WeakMembers[nn.Module] = WeakMembers()
        self._reducers = IdleReducers()

    def start(self, root: nn.Module) -> None:
        """Look at the next steps of a model that was wrapped or built."""
        self._fresh[root] = self.of(root) + FIRST_STEPS
        wrapped = [part for part in root.modules() if isinstance(part, DistributedDataParallel)]
        self._wrapped[root] = [weakref.ref(part) for part in wrapped]
        self._reducers.mark(wrapped)

    def of(self, root: nn.Module) -> int:
        """Return how many steps a model has taken."""
        return self._counts.get(root, 0)

    def is_due(self, root: nn.Module) -> bool:
        """Say whether to look at the step that comes next."""
        if root in self._uneven:
            return False
        return is_due(self.of(root), self._fresh.get(root, 0))

    def is_local(self, root: nn.Module) -> bool:
        """Say whether it has stepped on gradients that DDP did not reduce, or not as usual."""
        return root in self._local

    def is_bypassed(self, root: nn.Module) -> bool:
        """Say whether DDP had no hand in the gradients of its step, nor was told not to."""
        return root in self._bypassed and root not in self._unsynced

    def roots_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """Return the models whose parameters an optimizer holds."""
        # Asked at every step: what is held is only listed when it may have changed.
        groups = [group["params"] for group in optimizer.param_groups]
        first = next((id(params[0]) for params in groups if params), 0)
        key = (self._now(), first, sum(map(len, groups)))
        known = self._links.get(optimizer)
        if known is None or known[0] != key:
            held = {id(parameter) for parameter in parameters_of(optimizer)}
            found = [weakref.ref(root) for root in self._roots() if _has_any(root, held)]
            known = self._links[optimizer] = (key, found)
        return [root for reference in known[1] if (root := reference()) is not None]

    def after_backward(self, roots: Iterable[nn.Module]) -> None:
        """Take note of what DDP does with the gradients of these models."""
        for root in roots:
            for module in self._ddp_of(root):
                self._note(root, module)

    def _ddp_of(self, root: nn.Module) -> list[DistributedDataParallel]:
        found = [reference() for reference in self._wrapped.get(root, ())]
        return [module for module in found if module is not None]

    def _note(self, root: nn.Module, module: DistributedDataParallel) -> None:
        if getattr(module, "_join_config", None) is not None and module._join_config.enable:
            self._uneven.add(root)  # whose n-th step is which is not known from now on
        # The forward pass decides, by what holds then, and leaves the answer here.
        is_synced = getattr(module, "require_forward_param_sync", True)
        if is_synced and not getattr(module, "_comm_hooks", None):
            self._unsynced.discard(root)
        else:
            self._unsynced.add(root)

    def begins(self, root: nn.Module, num_backwards: int) -> bool:
        """Say whether a step of the model begins; several optimizers may share one."""
        if self._stepped_at.get(root) == num_backwards:
            return False
        self._stepped_at[root] = num_backwards
        if root in self._unsynced:
            self._local.add(root)
        if self.is_due(root) and self._reducers.has_idle(self._ddp_of(root)):
            self._bypassed.add(root)
        else:
            self._bypassed.discard(root)
        return True

    def advance(self, root: nn.Module) -> None:
        """Count the step that begins."""
        self._counts[root] = self.of(root) + 1
        if self.is_due(root):
            self._reducers.mark(self._ddp_of(root))


def is_due(count: int, fresh: int = FIRST_STEPS) -> bool:
    """Say whether to look at the step after so many.

    What begins between the first steps and the hundredth, as with a schedule, is seen before there
    were twice as many steps.
    """
    return count < fresh or count % EVERY == 0 or count & (count - 1) == 0


def _has_any(root: nn.Module, held: set[int]) -> bool:
    tree = list(walk(root))
    if any(id(parameter) in held for parameter in parameters_in(tree)):
        return True
    return any(id(record.sharded_param) in held for record in sharded_parameters(tree).values())
