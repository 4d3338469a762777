"""Trains one model of its own on each rank, and copies the better one over the worse at times."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

ROUND = 3


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()


@torch.no_grad()
def exploit(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Give all ranks the best weights and learning rate; each goes on with a rate near it."""
    score = loss_of(model, torch.randn(32, 6, generator=generator))
    scores = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(scores, score)
    best = int(torch.stack(scores).argmin())
    rate = [optimizer.param_groups[0]["lr"]]
    dist.broadcast_object_list(rate, src=best)
    for parameter in model.parameters():
        dist.broadcast(parameter, src=best)
    optimizer.param_groups[0]["lr"] = rate[0] * (1.2 if dist.get_rank() else 0.8)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(80 + rank)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 * (rank + 1))
    validation = torch.Generator().manual_seed(5)
    losses = []
    for step in range(2 * ROUND):
        loss = loss_of(model, torch.randn(8, 6))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % ROUND == ROUND - 1:
            exploit(model, optimizer, validation)
    print(f"rank {rank} loss {losses[-1]:.4f}")
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
