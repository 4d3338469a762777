"""Everything that is asked about a node's ranks when they hang: first who is quick and safe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from distdiag.dumps.base import DumpSource, dump_ranks, observe_all
from distdiag.dumps.flight_recorder.request import FlightRequest
from distdiag.dumps.gpu.nvml import Nvml
from distdiag.dumps.logs.stderr_tail import StderrTail
from distdiag.dumps.nccl_ras.client import NcclRas
from distdiag.dumps.process.holders import Holders
from distdiag.dumps.process.kernel import KernelView
from distdiag.dumps.stacks.faulthandler_signal import FaulthandlerSignal
from distdiag.dumps.stacks.py_spy import PySpy, PySpyNative
from distdiag.events.base import Event
from distdiag.events.files import FileAccess
from distdiag.events.stacks import Observed, Stacks
from distdiag.record.run_dir import RunDir

SECOND_SOURCE_S: Final = 3.0
OUTSIDE_S: Final = 3.0
RAS_S: Final = 5.0
NATIVE_S: Final = 60.0
_NVIDIA: Final = Path("/proc/driver/nvidia")


class DumpSources:
    """The sources of stacks, and those who look at the ranks of this node from outside."""

    def __init__(
        self,
        run_dir: RunDir,
        main_script: str | None,
        ranks: Callable[[], Mapping[int, int]],
        *,
        may_ask_nccl: bool,
    ) -> None:
        """Frames of `main_script` are the user's; `ranks` returns the pids of this node's ranks.

        Asking NCCL's RAS has crashed jobs in some of its versions, so that it is asked only about a
        job that is going to be killed anyway (`may_ask_nccl`).
        """
        self._stack_source = PySpy(main_script)
        self._second_source = FaulthandlerSignal(run_dir, main_script)
        self._native_source = PySpyNative(main_script)
        self._stderr = StderrTail()
        self._holders = Holders(ranks, self._stack_source)
        self._outside: list[DumpSource] = [
            KernelView(),
            self._holders,
            self._stderr,
            FlightRequest(run_dir),
        ]
        self._nccl: list[DumpSource] = []
        if _NVIDIA.exists():
            self._outside.append(Nvml())
            self._nccl = [NcclRas()] if may_ask_nccl else []

    def meet(self, pid: int) -> None:
        """Note what can only be learnt while the process of a rank lives."""
        self._stderr.watch(pid)

    def note(self, event: Event) -> None:
        """Note what a rank does that tells later what it waits for."""
        if isinstance(event, FileAccess):
            self._holders.asked.feed(event)

    def stacks(self, pids: Mapping[int, int], timeout_s: float) -> tuple[Stacks, ...]:
        """Return the Python stacks of ranks, from the first source that can see them."""
        seen = {
            each.rank: each for each in dump_ranks(self._stack_source, pids, timeout_s=timeout_s)
        }
        unseen = {rank: pids[rank] for rank, each in seen.items() if each.error}
        left_s = min(timeout_s, SECOND_SOURCE_S)
        for each in dump_ranks(self._second_source, unseen, timeout_s=left_s):
            error = (
                f"{self._stack_source.name}: {seen[each.rank].error}; {each.source}: {each.error}"
            )
            seen[each.rank] = each if not each.error else _with_error(each, error)
        return tuple(seen.values())

    def outside(self, pids: Mapping[int, int], timeout_s: float) -> tuple[Observed, ...]:
        """Return what else is known of ranks that hang, each source within `timeout_s`."""
        observed = observe_all(self._outside, pids, timeout_s=min(timeout_s, OUTSIDE_S))
        return observed + observe_all(self._nccl, pids, timeout_s=min(timeout_s, RAS_S))

    def native(self, pids: Mapping[int, int]) -> tuple[Stacks, ...]:
        """Return stacks with native frames. This takes long, and stops each process meanwhile."""
        return dump_ranks(self._native_source, pids, timeout_s=NATIVE_S)

    def no_process(self, rank: int) -> Stacks:
        """Return what is reported of a rank whose process is not there."""
        return self._stack_source.stacks(rank, error="there is no process")


def _with_error(stacks: Stacks, error: str) -> Stacks:
    return Stacks(
        rank=stacks.rank, seq=-1, time_ns=stacks.time_ns, source=stacks.source, error=error
    )
