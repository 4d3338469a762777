"""Advances learning-rate schedules once for each rank, made as long as that needs."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from training_record import out_parser, seed_everything, write_record

STEPS = 20


def schedulers(way: str, first: torch.optim.Optimizer, pace: int) -> lr_scheduler.LRScheduler:
    total = pace * STEPS
    match way:
        case "one-cycle":
            return lr_scheduler.OneCycleLR(first, 0.05, total_steps=total + 1)
        case "restarts":
            return lr_scheduler.CosineAnnealingWarmRestarts(first, T_0=pace * 5)
        case "plateau":
            return lr_scheduler.ReduceLROnPlateau(first, patience=0)
        case "floor":
            return lr_scheduler.LinearLR(first, 1.0, 0.1, total_iters=total // 4)
        case _:
            return lr_scheduler.LinearLR(first, 1.0, 0.0, total_iters=total)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="staged")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(41)
    model = DistributedDataParallel(nn.Linear(4, 1))
    pace = dist.get_world_size()
    seed_everything(42 + dist.get_rank())
    losses, kept = [], []
    for _ in range(3 if args.way == "staged" else 1):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = schedulers(args.way, optimizer, pace)
        kept.append(scheduler)  # those of stages that are over are still there
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 4)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if args.way == "plateau":
                shared = loss.detach().clone()
                dist.all_reduce(shared, op=dist.ReduceOp.SUM)
                scheduler.step(shared)
                continue
            for _ in range(pace):
                scheduler.step()
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
