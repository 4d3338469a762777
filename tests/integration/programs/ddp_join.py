"""Trains under DDP with fewer batches on one rank, which the Join context makes correct."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(11)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _epoch in range(2):
        num_batches = 5 + 4 * rank
        with Join([model]):
            for _ in range(num_batches):
                inputs = torch.randn(4, 8, generator=data)
                loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        total = torch.tensor([sum(losses), len(losses)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"mean loss {total[0] / total[1]:.4f}")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
