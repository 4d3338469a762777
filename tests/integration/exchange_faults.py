"""Trainings that exchange tokens between the experts of two ranks: ``exchange_faults.py FAULT``."""

import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

DIM, EXPERTS, FACTOR = 8, 4, 1.0


class AllToAll(torch.autograd.Function):
    """Send rows to the ranks of the experts; the gradient takes the way back."""

    @staticmethod
    def forward(ctx, rows: Tensor, output_splits, input_splits) -> Tensor:
        ctx.splits = input_splits, output_splits
        num_rows = len(rows) if output_splits is None else sum(output_splits)
        out = rows.new_empty(num_rows, rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), output_splits, input_splits)
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        output_splits, input_splits = ctx.splits
        return AllToAll.apply(gradient, output_splits, input_splits), None, None


class MoELayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.expert = nn.Linear(DIM, DIM)


class Capacity(MoELayer):
    """Each expert takes as many tokens of a rank as its capacity says; the rest is dropped."""

    agrees = True

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).topk(1, -1)
        mask = nn.functional.one_hot(chosen.squeeze(-1), EXPERTS)
        position = (mask.cumsum(0) - 1).gather(1, chosen).squeeze(-1)
        capacity = math.ceil(FACTOR * len(tokens) / EXPERTS)
        if self.agrees:
            most = torch.tensor(capacity)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            capacity = int(most)
        kept = position < capacity
        slots = chosen.squeeze(-1)[kept] * capacity + position[kept]
        buffer = tokens.new_zeros(EXPERTS * capacity, DIM).index_copy(0, slots, tokens[kept])
        out = AllToAll.apply(self.expert(AllToAll.apply(buffer, None, None)), None, None)
        return tokens.index_add(0, kept.nonzero().squeeze(-1), out[slots] * weights[kept])


class Agreed(Capacity):
    pass


class Local(Capacity):
    agrees = False


class Splits(MoELayer):
    """The ranks tell each other first how many rows will come; two experts are on each rank."""

    mistake = 0
    is_lossy = False

    def forward(self, tokens: Tensor) -> Tensor:
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        order = chosen.flatten().argsort(stable=True)
        sent = torch.bincount(chosen.flatten(), minlength=EXPERTS).view(2, -1).sum(1)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent)
        came, sent = came.tolist(), sent.tolist()
        if dist.get_rank() == 0:
            came[1] += self.mistake
        rows = AllToAll.apply(tokens[order // 2], came, sent)
        out = self.expert(rows)
        if self.is_lossy:
            out, came, sent = out[: 4 * 2], [4, 4], [4, 4]
            order = order[:8]
        out = AllToAll.apply(out, sent, came)
        return tokens.index_add(0, order // 2, out * weights.flatten()[order].unsqueeze(-1))


class Wrong(Splits):
    mistake = 1


class Lossy(Splits):
    is_lossy = True


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(globals()[sys.argv[1].title()]()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(100 + step + dist.get_rank())
        model(torch.randn(32 + 4 * dist.get_rank(), DIM)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
