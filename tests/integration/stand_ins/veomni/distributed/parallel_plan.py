"""A plan that splits parameters by patterns of names and keeps the parts as plain ones."""

import re

from torch import nn


class ParallelPlan:
    def __init__(self, extra_parallel_plan):
        self.extra_parallel_plan = extra_parallel_plan

    def apply(self, model, meshes):
        for axis, plan in self.extra_parallel_plan.items():
            mesh = meshes[axis][axis] if meshes[axis] is not None else None
            if mesh is None:
                continue
            for name, parameter in list(model.named_parameters()):
                for pattern, shard in plan.items():
                    if re.fullmatch(pattern.replace(".", r"\.").replace("*", ".*"), name):
                        assert parameter.size(shard.dim) % mesh.size() == 0
                        parts = parameter.detach().chunk(mesh.size(), shard.dim)
                        part = parts[mesh.get_local_rank()].clone()
                        owner, _, last = name.rpartition(".")
                        setattr(model.get_submodule(owner), last, nn.Parameter(part))
                        break
