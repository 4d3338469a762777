"""Lets rank 0 alone hold an average, a probe with its optimizer, and copies for evaluation."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

DIM = 8


class Network(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.head = nn.Linear(DIM, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs))


class Probe:
    """Learns, on rank 0, what can be read from the features of the model."""

    def __init__(self) -> None:
        self.layer = nn.Linear(DIM, 1)
        self.optimizer = torch.optim.Adam(self.layer.parameters(), lr=0.1)

    def learn(self, features: torch.Tensor, targets: torch.Tensor) -> float:
        loss = (self.layer(features) - targets).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(68)
    average, probe = None, None
    network = Network()
    if rank == 0:
        generator_state = torch.get_rng_state()
        average = copy.deepcopy(network).requires_grad_(False)
        probe = Probe()
        torch.set_rng_state(generator_state)
    # Built after the extras of rank 0: it is not the first of its kind there.
    target = Network().requires_grad_(False)
    critic = DistributedDataParallel(Network())
    model = DistributedDataParallel(network)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (critic, model)]
    seed_everything(69 + rank)
    losses = []
    for _ in range(5):
        inputs = torch.randn(6, DIM)
        goal = inputs.sum(1, keepdim=True)
        for each in (critic, model):
            loss = (each(inputs) - goal).square().mean() + (each(inputs) - target(inputs)).mean()
            loss.backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if average is not None and probe is not None:
            torch._foreach_lerp_(list(average.parameters()), list(network.parameters()), 0.1)
            # The probe sees the features; no gradient of it reaches the model.
            losses.append(probe.learn(network.body(inputs).detach(), goal))
    print(f"rank {rank} loss {losses[-1]:.4f}")
    write_record(args.out, losses, network.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
