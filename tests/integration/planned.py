"""Shards a model by a plan, rightly or with a fault: ``planned.py WAY [FOLDER]``."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DIM = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Experts(nn.Module):
    def __init__(self, num_experts=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, DIM, DIM) / DIM)

    def forward(self, hidden):
        mine = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        return sum(hidden @ each for each in mine)


class Model(nn.Module):
    def __init__(self, part=Block, num_layers=2, **options):
        super().__init__()
        self.layers = nn.ModuleList(part(**options) for _ in range(num_layers))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def parallelize(patterns):
    plan = {patterns[0]: ColwiseParallel(), patterns[1]: RowwiseParallel()}
    return parallelize_module(Model(), tp_mesh(), plan)


def tp_mesh(name="tp"):
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(name,))


def split():
    return parallelize(["layers.*.up", "layers.*.down"])


def misspelt():
    model = parallelize(["layers.*.upp", "layers.*.down"])
    return None if model is None else Model()  # an unpaired half cannot be trained


def reloaded():
    model, state = split(), Model().state_dict()
    model.load_state_dict(state, assign=True)
    for layer in model.layers:  # the styles would not bear the whole weights
        for part in (layer.up, layer.down):
            part._forward_pre_hooks.clear()
            part._forward_hooks.clear()
    return model


def staged():
    """Each rank is a stage; the plan is that of the whole model."""
    rank = dist.get_rank()
    groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
    stage = nn.ModuleDict({"first" if rank == 0 else "last": nn.Linear(DIM, DIM)})
    mesh = dist.DeviceMesh.from_group(groups[rank], "cpu", mesh_dim_names=("tp",))
    plan = {
        name: ColwiseParallel(output_layouts=Replicate(), use_local_output=True)
        for name in ("first", "last")
    }
    parallelize_module(stage, mesh, plan)
    return nn.Sequential(*stage.values())


def sharded_experts(placement=None):
    model, mesh = Model(Experts), tp_mesh("ep")
    for layer in model.layers:
        whole = layer.weight.detach()
        part = distribute_tensor(whole, mesh, [placement or Shard(0)])
        layer.weight = nn.Parameter(part)
    return model


def whole_experts():
    return sharded_experts(Replicate())


def fsdp_only():
    model = Model()
    fully_shard(model, mesh=tp_mesh("dp_shard"))
    return model


def veomni(pattern="layers.*.weight", num_experts=4):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "stand_ins"))
    from veomni.distributed.parallel_plan import ParallelPlan

    model = Model(Experts, num_experts=num_experts)
    ParallelPlan({"ep": {pattern: Shard(0)}}).apply(model, {"ep": tp_mesh("ep")})
    return model


def veomni_prefix():
    return veomni("model.layers.*.weight")


def veomni_uneven():
    try:
        veomni(num_experts=3)
    except AssertionError:
        return Model()
    return None


def transformers(*, has_more_rules=False):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=DIM,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    if dist.get_rank() == 0:
        LlamaForCausalLM(config).save_pretrained(sys.argv[2])
    dist.barrier()
    if has_more_rules:
        rules = {**LlamaForCausalLM._tp_plan, "model.layers.*.mlp.router": "colwise"}
        LlamaForCausalLM._tp_plan = rules
    return LlamaForCausalLM.from_pretrained(
        sys.argv[2], distributed_config=DistributedConfig(tp_size=2)
    )


def transformers_general():
    return transformers(has_more_rules=True)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = globals()[sys.argv[1]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        if sys.argv[1].startswith("transformers"):
            tokens = torch.arange(8)[None]
            loss = model(input_ids=tokens, labels=tokens).loss
        else:
            loss = model(torch.ones(2, DIM)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
