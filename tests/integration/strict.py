"""Ranks that are about to issue collectives which contradict one another."""

import argparse

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["none", "op", "shape", "dtype", "reduce_op", "root"])
kind = parser.parse_args().kind
dist.init_process_group("gloo")
odd = dist.get_rank() == 1 and kind != "none"
tensor = torch.ones(4 + (odd and kind == "shape"))
for _ in range(5):
    dist.all_reduce(torch.ones(3))
if kind == "root":
    dist.broadcast(tensor, src=int(odd))
elif odd and kind == "op":
    dist.broadcast(tensor, src=0)
else:
    tensor = tensor.int() if odd and kind == "dtype" else tensor
    op = dist.ReduceOp.MAX if odd and kind == "reduce_op" else dist.ReduceOp.SUM
    dist.all_reduce(tensor, op=op)
print("went on")
dist.destroy_process_group()
