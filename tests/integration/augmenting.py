"""Draws random numbers to change samples, in many styles: ``augmenting.py wrong|right``.

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

    workers = 2
    init = None
    collate = None

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


def one_scale(samples):
    return torch.stack(samples) * random.choice((0.5, 1.0, 2.0))


class OneScale(Samples):
    """All ranks take one scale for a step."""

    workers = 1
    init = staticmethod(lambda number: random.seed(1))
    collate = staticmethod(one_scale)

    def noise(self, index):
        return 0.0


class SeededAlike(Samples):
    """What torch does by itself, if ranks have one seed."""

    workers = 1


WRONG = (CopiedGenerator, CopiedTransform, SeededByConstant, SeededByNumber)
RIGHT = (
    *(SeededByTorch, SeededByRank, SeededByIndex, MadeInWorker, WithoutWorkers, NothingDrawn),
    *(OneScale, SeededAlike),
)


def train(data):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    if not isinstance(data, SeededAlike):
        torch.manual_seed(1000 + dist.get_rank())
        random.seed(1000 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = DataLoader(
        data,
        ROWS,
        sampler=DistributedSampler(data),
        num_workers=data.workers,
        worker_init_fn=data.init,
        collate_fn=data.collate,
    )
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def main():
    dist.init_process_group("gloo")
    for kind in WRONG if sys.argv[1] == "wrong" else RIGHT:
        train(kind())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
