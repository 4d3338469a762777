"""Sum two metrics over all ranks. Each rank picks how by itself, which is the fault."""

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
other = dist.new_group([0, 1])
loss = torch.ones(3)
dist.all_reduce(loss, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)
if "--accuracy" in sys.argv:
    accuracy = torch.ones(1)
    dist.all_reduce(accuracy, op=dist.ReduceOp.MIN if rank == 0 else dist.ReduceOp.SUM, group=other)
dist.barrier(group=other)
dist.destroy_process_group()
