"""Train on a pre-emptible partition: the scheduler's warning signal ends the run early."""

import argparse
import logging
import os
import signal
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("trainer")


class PreemptionHandler:
    """Remember that the scheduler asked this process to stop."""

    def __init__(self) -> None:
        self.received = False
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.received = True


class Scheduler:
    """Stand in for a cluster scheduler that signals one process of the job."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def tick(self, rank: int, step: int) -> None:
        if rank == self.rank and step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--preempt-rank", type=int, default=1)
    parser.add_argument("--preempt-step", type=int, default=4)
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    return parser.parse_args()


def save_checkpoint(model: nn.Module, step: int, folder: Path) -> None:
    """Write the weights once every rank has ended its last step."""
    dist.barrier()
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), folder / f"step-{step}.pt")


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    handler = PreemptionHandler()
    scheduler = Scheduler(args.preempt_rank, args.preempt_step)

    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        images = torch.randn(16, 32, generator=generator)
        labels = torch.randint(10, (16,), generator=generator)
        loss = nn.functional.cross_entropy(parallel(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            logger.info("step %d loss %.4f", step, loss.item())
        scheduler.tick(rank, step)
        if handler.received:
            logger.warning("rank %d: pre-emption notice, stopping after step %d", rank, step)
            break

    save_checkpoint(model, step, args.checkpoint_dir)
    logger.info("rank %d: training finished", rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
