"""Draws random numbers to change samples, in many styles: ``augmenting.py wrong|right|meant``.

Each way has a data set of its own, by whose class findings tell which way they are about.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

ROWS, STEPS = 4, 4


class Samples(Dataset):
    """Samples with noise, drawn in the way of the class."""

    workers, rows = 2, ROWS
    init = collate = held_out = None

    def __len__(self):
        return 2 * ROWS * STEPS

    def __getitem__(self, index):
        return torch.full((4,), float(index)) + self.noise(index)

    def noise(self, index):
        return float(np.random.rand())


def seed_numpy(value):
    np.random.seed(value % (1 << 32))


# Wrong


class CopiedGenerator(Samples):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def noise(self, index):
        return float(self.rng.normal())


class CopiedTransform(Samples):
    def __init__(self):
        self.transform = Jitter(random.Random(3))

    def noise(self, index):
        return self.transform()


class Jitter:
    def __init__(self, generator):
        self.generator = generator

    def __call__(self):
        return self.generator.gauss(0, 1)


class SeededByConstant(Samples):
    init = staticmethod(lambda number: seed_numpy(0))


class SeededByNumber(Samples):
    init = staticmethod(lambda number: random.seed(number))

    def noise(self, index):
        return random.random()


# Right


class SeededByTorch(Samples):
    def noise(self, index):
        return float(torch.rand(())) + random.random() + super().noise(index)


class SeededByRank(Samples):
    init = staticmethod(lambda number: seed_numpy(1000 * dist.get_rank() + number))


class SeededByIndex(Samples):
    init = staticmethod(lambda number: random.seed(0))

    def noise(self, index):
        random.seed(index)
        draw = torch.Generator().manual_seed(index)
        return random.random() + float(torch.rand((), generator=draw))


class MadeInWorker(Samples):
    rng = None

    def noise(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng([dist.get_rank(), get_worker_info().id])
        return float(self.rng.normal())


class WithoutWorkers(Samples):
    workers = 0

    def __init__(self):
        self.rng = np.random.default_rng(dist.get_rank())

    def noise(self, index):
        return float(self.rng.normal()) + random.random()


class NothingDrawn(Samples):
    init = staticmethod(lambda number: seed_numpy(0))

    def noise(self, index):
        return 0.0


class SeededAlike(Samples):
    """What torch does by itself, if ranks have one seed."""

    workers = 1


# Right, and equal on purpose


class Meant(Samples):
    """What all samples have in common."""

    workers = 1
    init = staticmethod(lambda number: seed_all(1))

    def noise(self, index):
        return 0.0


def seed_all(value):
    random.seed(value)
    seed_numpy(value)


class OneScale(Meant):
    """All ranks take one scale for a step."""

    collate = staticmethod(lambda rows: torch.stack(rows) * random.choice((0.5, 1.0, 2.0)))


class OneSize(Meant):
    """All workers take one size for a batch, which is as large as numbers are drawn for that."""

    workers, rows = 2, 2
    collate = staticmethod(lambda rows: torch.stack(rows) * random.random() * random.random())


def mixed(rows):
    batch, share = torch.stack(rows), np.random.beta(1, 1)
    return share * batch + (1 - share) * batch[np.random.permutation(len(rows))]


class Mixed(Meant):
    """Samples are mixed with others of the same batch."""

    collate = staticmethod(mixed)


class OneOrder(Meant):
    """Each worker draws the same order of all samples before it reads the first one."""

    workers = 2
    order = None

    def __init__(self):
        self.draw = torch.Generator().manual_seed(0)

    def noise(self, index):
        if self.order is None:
            self.order = torch.randperm(len(self), generator=self.draw)
        return float(self.order[index])


class HeldOut(Meant):
    """What is evaluated in between is changed by the same numbers each time."""

    def noise(self, index):
        return random.random()


class Evaluated(Samples):
    held_out = HeldOut()


WRONG = (CopiedGenerator, CopiedTransform, SeededByConstant, SeededByNumber)
RIGHT = (
    *(SeededByTorch, SeededByRank, SeededByIndex, MadeInWorker, WithoutWorkers, NothingDrawn),
    SeededAlike,
)
MEANT = (OneScale, OneSize, Mixed, OneOrder, Evaluated)


def train(data):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    if not isinstance(data, SeededAlike):
        torch.manual_seed(1000 + dist.get_rank())
        random.seed(1000 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    held_out = iter(()) if data.held_out is None else iter(loader(data.held_out))
    for batch in loader(data):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.module(next(held_out, batch))


def loader(data):
    return DataLoader(
        data,
        data.rows,
        sampler=DistributedSampler(data),
        num_workers=data.workers,
        worker_init_fn=data.init,
        collate_fn=data.collate,
    )


def main():
    dist.init_process_group("gloo")
    for kind in {"wrong": WRONG, "right": RIGHT, "meant": MEANT}[sys.argv[1]]:
        train(kind())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
