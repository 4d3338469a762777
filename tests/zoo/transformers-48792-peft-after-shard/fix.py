"""Fine-tune low-rank adapters of a sharded Llama on each rank's part of a text."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

BATCH = 8
SEQ_LEN = 16
STEPS = 8
LORA_RANK = 4

logger = logging.getLogger("sft")


class LoRALinear(nn.Module):
    """A frozen linear layer with a trainable low-rank update."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.lora_b = nn.Linear(LORA_RANK, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + 2.0 * self.lora_b(self.lora_a(hidden))


def load_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).requires_grad_(False)


def attach_adapter(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRALinear(layer.self_attn.v_proj)


def shard(model: LlamaForCausalLM) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)


def wrap_model(model: nn.Module) -> nn.Module:
    """Wrap the model for data parallelism, unless its sharding takes care of it."""
    if any(isinstance(param, DTensor) for param in model.parameters()):
        return model
    return DistributedDataParallel(model)


def read_batch(rank: int, step: int) -> torch.Tensor:
    """Count upwards from a random token, with a random stride."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    start = torch.randint(64, (BATCH, 1), generator=generator)
    stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (start + stride * torch.arange(SEQ_LEN)) % 64


def save_adapter(model: nn.Module, rank: int) -> None:
    adapter = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            adapter[name] = param.full_tensor() if isinstance(param, DTensor) else param.detach()
    if rank == 0:
        torch.save(adapter, "adapter.pt")


def train(rank: int) -> None:
    set_seed(42)
    model = load_model()
    attach_adapter(model)
    shard(model)
    model = wrap_model(model)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    for step in range(STEPS):
        tokens = read_batch(rank, step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d loss %.4f", step, loss.item())
    save_adapter(model, rank)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    train(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
