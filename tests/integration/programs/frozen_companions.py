"""Trains a DDP student beside frozen models: a teacher, averages of it, and a momentum encoder."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


class Encoder(nn.Module):
    """Two layers with batch normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.outer = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outer(torch.relu(self.norm(self.inner(inputs))))


class RunningError(nn.Module):
    """A metric: each rank counts its own samples until the sum is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, errors: Tensor) -> None:
        # A rank may be without valid samples for a while.
        valid = errors[errors > 1.2]
        self.total += valid.sum()
        self.count += len(valid)

    def compute(self) -> float:
        both = torch.stack([self.total, self.count.float()])
        dist.all_reduce(both)
        return (both[0] / both[1].clamp(min=1)).item()


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float) -> None:
    for old, new in zip(average.parameters(), model.parameters(), strict=True):
        old.lerp_(new, 1 - decay)


def frozen_copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def taught(teacher: nn.Module | None, inputs: Tensor) -> Tensor:
    """Let rank 0, which alone has the teacher, label the samples of all ranks."""
    parts = [torch.empty_like(inputs) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, inputs)
    labels = torch.empty(len(parts), len(inputs), 4)
    if teacher is not None:
        labels = torch.stack([teacher(part) for part in parts])
    dist.broadcast(labels, src=0)
    return labels[dist.get_rank()]


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    teacher = None
    if rank == 0:
        seed_everything(90)
        teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
    seed_everything(91)
    features = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False).eval()
    student = DistributedDataParallel(Encoder())
    # Its normalisation follows the batches of its own rank.
    momentum = frozen_copy(student.module).train()
    average = frozen_copy(student.module).eval() if rank == 0 else None
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    error = RunningError()
    seed_everything(92 + rank)
    losses, late_average = [], None
    for step in range(6):
        inputs = features(torch.randn(8, 8))
        outputs = student(inputs)
        errors = (outputs - taught(teacher, inputs)).square().mean(1)
        loss = errors.mean() + 0.1 * (outputs - momentum(inputs)).square().mean()
        error(errors.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(momentum, student.module, 0.9)
        if average is not None:
            follow(average, student.module, 0.9)
        if step == 2:
            late_average = frozen_copy(student.module).eval()
        if late_average is not None:
            follow(late_average, student.module, 0.5)
        losses.append(loss.item())
    losses.append(error.compute())
    print(f"rank {rank} mean error {losses[-1]:.4f}")
    write_record(args.out, losses, student.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
