"""Trains under any launcher that tells each rank its number."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

assert sys.argv[1:] == ["--my-args"], sys.argv
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())
for _ in range(5):
    inputs = torch.randn(4, 8)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
print("trained", flush=True)
