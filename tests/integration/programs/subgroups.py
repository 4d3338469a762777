"""Makes groups, uses them on their members only, and sets the whole process group up twice."""

import datetime
import os

import torch
import torch.distributed as dist
from torch import nn
from training_record import out_parser, seed_everything, write_record


def single_member_groups() -> list[dist.ProcessGroup]:
    """Make every group on every rank, in the same order."""
    return [dist.new_group([member]) for member in range(dist.get_world_size())]


def work_on_own_group(groups: list[dist.ProcessGroup]) -> float:
    """Reduce more often on rank 1: its group has no other member."""
    rank = dist.get_rank()
    total = torch.ones(1)
    for _ in range(1 + 2 * rank):
        dist.all_reduce(total, group=groups[rank])
    if rank == 1:
        dist.broadcast(total, src=1, group=groups[1])
        dist.barrier(group=groups[1])
    return total.item()


def members_only_group() -> float:
    """Make a group where only its members call, which local synchronization allows."""
    if dist.get_rank() != 1:
        return 0.0
    group = dist.new_group([1], use_local_synchronization=True)
    value = torch.full((2,), 3.0)
    dist.all_reduce(value, group=group)
    dist.destroy_process_group(group)
    return value.sum().item()


def set_up(number: int) -> None:
    """Initialise with keys of its own: in those of the session before, late ranks get lost."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"session-{number}", dist.TCPStore(address, port)),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(minutes=5),
    )


def session(number: int) -> tuple[list[float], nn.Module]:
    """Train a little with parameters averaged over a second group of all ranks."""
    set_up(number)
    seed = 21 + number
    rank = dist.get_rank()
    seed_everything(seed + rank)
    groups = single_member_groups()
    everyone = dist.new_group([0, 1], group_desc="everyone")
    evens = dist.new_group([r for r in range(dist.get_world_size()) if r % 2 == 0])
    model = nn.Linear(4, 1)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0, group=everyone)
    losses = []
    for step in range(3):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=everyone if step % 2 else None)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        losses += [loss.item(), work_on_own_group(groups)]
        if rank % 2 == 0:
            dist.all_reduce(torch.ones(5), group=evens)
    losses.append(members_only_group())
    dist.destroy_process_group(everyone)
    dist.barrier()
    return losses, model


def main() -> None:
    args = out_parser().parse_args()
    losses, weights = [], {}
    for number in range(2):
        more_losses, model = session(number)
        losses += more_losses
        weights |= {f"{number}.{name}": value for name, value in model.state_dict().items()}
        write_record(args.out, losses, weights)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
