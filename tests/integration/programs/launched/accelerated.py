"""Trains as a script for accelerate does."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert sys.argv[1:] == ["--my-args"], sys.argv
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(32, 8), torch.randn(32, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for inputs, targets in data:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
accelerator.end_training()
print("trained", flush=True)
