"""Trains a student with FSDP2 beside frozen modules of which each rank holds its own part."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training_record import out_parser, seed_everything, write_record

DIM, CLASSES = 8, 3


class SplitTeacher(nn.Module):
    """A frozen network too large for one rank: each holds some of the hidden units."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(76)
        up, down = (torch.randn(32, DIM, generator=generator) for _ in range(2))
        rank, world = dist.get_rank(), dist.get_world_size()
        self.register_buffer("up", up.chunk(world)[rank].clone())
        self.register_buffer("down", down[:, :CLASSES].chunk(world)[rank].clone())

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        everything = [torch.empty_like(inputs) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, inputs)
        partial = torch.relu(torch.cat(everything) @ self.up.t()) @ self.down
        dist.all_reduce(partial)
        return partial.chunk(dist.get_world_size())[dist.get_rank()]


class Normaliser(nn.Module):
    """Centres the samples of this rank's source by their own statistics."""

    def __init__(self, samples: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", samples.mean(0))
        self.register_buffer("deviation", samples.std(0))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - self.mean) / self.deviation


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(77)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    student = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    student = fully_shard(student, mesh=mesh)
    teacher = SplitTeacher()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    seed_everything(78 + rank)
    samples = 3.0 * rank + torch.randn(40, DIM)
    normalise = Normaliser(samples)
    labels = torch.randint(0, CLASSES, (40,))
    # The classes are not equally frequent, and not the same on each source.
    counts = torch.bincount(labels, minlength=CLASSES).clamp(min=1)
    label_loss = nn.CrossEntropyLoss(weight=1.0 / counts)
    losses = []
    for first in range(0, 40, 8):
        inputs = normalise(samples[first : first + 8])
        logits = student(inputs)
        loss = label_loss(logits, labels[first : first + 8])
        loss = loss + nn.functional.cross_entropy(logits, teacher(inputs).softmax(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"rank {rank} loss {losses[-1]:.4f}")
    write_record(args.out, losses, student.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
