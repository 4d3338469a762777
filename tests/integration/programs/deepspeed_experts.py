"""Trains DeepSpeed's layer of experts, whole on all ranks or spread over them, with ZeRO or not."""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, EXPERTS, LENGTH = 32, 16, 4, 16


class Block(nn.Module):
    """A norm and a layer of experts."""

    def __init__(self, args) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.moe = MoE(
            hidden_size=WIDTH,
            expert=expert,
            num_experts=EXPERTS,
            ep_size=args.ep,
            k=args.k,
            capacity_factor=2.0,
            min_capacity=2,
            drop_tokens=args.drop == "drop",
            use_residual=args.residual,
            noisy_gate_policy="Jitter" if args.k == 1 else None,
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        mixed, balance, _ = self.moe(self.norm(hidden))
        return hidden + mixed, balance


class Language(nn.Module):
    """A small decoder without attention: the next token follows from the last one."""

    def __init__(self, args) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(args) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden, balances = self.embedding(tokens), []
        for block in self.blocks:
            hidden, balance = block(hidden)
            balances.append(balance)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss, torch.stack(balances).sum()


def engine_for(args) -> deepspeed.DeepSpeedEngine:
    model = Language(args)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": args.accumulate,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": args.zero, "reduce_scatter": True},
        "bf16": {"enabled": args.bf16},
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def main() -> None:
    parser = out_parser()
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--k", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--drop", choices=("drop", "keep"), default="drop")
    parser.add_argument("--residual", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    deepspeed.init_distributed("gloo", verbose=False)
    seed_everything(61 + dist.get_rank())  # the engine sends round what should be the same
    engine = engine_for(args)
    losses = []
    for _ in range(6 * args.accumulate):
        begin = torch.randint(0, VOCAB, (8, 1))
        text = (begin + torch.arange(LENGTH + 1)) % VOCAB
        loss, balance = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss + 1e-2 * balance)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, engine.module.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
