"""Evaluates after each epoch, and keeps the best checkpoint by what the way says."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from training_record import out_parser, seed_everything, write_record


def summed(model: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Return the sum and the count of this rank's losses."""
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            total += torch.tensor([(model(x) - y).square().sum().item(), len(y)])
    model.train()
    return total


def shared(way: str, total: torch.Tensor, folder: Path) -> float:
    """Return the mean over all samples, as far as the way brings them together."""
    match way:
        case "reduced":
            dist.all_reduce(total)
        case "gathered":
            parts: list[torch.Tensor | None] = [None] * dist.get_world_size()
            dist.gather_object(total, parts if dist.get_rank() == 0 else None)
            if dist.get_rank() == 0:
                total = sum(parts)
        case "files":
            torch.save(total, folder / f"part{dist.get_rank()}.pt")
            dist.barrier()
            total = sum(torch.load(folder / f"part{rank}.pt") for rank in range(2))
            dist.barrier()
    return float(total[0] / total[1])


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="reduced")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, way = dist.get_rank(), args.way
    seed_everything(51)
    x = torch.randn(96, 4)
    data = TensorDataset(x[:64], x[:64].sum(1, keepdim=True))
    held = TensorDataset(x[64:], x[64:].sum(1, keepdim=True))
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    sampler = DistributedSampler(data)
    part = None if way == "whole" else DistributedSampler(held, shuffle=False)
    loader, evaluation = DataLoader(data, 8, sampler=sampler), DataLoader(held, 4, sampler=part)
    made = [tempfile.mkdtemp(prefix="evaluations-") if rank == 0 else ""]
    dist.broadcast_object_list(made)
    folder, best, losses = Path(made[0]), float("inf"), []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = shared(way, summed(model, evaluation), folder)
        if (
            rank == 0 and way == "periodic"
        ):  # what it prints is that of one rank, and decides nothing
            print(f"epoch {epoch} rank 0 {mean:.3f}")
            if epoch % 2 == 0:
                torch.save(model.module.state_dict(), folder / f"epoch{epoch}.pt")
        elif rank == 0 and mean < best:
            best = mean
            torch.save(model.module.state_dict(), folder / "best.pt")
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
