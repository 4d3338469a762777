"""Trains low-rank adapters in a frozen GPT-2 with tied embeddings, under DDP and under FSDP2."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB = 60
RANK = 2


class Adapted(nn.Module):
    """A frozen layer and a low-rank update of it."""

    def __init__(self, base: nn.Module, in_features: int, out_features: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(in_features, RANK) / in_features)
        self.lora_b = nn.Parameter(torch.zeros(RANK, out_features))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + hidden @ self.lora_a @ self.lora_b


def build() -> GPT2LMHeadModel:
    seed_everything(13)
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        n_positions=16,
        vocab_size=VOCAB,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.requires_grad_(False)
    for block in model.transformer.h:
        layer = block.attn.c_attn
        block.attn.c_attn = Adapted(layer, *layer.weight.shape)
    return model


def shard(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for name, p in named if name.endswith("lora_a")], "lr": 1e-2},
        {"params": [p for name, p in named if name.endswith("lora_b")], "lr": 4e-2},
    ]
    return torch.optim.AdamW(groups)


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    # Which of the two trains makes no difference to the other: they share the steps only.
    models = [DistributedDataParallel(build()), shard(build())]
    teacher = build()
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)
    optimizers = [optimizer_of(model) for model in models]
    seed_everything(25 + dist.get_rank())
    losses = []
    for step in range(5):
        tokens = torch.randint(0, VOCAB, (3, 10))
        with torch.no_grad():
            targets = teacher(input_ids=tokens).logits.softmax(-1)
        for model in models:
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(0, 1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} losses {losses[-2]:.4f} {losses[-1]:.4f}")
    write_record(args.out, losses, models[1].state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
