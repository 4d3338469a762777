"""Records the runs of one part: under torchrun its candidates, in one process its references.

Seeds, cells and mutations are looped over inside one process group.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from distdiag.config.tasks import ParityTask
from distdiag.parity.recorded_run import RecordedRun
from distdiag.parity.study import PERTURBATION_SEED, sources_of
from distdiag.probes.parity.recorder import ParityRecorder
from distdiag.record.recorder import Recorder
from scripts.parity_matrix.cells import CELLS, Cell
from scripts.parity_matrix.engines import engine
from scripts.parity_matrix.models import KITS, PRECISIONS, Samples, losses
from scripts.parity_matrix.mutations import CLEAN, MUTATIONS, Place
from scripts.parity_matrix.plan import REFERENCES, Part, Run, read_part

BATCH_SIZE = 4
NEVER = 1_000_000


class _Failures:
    """What the probe has of a recorder: a place to say that it failed."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.main_script = None
        self.closed = False
        self.found: list[object] = []

    def event(self, _: type, **fields: object) -> None:
        """Take note."""
        self.found.append(fields.get("traceback", fields))

    def close(self) -> None:
        """Take note."""
        self.closed = True
        self.found.append("the recorder was closed")


def record(part: Part, run: Run, task: ParityTask, rank: int, *, is_reference: bool) -> None:
    """Train once and record it.

    Raises:
        RuntimeError: the recording failed.

    """
    failures = _Failures(rank)
    recorder = ParityRecorder(cast("Recorder", failures), task)
    recorder.install()
    try:
        _train(part, run, rank, is_reference=is_reference)
        recorder.flush()
    finally:
        recorder.uninstall()
    if failures.found:
        raise RuntimeError(f"{run}: the recording failed: {failures.found}")


def _train(part: Part, run: Run, rank: int, *, is_reference: bool) -> None:
    kit, cell, precision = KITS[part.model], CELLS[run.cell], PRECISIONS[part.precision]
    mutation = MUTATIONS[run.mutation](Place(kit, cell, precision, rank))
    torch.manual_seed(run.seed)
    plain = kit.build().to(precision.dtype).train()
    mutation.built(plain)
    model = plain if is_reference else cell.wrap(plain, kit, mutation.wish())
    mutation.wrapped(plain)
    optimizer = _optimizer(plain, run.seed, mutation.rate)
    if cell.has_engine:
        model, backward, step_ = engine(plain, optimizer, precision)
    else:
        backward, step_ = torch.Tensor.backward, optimizer.step
    batches = iter(_loader(kit, cell, run.seed, rank, is_reference=is_reference))
    for step in range(part.num_steps):
        for micro in range(cell.accumulation):
            batch = mutation.batch(next(batches))
            with _syncing(model, is_last=micro == cell.accumulation - 1):
                loss = mutation.loss(losses(model, batch, precision)) / cell.accumulation
                backward(loss)
        mutation.after_backward(plain)
        step_()
        optimizer.zero_grad()
        mutation.after_step(plain, step)


def _syncing(model: nn.Module, *, is_last: bool) -> Any:  # noqa: ANN401
    no_sync = getattr(model, "no_sync", None)
    return nullcontext() if is_last or no_sync is None else no_sync()


def _optimizer(model: nn.Module, seed: int, rate: float) -> torch.optim.Optimizer:
    if seed % 2:
        return torch.optim.AdamW(model.parameters(), lr=2e-3 * rate, foreach=False)
    return torch.optim.SGD(model.parameters(), lr=0.05 * rate, momentum=0.9, foreach=False)


def _loader(kit: Any, cell: Cell, seed: int, rank: int, *, is_reference: bool) -> DataLoader[Any]:  # noqa: ANN401
    samples = Samples(kit, seed)
    number, here = (1, 0) if is_reference else (cell.num_data, cell.data_rank(rank))
    sampler = DistributedSampler(samples, number, here, shuffle=True, seed=seed)
    return DataLoader(samples, batch_size=BATCH_SIZE, sampler=sampler)


def _candidates(part: Part) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for run in part.runs(dist.get_world_size()):
        folder = run.folder(Path(part.folder))
        record(part, run, ParityTask(folder=str(folder), num_steps=NEVER), rank, is_reference=False)
        if rank == 0:
            print(part.label, run.cell, run.seed, run.mutation, flush=True)
    dist.destroy_process_group()


def _references(part: Part) -> None:
    root = Path(part.folder)
    if any(cell.has_engine for cell in part.used_cells()):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for run in part.runs():
        if run.mutation != CLEAN:
            continue
        source = run.folder(root)
        dtype = ""
        for name in REFERENCES:
            task = ParityTask(
                folder=str(Run(run.cell, run.seed, name).folder(root)),
                num_steps=NEVER,
                replayed=str(source),
                sources=tuple(sources_of(RecordedRun(source, "source"))),
                perturbation=PERTURBATION_SEED if name == "perturbed" else None,
                perturbation_dtype=dtype,
            )
            record(part, run, task, 0, is_reference=True)
            dtype = RecordedRun(Path(task.folder), name).compute_dtype
        print(part.label, run.cell, run.seed, "references", flush=True)


def main() -> None:
    """Record the candidates of the part named on the command line, or its references."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    part = read_part(sys.argv[1])
    if "RANK" in os.environ:
        _candidates(part)
    else:
        _references(part)


if __name__ == "__main__":
    main()
