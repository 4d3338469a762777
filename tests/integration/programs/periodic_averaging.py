"""Trains under DDP with local steps, and averages the weights every few of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

PERIOD = 4


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(51)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    # From the first step on gradients stay on their rank.
    alone = [dist.new_group([other]) for other in range(dist.get_world_size())]
    state = PostLocalSGDState(process_group=None, subgroup=alone[rank], start_localSGD_iter=0)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=0.05),
        averager=PeriodicModelAverager(period=PERIOD, warmup_steps=0),
    )
    seed_everything(60 + rank)
    losses = []
    for _ in range(2 * PERIOD):
        inputs = torch.randn(8, 6)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"rank {rank} loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
