"""Skips batches that fail on one rank after all ranks agreed to skip them."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record


class BadSample(ValueError):
    """A sample that cannot be decoded."""


def load_batch(step: int, generator: torch.Generator) -> Tensor:
    batch = torch.randn(8, 4, generator=generator)
    if step % 4 == 2 and dist.get_rank() == 1:
        raise BadSample(f"step {step} holds a broken file")
    return batch


def all_ranks_ok(ok: bool) -> bool:
    flag = torch.tensor([int(ok)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(83)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(10):
        try:
            batch = load_batch(step, data)
            ok = True
        except BadSample as error:
            print(f"rank {dist.get_rank()} skips: {error}")
            batch, ok = torch.zeros(8, 4), False
        if not all_ranks_ok(ok):
            continue
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    write_record(args.out, losses, model.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
