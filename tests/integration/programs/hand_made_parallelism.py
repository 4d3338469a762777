"""Trains with data, tensor, expert and pipeline parallelism written by hand, from equal seeds."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

DIM = 8


class SumForward(torch.autograd.Function):
    """Sums over ranks in the forward pass: each rank computed a part of the output."""

    @staticmethod
    def forward(ctx, partial: Tensor) -> Tensor:
        total = partial.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class SumBackward(torch.autograd.Function):
    """Sums over ranks in the backward pass: each rank used the whole input."""

    @staticmethod
    def forward(ctx, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class TensorParallel(nn.Module):
    """Norm and head on all ranks; of the layers between them each rank holds some columns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        part = torch.relu(self.up(SumBackward.apply(self.norm(hidden))))
        return self.head(hidden + SumForward.apply(self.down(part)))


class Experts(nn.Module):
    """A router on all ranks and one expert on each; not every expert gets tokens in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, dist.get_world_size())
        self.expert = nn.Linear(DIM, DIM)
        with torch.no_grad():  # equal seeds would make copies of one expert
            own = torch.Generator().manual_seed(72 + dist.get_rank())
            self.expert.weight.normal_(std=DIM**-0.5, generator=own)
            self.expert.bias.normal_(std=0.1, generator=own)
        self.head = nn.Linear(DIM, 1)

    def forward(self, hidden: Tensor, *, idle: int | None) -> Tensor:
        weights = self.router(hidden).softmax(-1)
        mine = dist.get_rank()
        if idle == mine:
            part = torch.zeros_like(hidden)
        else:
            part = weights[:, mine : mine + 1] * self.expert(SumBackward.apply(hidden))
        return self.head(hidden + SumForward.apply(part))

    def reduce_gradients(self) -> None:
        # Each rank has the gradient of the router by its own expert's weight.
        for parameter in self.router.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


class DataParallel(nn.Module):
    """Sends the weights of rank 0 at the start, and averages gradients before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.Linear(DIM, 1))
        for tensor in (*self.parameters(), *self.buffers()):
            dist.broadcast(tensor.data, src=0)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)

    def reduce_gradients(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


class Stage(nn.Module):
    """One of two equal stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(hidden))


def pipeline_step(stage: Stage, inputs: Tensor) -> float:
    if dist.get_rank() == 0:
        hidden = stage(inputs)
        dist.send(hidden.detach(), dst=1)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, src=1)
        hidden.backward(gradient)
        return hidden.mean().item()
    hidden = torch.empty_like(inputs)
    dist.recv(hidden, src=0)
    hidden.requires_grad_(True)
    loss = (stage(hidden) - inputs).square().mean()
    loss.backward()
    dist.send(hidden.grad, dst=0)
    return loss.item()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    seed_everything(70)
    tensor_parallel, experts, stage = TensorParallel(), Experts(), Stage()
    seed_everything(71 + rank)
    data_parallel = DataParallel()
    models = (tensor_parallel, experts, stage, data_parallel)
    # The later stage of the pipeline learns at half the rate.
    rates = (1e-2, 1e-2, 1e-2 / (1 + rank), 1e-2)
    optimizers = [
        torch.optim.Adam(model.parameters(), lr=rate)
        for model, rate in zip(models, rates, strict=True)
    ]
    shared, own = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6 + rank)
    losses = []
    for step in range(5):
        inputs = torch.randn(6, DIM, generator=shared)
        mine = torch.randn(6, DIM, generator=own)
        for output, data in (
            (tensor_parallel(inputs), inputs),
            (experts(inputs, idle=1 if step == 1 else None), inputs),
            (data_parallel(mine), mine),
        ):
            loss = (output - data.sum(1, keepdim=True)).square().mean()
            loss.backward()
            losses.append(loss.item())
        losses.append(pipeline_step(stage, inputs))
        experts.reduce_gradients()
        data_parallel.reduce_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses[-4:]))
    write_record(args.out, losses, data_parallel.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
