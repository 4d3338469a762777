"""Lets rank 0 prepare, log, evaluate and save while the others wait, in all the usual ways."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


@contextlib.contextmanager
def main_process_first() -> Iterator[None]:
    """Let rank 0 pass first; the two barriers that meet are on different lines."""
    is_main = dist.get_rank() == 0
    if not is_main:
        dist.barrier()
    yield
    if is_main:
        dist.barrier()


def share_folder() -> Path:
    """Broadcast a path, with the sending and the receiving call in different branches."""
    if dist.get_rank() == 0:
        folder = tempfile.mkdtemp()
        dist.broadcast(torch.tensor(len(folder.encode())), src=0)
        dist.broadcast(torch.tensor(list(folder.encode()), dtype=torch.uint8), src=0)
        return Path(folder)
    length = torch.empty((), dtype=torch.long)
    dist.broadcast(length, src=0)
    name = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(name, src=0)
    return Path(bytes(name.tolist()).decode())


def prepare_data(folder: Path) -> torch.Tensor:
    cache = folder / "cache.pt"
    with main_process_first():
        if not cache.exists():
            time.sleep(1.5)
            torch.save(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)), cache)
        return torch.load(cache)


def decide_learning_rate() -> float:
    """Compute on rank 0 what all the others receive."""
    decision = torch.zeros(1)
    if dist.get_rank() == 0:
        decision.fill_(0.05)
        dist.broadcast(decision, 0)
    else:
        dist.broadcast(decision, 0)
    return decision.item()


def evaluate_on_main(model: nn.Module, data: torch.Tensor) -> None:
    if dist.get_rank() != 0:
        return
    with torch.no_grad():
        for batch in data.split(8):
            model(batch)
            time.sleep(0.1)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(17)
    if rank == 0:
        version = subprocess.run([sys.executable, "--version"], capture_output=True, text=True)
        print(f"running {version.stdout.strip()}")
    folder = share_folder()
    data = prepare_data(folder)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=decide_learning_rate())
    losses = []
    for step, batch in enumerate(data[rank::2].split(8)):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if rank == 0 and step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step == 1:
            evaluate_on_main(model.module, data)
    if rank == 0:
        time.sleep(1.0)
        torch.save(model.module.state_dict(), folder / "model.pt")
        dist.barrier()
    else:
        dist.barrier()
        model.module.load_state_dict(torch.load(folder / "model.pt"))
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
