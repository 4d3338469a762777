#!/usr/bin/env python
"""The training that `bench_hangs.py` disturbs: it starts this under torchrun.

One rank does something wrong at one step; ``FAULTS`` says what and at which place of the training.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.file_baton import FileBaton

NUM_STEPS, SAVE_EVERY, BATCH = 10, 3, 4
FOR_EVER_S = 3600.0
BUSY_S = 25.0
SLOW_S = 6.0


class Sabotage(NamedTuple):
    """What goes wrong, on which rank and at which step; `folder` is for the files it needs."""

    kind: str
    rank: int
    step: int
    folder: Path

    def is_now(self, kind: str, rank: int, step: int) -> bool:
        """Say whether this is the fault of this rank at this step, and note when it was."""
        if (kind, rank, step) != (self.kind, self.rank, self.step):
            return False
        (self.folder / "injected").write_text(str(time.monotonic_ns()))
        return True

    def disturb(self, place: str, rank: int, step: int) -> None:
        """Do the damage if this is its place and moment."""
        fault = FAULTS.get(self.kind)
        if fault is not None and fault.place == place and self.is_now(self.kind, rank, step):
            fault.act(self)


def pipe_without_writer(sabotage: Sabotage) -> Path:
    """Return a named pipe: who opens it to read waits for a writer, and the other way round."""
    path = sabotage.folder / "pipe"
    os.mkfifo(path)
    return path


def read_pipe(sabotage: Sabotage) -> None:
    """Read what lies on storage that does not answer."""
    pipe_without_writer(sabotage).read_bytes()


def save_to_pipe(sabotage: Sabotage) -> None:
    """Save to storage that does not answer."""
    torch.save({"step": sabotage.step}, pipe_without_writer(sabotage))


def sleep_for_ever(sabotage: Sabotage) -> None:
    """Wait for something that is not there."""
    time.sleep(FOR_EVER_S)


def lock_twice(sabotage: Sabotage) -> None:
    """Take a lock that is never released."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_dead_thread(sabotage: Sabotage) -> None:
    """Wait for an item of a thread that has ended."""
    items: queue.Queue[int] = queue.Queue()
    producer = threading.Thread(target=lambda: None)
    producer.start()
    producer.join()
    items.get()


def hold_gil(sabotage: Sabotage) -> None:
    """Wait in native code that does not release the GIL."""
    ctypes.PyDLL(None).pause()


def stop_process(sabotage: Sabotage) -> None:
    """Stop this process, as a debugger or a batch system does."""
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_process(sabotage: Sabotage) -> None:
    """Die as a process does that the kernel kills for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def lock_file(sabotage: Sabotage) -> None:
    """Lock a file that another process has locked."""
    with open(sabotage.folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def wait_for_build(sabotage: Sabotage) -> None:
    """Wait for a build that was killed and has left its lock."""
    (sabotage.folder / "build").touch()
    FileBaton(str(sabotage.folder / "build")).wait()


def wait_for_key(sabotage: Sabotage) -> None:
    """Wait for a key that nobody sets."""
    dist.distributed_c10d._get_default_store().get("address of the server")


def compute(duration_s: float) -> None:
    """Use the processor."""
    ended = time.monotonic() + duration_s
    while time.monotonic() < ended:
        sum(range(10_000))


def raise_error(sabotage: Sabotage) -> NoReturn:
    """Fail as a script does."""
    raise ValueError(f"sample {sabotage.step} has no label")


def receive(sabotage: Sabotage) -> None:
    """Receive what nobody sends."""
    dist.recv(torch.empty(4), (dist.get_rank() + 1) % dist.get_world_size())


def create_group_alone(sabotage: Sabotage) -> None:
    """Create a group that the other ranks do not create."""
    dist.new_group([dist.get_rank(), (dist.get_rank() + 1) % dist.get_world_size()])


def reduce_alone(sabotage: Sabotage) -> None:
    """Reduce once more than the others."""
    dist.all_reduce(torch.ones(3))


def keep_thread(sabotage: Sabotage) -> None:
    """Leave a thread behind that keeps the interpreter from its end."""
    threading.Thread(target=time.sleep, args=(FOR_EVER_S,)).start()


class Fault(NamedTuple):
    """Where a fault strikes, and what it does."""

    place: str
    act: Callable[[Sabotage], object]


FAULTS = {
    "init-absent": Fault("start", sleep_for_ever),
    "loader-sleep": Fault("fetch", sleep_for_ever),
    "loader-pipe": Fault("fetch", read_pipe),
    "worker-lock": Fault("fetch-in-worker", lock_twice),
    "worker-stopped": Fault("fetch-in-worker", stop_process),
    "worker-killed": Fault("fetch-in-worker", kill_process),
    "lock": Fault("step", lock_twice),
    "queue": Fault("step", wait_for_dead_thread),
    "gil": Fault("step", hold_gil),
    "stopped": Fault("step", stop_process),
    "killed": Fault("step", kill_process),
    "raised": Fault("step", raise_error),
    "left": Fault("step", lambda _: sys.exit(0)),
    "pipe": Fault("evaluate", read_pipe),
    "file-lock": Fault("step", lock_file),
    "build-lock": Fault("step", wait_for_build),
    "store-key": Fault("step", wait_for_key),
    "busy": Fault("step", lambda _: compute(BUSY_S)),
    "slow": Fault("step", lambda _: compute(SLOW_S)),
    "recv": Fault("step", receive),
    "guarded-barrier": Fault("evaluate", lambda _: dist.barrier()),
    "extra-collective": Fault("step", reduce_alone),
    "own-group": Fault("step", create_group_alone),
    "checkpoint": Fault("save", save_to_pipe),
    "cleanup-barrier": Fault("step", raise_error),
    "exit-thread": Fault("step", keep_thread),
}


class Samples(Dataset[torch.Tensor]):
    """Random samples; a loader of theirs may be stuck."""

    def __init__(self, sabotage: Sabotage, rank: int, place: str) -> None:
        """Serve the samples of a rank."""
        self.sabotage, self.rank, self.place = sabotage, rank, place

    def __len__(self) -> int:
        return NUM_STEPS * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % BATCH == 0:
            self.sabotage.disturb(self.place, self.rank, index // BATCH)
        return torch.full((8,), index / BATCH)


class Trainer:
    """A small model on one rank."""

    def __init__(self, sabotage: Sabotage) -> None:
        """Build the model and its two groups."""
        self.sabotage, self.rank = sabotage, dist.get_rank()
        torch.manual_seed(0)
        self.model = nn.Linear(8, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.groups = {name: dist.new_group(group_desc=name) for name in ("weight", "bias")}

    def loader(self) -> DataLoader[torch.Tensor]:
        """Return the loader, with a worker if that is what shall be stuck."""
        fault = FAULTS.get(self.sabotage.kind)
        in_worker = fault is not None and fault.place == "fetch-in-worker"
        samples = Samples(self.sabotage, self.rank, "fetch-in-worker" if in_worker else "fetch")
        return DataLoader(samples, batch_size=BATCH, num_workers=int(in_worker))

    def backward(self, batch: torch.Tensor, step: int) -> None:
        """Compute the gradients."""
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        if self.sabotage.is_now("swallowed", self.rank, step):
            raise ArithmeticError("the loss is not finite")

    def average_gradients(self, step: int) -> None:
        """Reduce the gradient of each parameter in the group of that parameter."""
        names = list(self.groups)
        if self.sabotage.is_now("group-order", self.rank, step):
            names.reverse()
        if self.sabotage.is_now("skip-collective", self.rank, step):
            del names[0]
        for name in names:
            gradient = self.model.get_parameter(name).grad
            dist.all_reduce(gradient, group=self.groups[name])

    @torch.no_grad()
    def evaluate(self, step: int) -> None:
        """Average a loss over the ranks."""
        self.sabotage.disturb("evaluate", self.rank, step)
        dist.all_reduce(self.model(torch.ones(2, 8)).mean())

    def save(self, step: int) -> None:
        """Save the shard of this rank, and wait for the others."""
        self.sabotage.disturb("save", self.rank, step)
        torch.save(self.model.state_dict(), self.sabotage.folder / f"shard-{self.rank}.pt")
        dist.barrier()

    def run(self) -> None:
        """Train."""
        for step, batch in enumerate(self.loader()):
            if self.sabotage.is_now("early-break", self.rank, step):
                break
            if self.sabotage.is_now("skip-step", self.rank, step):
                continue
            self.sabotage.disturb("step", self.rank, step)
            try:
                self.backward(batch, step)
            except ArithmeticError:
                continue
            self.average_gradients(step)
            self.optimizer.step()
            self.evaluate(step)
            if step % SAVE_EVERY == SAVE_EVERY - 1:
                self.save(step)
        dist.all_reduce(torch.ones(1))


def main() -> None:
    """Train with one fault."""
    parser = argparse.ArgumentParser()
    for name, kind in (("kind", str), ("rank", int), ("step", int), ("folder", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    sabotage = Sabotage(**vars(parser.parse_args()))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(sabotage.folder / "lock", "w") as file:
        if rank == (sabotage.rank + 1) % world_size:
            fcntl.flock(file, fcntl.LOCK_EX)
        sabotage.disturb("start", rank, sabotage.step)
        dist.init_process_group("gloo")
        try:
            Trainer(sabotage).run()
        finally:
            if sabotage.kind == "cleanup-barrier":
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
