"""Trains a small language model of experts with DDP whose auxiliary loss is right, or wrong."""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, DIM, EXPERTS, MICRO_STEPS, COEFFICIENT = 32, 16, 4, 3, 0.02
STEPS, LONGER = 3, {"forgotten": 20, "warm-up": 20}


class Inject(torch.autograd.Function):
    """Pass a tensor on; a loss beside it gets a gradient of one."""

    @staticmethod
    def forward(ctx, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(gradient[0, 0])


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))
        self.how = how
        if how in LONGER:
            self.aux_loss_coef = COEFFICIENT

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(tokens).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        share = F.one_hot(chosen, EXPERTS).float().sum(1).mean(0)
        loss = EXPERTS * (share * scores.mean(0)).sum()
        if self.how == "thrown":
            Inject.apply(weights, COEFFICIENT / MICRO_STEPS * loss)
        if self.how in ("injected", "by-hand-right"):
            weights = Inject.apply(weights, COEFFICIENT / MICRO_STEPS * loss)
        if self.how in ("injected-passes", "by-hand"):
            weights = Inject.apply(weights, COEFFICIENT * loss)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            out = out + expert(tokens) * (weights * (chosen == index)).sum(-1, keepdim=True)
        return tokens + out, loss


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(how) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, total = self.embedding(tokens), torch.zeros(())
        for layer in self.layers:
            hidden, loss = layer(hidden)
            total = total + loss
        return self.head(hidden), total


def main(how: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    is_by_hand = how.startswith("by-hand")
    model = Model(how) if is_by_hand else DistributedDataParallel(Model(how))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world = dist.get_world_size()
    for step in range(LONGER.get(how, STEPS)):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        sizes = [24 + 4 * dist.get_rank() + index for index in range(MICRO_STEPS)]
        count = torch.tensor(sum(sizes))
        dist.all_reduce(count)
        for size in sizes:
            tokens, labels = torch.randint(VOCAB, (2, size), generator=generator)
            logits, aux = model(tokens)
            total = F.cross_entropy(logits, labels, reduction="sum") / count
            loss = {
                "right": total * world + COEFFICIENT * aux / MICRO_STEPS,
                "ranks": (total + COEFFICIENT * aux / MICRO_STEPS) * world,
                "passes": total * world + COEFFICIENT * aux,
                "injected": total * world,
                "injected-passes": total * world,
                "thrown": total * world,
                "forgotten": total * world,
                "warm-up": total * world + (COEFFICIENT * aux / MICRO_STEPS if step > 9 else 0),
                "by-hand": F.cross_entropy(logits, labels) / MICRO_STEPS,
                "by-hand-right": F.cross_entropy(logits, labels) / MICRO_STEPS,
            }[how]
            loss.backward()
        for parameter in model.parameters() if is_by_hand else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    del model  # its reducer must not outlive the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
