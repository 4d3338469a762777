"""Trains a small model over a split sequence, in one of several ways."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import distdiag

GROUP = None
WAY = sys.argv[1]


def shift():
    return 1 if WAY == "late" else 0


def split(x):
    """This rank's part of the sequence."""
    ranks = dist.get_process_group_ranks(GROUP)
    step = x.shape[1] // len(ranks)
    begin = min(ranks.index(dist.get_rank()) * step + shift(), x.shape[1] - step)
    return x[:, begin : begin + step]


def gather(part):
    """The whole sequence; a rank's own part keeps its gradient."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(GROUP))]
    dist.all_gather(parts, part.detach().contiguous(), group=GROUP)
    parts[dist.get_group_rank(GROUP, dist.get_rank())] = part
    return torch.cat(parts[::-1] if WAY == "reversed" else parts, dim=1)


def mean_of_all(query, key, value):
    """Attends to all tokens alike, those of the future too."""
    return gather(value).mean(1, keepdim=True).expand_as(value)


if WAY in ("marked", "late"):
    split = distdiag.splits_sequence(dim=1)(split)
    gather = distdiag.gathers_sequence(dim=1)(gather)


def main():
    global GROUP
    dist.init_process_group("gloo")
    GROUP = dist.group.WORLD
    if dist.get_world_size() == 4:
        GROUP = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    if WAY == "asked":
        verdict = distdiag.sequence.verify(split, gather, length=8, group=GROUP, reduction="mean")
        print(f"asked: {verdict.ok}", flush=True)
    for _ in range(3):
        x = torch.randn(2, 8, 4)
        loss = gather(layer(split(x))).square().mean()
        loss.backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=GROUP)
        optimizer.step()
        optimizer.zero_grad()
    # One write, for both ranks share the output: `print` would write the end of its line apart.
    sys.stdout.write(f"loss {loss.item().hex()} random {torch.rand(1).item().hex()}\n")
    sys.stdout.flush()
    dist.destroy_process_group()


main()
