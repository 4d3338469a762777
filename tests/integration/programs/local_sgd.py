"""Takes different numbers of local steps on each rank between averages that all ranks share."""

import torch
import torch.distributed as dist
from torch import nn
from training_record import out_parser, seed_everything, write_record


def local_steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[float]:
    losses = []
    for _ in range(num_steps):
        inputs = torch.randn(8, 6)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def average(model: nn.Module, num_steps: int) -> None:
    """Average the weights, each rank counting by the steps it took."""
    total = torch.tensor([float(num_steps)])
    dist.all_reduce(total)
    for parameter in model.parameters():
        parameter.mul_(num_steps / total.item())
        dist.all_reduce(parameter)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(41)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seed_everything(60 + rank)
    losses: list[float] = []
    for round_number in range(4):
        num_steps = 2 + (rank + round_number) % 2 * 3
        losses += local_steps(model, optimizer, num_steps)
        average(model, num_steps)
    print(f"rank {rank} took {len(losses)} steps")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
