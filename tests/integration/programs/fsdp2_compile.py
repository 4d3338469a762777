"""Trains compiled blocks under FSDP2; `--backend` chooses the compiler."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from training_record import out_parser, seed_everything, write_record


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


def main() -> None:
    parser = out_parser()
    parser.add_argument("--backend", default="inductor")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(4)
    model = nn.Sequential(nn.Linear(8, 16), Block(16), Block(16), nn.Linear(16, 1))
    for block in (model[1], model[2]):
        block.compile(backend=args.backend)
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seed_everything(30 + dist.get_rank())
    losses = []
    for _step in range(6):
        inputs = torch.randn(8, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
