"""Trains with batch normalisation in the ways that are right, or that chance explains."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

SIZE = 12
PRETRAINING_STEPS = 8


def images(number: int) -> Tensor:
    """Images of differing brightness."""
    return 0.3 * torch.randn(number, 3, SIZE, SIZE) + 2 * torch.randn(number, 1, 1, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.layers(batch).mean((2, 3))).square().mean()


class Points(nn.Module):
    """Normalises over the points of all clouds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, clouds: Tensor) -> Tensor:
        return self.layers(clouds.flatten(0, 1)).square().mean()


def batch(way: str) -> Tensor:
    match way:
        case "eight" | "evaluated":
            return images(8)
        case "frozen":
            return images(2)
        case "alike":
            return torch.randn(2, 3, SIZE, SIZE)
        case "vectors":
            return torch.randn(2, 1, 3)
        case _:
            return torch.randn(2, 64, 3) + torch.randn(2, 1, 3)


def freeze(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def evaluate(wrapped: nn.Module) -> None:
    """Evaluate, and let what is inside the wrapper train again, as Lightning does."""
    wrapped.eval()
    with torch.no_grad():
        wrapped(images(8))
    wrapped.module.train()


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="eight")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(31)
    model = Points() if args.way in ("points", "vectors") else Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(PRETRAINING_STEPS):
        optimizer.zero_grad()
        model(batch("eight" if isinstance(model, Net) else "points")).backward()
        optimizer.step()
    if args.way == "frozen":
        freeze(model)
    wrapped = DistributedDataParallel(model)
    seed_everything(32 + dist.get_rank())
    if args.way == "evaluated":
        evaluate(wrapped)
    losses = []
    for _ in range(7):
        optimizer.zero_grad()
        loss = wrapped(batch(args.way))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
