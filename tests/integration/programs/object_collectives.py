"""Exchanges Python objects of different sizes, as evaluation and configuration code does."""

import datetime
import random

import torch
import torch.distributed as dist
from torch import nn
from training_record import out_parser, seed_everything, write_record


def gather_predictions(num_samples: int) -> dict[int, list[float]]:
    """Merge what each rank predicted; the ranks hold different numbers of samples."""
    rank = dist.get_rank()
    own = {i * 10 + rank: [random.random() for _ in range(1 + i)] for i in range(num_samples)}
    gathered: list[dict[int, list[float]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {key: value for part in gathered if part for key, value in part.items()}


def share_configuration() -> dict[str, object]:
    config: list[object] = [None, None]
    if dist.get_rank() == 0:
        config = [{"lr": 0.1, "layers": list(range(40))}, "run-name-that-only-rank-zero-knows"]
    dist.broadcast_object_list(config, src=0)
    assert isinstance(config[0], dict)
    return config[0]


def assign_files() -> list[str]:
    rank = dist.get_rank()
    assigned: list[list[str] | None] = [None]
    work = [["a"], ["b", "c", "d" * 50]] if rank == 1 else None
    dist.scatter_object_list(assigned, work, src=1)
    assert assigned[0] is not None
    return assigned[0]


def gather_uneven_rows(rows: torch.Tensor) -> torch.Tensor:
    """Gather tensors of different length: sizes first, then data padded to the longest."""
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(rows)]))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, rows.shape[1])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(size)] for part, size in zip(parts, sizes, strict=True)])


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(15 + rank)
    model = nn.Linear(4, 1)
    config = share_configuration()
    losses = [float(config["lr"])]
    for epoch in range(3):
        merged = gather_predictions(num_samples=2 + 3 * rank + epoch)
        losses += [len(merged), sum(sum(values) for _, values in sorted(merged.items()))]
        collected: list[str | None] | None = [None, None] if rank == 1 else None
        dist.gather_object(f"rank {rank} " + "x" * 100 * rank, collected, dst=1)
        if collected is not None:
            losses.append(sum(len(text or "") for text in collected))
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))
        losses.append(gather_uneven_rows(torch.randn(2 + rank + epoch, 4)).sum().item())
    losses.append(sum(len(name) for name in assign_files()))
    if rank == 0:
        dist.send_object_list([{"done": True}, "x" * 300], dst=1)
    else:
        received: list[object] = [None, None]
        dist.recv_object_list(received, src=0)
        print(f"received {len(received)} objects")
    dist.barrier()
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
