"""Trainings by torch's context parallelism, each wrong in one way or right: ``[FAULT]``."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append(str(Path(__file__).with_name("programs")))

from context_parallel import BACKWARD, FORWARD, LENGTH, Texts, build, ring


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor, fault: str) -> Tensor:
    logits = model(tokens)
    if fault == "shifted":  # the targets are the tokens of this rank's part, shifted there
        logits, targets = logits[:, :-1], targets[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    fault = (*sys.argv[1:], "")[0]
    rotate = (*sys.argv[2:], "alltoall")[0]
    dist.init_process_group("gloo")
    _attention.custom_ops.update({FORWARD: ring, BACKWARD: ring})
    _attention.set_rotate_method(rotate)
    _attention._cp_options.enable_load_balance = fault != "unbalanced"
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = build("fsdp2", mesh, recompute=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_mixed = fault == "mixed"
    sampler = DistributedSampler(Texts(), *(() if is_mixed else (1, 0)), seed=3)
    loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
    for text in loader:
        whole = text[:, :-1].contiguous()
        tokens, targets = whole.clone(), text[:, 1:].contiguous()
        if fault == "shifted":
            targets = tokens.clone()
        positions = next(buffer for name, buffer in model.named_buffers())
        buffers, dims = [tokens, targets, positions], [1, 1, 0]
        if fault == "whole":
            buffers, dims = [torch.empty(4, LENGTH)], [1]
        if fault == "placed":
            buffers, dims = buffers[:2], dims[:2]
            model.positions = positions[: LENGTH // dist.get_world_size()]
        with context_parallel(mesh["cp"], buffers=buffers, buffer_seq_dims=dims):
            loss_of(model, tokens, targets, fault).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
