"""Calls models past their wrappers in the ways that are right, and leaves parts of them unused."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

DIM = 8


class Model(nn.Module):
    """A trunk, a tower that some steps use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.1), nn.Linear(DIM, DIM))
        self.tower = nn.Linear(DIM, 1)
        self.spare = nn.Linear(DIM, 1)

    def forward(self, inputs: Tensor, *, use_tower: bool = True) -> Tensor:
        hidden = self.trunk(inputs)
        return self.tower(hidden) if use_tower else hidden.mean(1, keepdim=True)

    def smoothness(self, inputs: Tensor) -> Tensor:
        return (self.trunk(inputs) - self.trunk(inputs + 0.01)).square().mean()


def mean_of_gradients(parameters: list[nn.Parameter]) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def through_and_past(losses: list[float]) -> nn.Module:
    """The auxiliary loss goes past the wrapper, in the backward pass that reduces everything."""
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        with model.no_sync():
            model(torch.randn(4, DIM)).square().mean().backward()
        loss = model(torch.randn(4, DIM), use_tower=step % 2 == 0).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model.module.smoothness(torch.randn(4, DIM)).item())
        losses.append(loss.item())
    return model.module


def past_and_reduced_by_hand(losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(4):
        loss = model.module(torch.randn(4, DIM)).square().mean()
        (loss + model.module.smoothness(torch.randn(4, DIM))).backward()
        mean_of_gradients(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model.module


def left_out_and_reduced_by_hand(losses: list[float]) -> None:
    seed_everything(72)
    model = Model()
    fully_shard(model.trunk)
    seed_everything(73 + dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        loss = model(torch.randn(4, DIM)).square().mean()
        loss.backward()
        mean_of_gradients(list(model.tower.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    losses: list[float] = []
    weights = {}
    for number, train in enumerate((through_and_past, past_and_reduced_by_hand)):
        seed_everything(71 + dist.get_rank())
        model = train(losses)
        weights |= {f"{number}.{name}": value for name, value in model.state_dict().items()}
    left_out_and_reduced_by_hand(losses)
    if dist.get_rank() == 0:
        print(f"loss {losses[-1]:.4f}")
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
