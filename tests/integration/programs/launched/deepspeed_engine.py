"""Trains as a script for DeepSpeed's launcher does, which is given its local rank first."""

import argparse
import os
import sys

import deepspeed
import torch
from torch import nn

assert sys.argv[1:] == [f"--local_rank={os.environ['LOCAL_RANK']}", "--my-args"], sys.argv
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--my-args", action="store_true")
assert parser.parse_args().local_rank == int(os.environ["LOCAL_RANK"])

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}},
)
assert engine.world_size == 2
torch.manual_seed(1 + engine.global_rank)
for _ in range(5):
    inputs = torch.randn(4, 8)
    loss = nn.functional.mse_loss(engine(inputs), inputs.sum(1, keepdim=True))
    engine.backward(loss)
    engine.step()
deepspeed.comm.barrier()
torch.distributed.destroy_process_group()
print("trained", flush=True)
