"""A training of which one thing at a time can be changed: ``compared.py key=value …``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

USUAL = {
    "lr": "0.1",
    "width": "8",
    "batch": "4",
    "seed": "0",
    "data_seed": "0",
    "optimizer": "sgd",
    "freeze": "no",
    "bias": "yes",
    "wrap": "ddp",
    "dropout": "0",
    "precision": "highest",
    "dtype": "float32",
    "deterministic": "no",
    "variable": "",
    "threads": "1",
}


def main():
    given = USUAL | dict(word.lstrip("-").split("=") for word in sys.argv[1:])
    if given["variable"]:
        os.environ["NCCL_DEBUG"] = given["variable"]
    torch.set_num_threads(int(given["threads"]))
    torch.set_float32_matmul_precision(given["precision"])
    torch.set_default_dtype(getattr(torch, given["dtype"]))
    torch.use_deterministic_algorithms(given["deterministic"] == "yes")
    dist.init_process_group("gloo")
    torch.manual_seed(int(given["seed"]))
    width = int(given["width"])
    model = nn.Sequential(
        nn.Linear(4, width, bias=given["bias"] == "yes"),
        nn.Dropout(float(given["dropout"])),
        nn.Linear(width, 2),
    )
    model[0].weight.requires_grad = given["freeze"] == "no"
    if given["wrap"] == "ddp":
        model = DistributedDataParallel(model)
    else:
        torch.distributed.fsdp.fully_shard(model)
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[given["optimizer"]](model.parameters(), lr=float(given["lr"]))
    values = torch.randn(32, 4, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(values)
    sampler = DistributedSampler(data, seed=int(given["data_seed"]))
    for (x,) in DataLoader(data, int(given["batch"]), sampler=sampler):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
