"""Trains sparse transformers whose layers are checkpointed, one under DDP and one under FSDP2."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "pad_token_id": 0,
}


def replicated() -> nn.Module:
    config = MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.1)
    model = MixtralForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return DistributedDataParallel(model, find_unused_parameters=False)


def sharded() -> nn.Module:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, head_dim=8)
    model = Qwen3MoeForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _step in range(5):
        for _part in range(2):
            tokens = torch.randint(1, 64, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(61)
    models = [sharded(), replicated()]
    seed_everything(70 + dist.get_rank())
    losses = [loss for model in models for loss in train(model)]
    write_record(args.out, losses, models[0].state_dict())
    models.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
