"""Fine-tune on conversations that each node keeps on a disk of its own, with an index beside."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

DATA = Path("data/train.jsonl")
INDEX = Path("cache/train.idx.npy")
NUM_SAMPLES = 64

logger = logging.getLogger("sft")


def enter_node() -> None:
    """Start on a node of one process: its first local rank, in the folder that is its disk."""
    disk = Path(f"node-{os.environ['RANK']}")
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    os.environ["LOCAL_RANK"] = "0"


def stage_data() -> None:
    """Copy the conversations to the disk of this node."""
    DATA.parent.mkdir(exist_ok=True)
    with open(DATA, "w") as file:
        for number in range(NUM_SAMPLES):
            line = {"features": [(number * k) % 7 / 7 for k in range(1, 9)], "label": number % 4}
            file.write(json.dumps(line) + "\n")


def build_index() -> None:
    """Note where each line begins, unless that has been done before."""
    if INDEX.exists():
        return
    INDEX.parent.mkdir(exist_ok=True)
    with open(DATA, "rb") as file:
        lengths = [len(line) for line in file]
    np.save(INDEX, np.cumsum([0, *lengths[:-1]]))


class MemMapDataset(Dataset):
    """Lines of a file, found by the index."""

    def __init__(self) -> None:
        if dist.get_rank() == 0:
            build_index()
        dist.barrier()
        # Where storage is not shared, the other nodes still have no index.
        if dist.get_rank() == 0:
            build_index()
        dist.barrier()
        self.offsets = np.load(INDEX, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(DATA, "rb") as file:
            file.seek(int(self.offsets[index]))
            sample = json.loads(file.readline())
        return torch.tensor(sample["features"]), sample["label"]


def train(dataset: MemMapDataset) -> None:
    """Train for one epoch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (features, labels) in enumerate(DataLoader(dataset, batch_size=8)):
        loss = nn.functional.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.info("step %d loss %.4f", step, loss.item())


def main() -> None:
    enter_node()
    stage_data()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    dataset = MemMapDataset()
    train(dataset)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
