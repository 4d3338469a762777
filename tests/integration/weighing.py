"""Trains a small language model with DDP whose tokens weigh otherwise than they should."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, MICRO_STEPS, IGNORED = 32, 16, 2, -100


def batch(step, index, rank):
    """Answers of the first rank are long, those of the second are short."""
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    tokens = torch.randint(VOCAB, (4, LENGTH), generator=generator)
    labels = tokens.clone()
    for row, answer in enumerate(labels):
        answer[(6 + row if rank else 12 + row % 2) :] = IGNORED
    return tokens, labels


def count(batches, first):
    number = sum((labels[:, first:] != IGNORED).sum() for _, labels in batches)
    dist.all_reduce(number)
    return number


def main(fault):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Tanh(), nn.Linear(16, VOCAB))
    rank, group = dist.get_rank(), None
    if fault.startswith("alone"):  # as if the ranks shared a model
        group = [dist.new_group([each]) for each in range(dist.get_world_size())][rank]
        rank = 0
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        batches = [batch(step, index, rank) for index in range(MICRO_STEPS)]
        scored, all_labels = count(batches, 1), count(batches, 0)
        for tokens, labels in batches:
            logits, targets = model(tokens)[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)
            total = F.cross_entropy(logits, targets, reduction="sum")
            right = total / scored * dist.get_world_size()
            loss = {
                "nothing": right,
                "own-mean": F.cross_entropy(logits, targets) / MICRO_STEPS,
                "divided-again": right / MICRO_STEPS,
                "ranks-twice": total / scored,
                "unshifted": total / all_labels * dist.get_world_size(),
                "alone": total / sum((labels[:, 1:] != IGNORED).sum() for _, labels in batches),
            }[fault.removesuffix("-times")]
            loss = loss * dist.get_world_size() if fault == "alone-times" else loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
