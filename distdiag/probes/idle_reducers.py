"""Whether DDP had a hand in a step: its forward pass arms the reducer, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn.parallel import DistributedDataParallel

from distdiag.probes.by_identity import WeakMap


class IdleReducers:
    """Recognises, by the times that reducers keep of gradients, those that have not worked."""

    def __init__(self) -> None:
        """Know of none yet."""
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
        is_told = any(now) or not module.static_graph
        return is_told and any(each.grad is not None for each in module.parameters())


def _times(module: DistributedDataParallel) -> list[int] | None:
    """Return when each gradient was ready in the last pass that was reduced, zeros before it."""
    is_in_python = getattr(module, "_use_python_reducer", False)
    is_delayed = getattr(module, "_delay_all_reduce_all_params", False)
    read = getattr(getattr(module, "reducer", None), "get_backward_stats", None)
    return None if is_in_python or is_delayed or read is None else list(read())
