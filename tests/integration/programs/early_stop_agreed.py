"""Stops early when rank 0 decides it from its own validation, and tells the others."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


class Patience:
    """Counts evaluations without an improvement."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.best = float("inf")
        self.num_bad = 0

    def is_exhausted(self, loss: float) -> bool:
        self.num_bad = 0 if loss < self.best - 0.05 else self.num_bad + 1
        self.best = min(self.best, loss)
        return self.num_bad >= self.limit


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(43)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    data = torch.Generator().manual_seed(rank)
    validation = torch.randn(32, 4, generator=torch.Generator().manual_seed(9))
    patience = Patience(limit=2)
    losses = []
    for step in range(200):
        inputs = torch.randn(8, 4, generator=data)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        stop = torch.zeros(1)
        if rank == 0:
            with torch.no_grad():
                outputs = model.module(validation)
            error = (outputs - validation.sum(1, keepdim=True)).square().mean().item()
            stop.fill_(float(patience.is_exhausted(error)))
        dist.broadcast(stop, src=0)
        if stop.item():
            print(f"rank {rank} stops after step {step}")
            break
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
