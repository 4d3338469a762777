"""Trains under DDP with the optimizer states divided over the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(59)
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(16, 1)))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
    )
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _step in range(6):
        inputs = torch.randn(8, 16, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        print(f"{len(optimizer.state_dict()['state'])} states on rank 0")
    dist.barrier()
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
