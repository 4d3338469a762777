import pytest

IMPORTS = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
"""
FOUND = {
    "fully_shard": """
def main(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # here
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
""",
    "FSDP": """
def main(self):
    self.optimizer = torch.optim.SGD(params=self.model.parameters(), lr=1)  # here
    self.model = FSDP(self.model)
""",
    "tensor parallel": """
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])  # here
model = parallelize_module(model, mesh, plan)
""",
}
SILENT = {
    "behind the sharding": """
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
""",
    "made again": """
optimizer = torch.optim.AdamW(model.parameters())
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
""",
    "another model": """
optimizer = torch.optim.AdamW(head.parameters())
fully_shard(model)
""",
    "another branch": """
if sharded:
    fully_shard(model)
else:
    optimizer = torch.optim.AdamW(model.parameters())
if not sharded:
    pass
""",
}


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_an_optimizer_of_old_parameters_is_found(marked, program):
    assert marked("SHD001", IMPORTS + program)


@pytest.mark.parametrize("program", SILENT.values(), ids=SILENT)
def test_correct_programs_are_silent(marked, program):
    assert not marked("SHD001", IMPORTS + program)
