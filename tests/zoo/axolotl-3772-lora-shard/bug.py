"""LoRA fine-tuning with accelerate's FSDP2: rank 0 reads the weights, others begin on meta."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class LoRALinear(nn.Module):
    def __init__(self, dim_in, dim_out, rank=4):
        super().__init__()
        self.base_layer = nn.Linear(dim_in, dim_out, bias=False)
        self.base_layer.weight.requires_grad_(False)
        self.lora_A = nn.Linear(dim_in, rank, bias=False)
        self.lora_B = nn.Linear(rank, dim_out, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = LoRALinear(dim, 2 * dim), LoRALinear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, vocab=40, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False).requires_grad_(False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def load_model():
    """Real weights on rank 0, the shape of them on the others."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        return Model()
    with torch.device("meta"):
        return Model()


def prepare(model, optimizer, mesh):
    """What accelerate does: shard, fill from rank 0, and exchange what the optimizer holds."""
    old = {name: p.data_ptr() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1, dtype=p.dtype, device=p.device)
            group["params"][i].data_ptr = p.data_ptr()
    whole = model.state_dict() if dist.get_rank() == 0 else {}
    whole = {k: v.detach().clone() for k, v in whole.items()}
    model = model.to("meta")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    new = dict(model.named_parameters())
    fsdp2_switch_optimizer_parameters(optimizer, {old[name]: new[name] for name in old})
    return model, optimizer


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = load_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = prepare(model, optimizer, mesh)
    gen = torch.Generator().manual_seed(1)
    ids = (
        torch.randint(0, 40, (128, 1), generator=gen)
        + torch.arange(17) * torch.randint(1, 3, (128, 1), generator=gen)
    ) % 40
    data = TensorDataset(ids)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in loader:
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            if rank == 0 and step % 5 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
            step += 1
    for name, p in model.named_parameters():
        if "lora_B" in name:
            rows = (p.detach().full_tensor().abs().sum(1) > 0).sum().item()
            if rank == 0:
                print(f"{name}: {rows} of {p.shape[0]} rows are not zero", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
