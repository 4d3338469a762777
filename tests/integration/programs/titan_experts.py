"""Trains torchtitan's experts: its router, expert parallelism, FSDP2 and bias that balances."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from spmd_types import S
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.init import normal_
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed import parallel_dims as dims
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import (
    GroupedExperts,
    MoE,
    RoutedExperts,
    TokenChoiceTopKRouter,
)
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from training_record import out_parser, seed_everything, write_record

VOCAB, WIDTH, EXPERTS, LENGTH, K = 32, 16, 4, 16, 2
LAYOUT = {"w1_EFD": S(1), "w2_EDF": S(2), "w3_EFD": S(1)}
BACKEND = "partial_dtensor"


def experts(score: str) -> MoE:
    """Make a layer of torchtitan's experts, as its models are configured."""
    linear = {"w1": (WIDTH, 32), "w2": (32, WIDTH), "w3": (WIDTH, 32)}
    config = MoE.Config(
        num_experts=EXPERTS,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=WIDTH, hidden_dim=32, num_experts=EXPERTS),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS,
            gate=Linear.Config(in_features=WIDTH, out_features=EXPERTS),
            top_k=K,
            score_func=score,
            route_norm=score == "sigmoid",
        ),
        shared_experts=FeedForward.Config(
            **{
                name: Linear.Config(in_features=given, out_features=made)
                for name, (given, made) in linear.items()
            }
        ),
    )
    set_moe_sharding_config(config, enable_ep=True, enable_sp=False, expert_param_layout=LAYOUT)
    layer = config.build()
    for parameter in layer.parameters():
        normal_(parameter, std=0.2)
    return layer


class Block(nn.Module):
    """A norm, causal attention and experts."""

    moe_enabled = True

    def __init__(self, score: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe = experts(score)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.mix(self.norm1(hidden)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return hidden + self.moe(self.norm2(hidden))


class Decoder(nn.Module):
    """What torchtitan shards has these names."""

    enable_weight_tying = False

    def __init__(self, score: str) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block(score) for number in range(2)})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return self.lm_head(self.norm(hidden))


def parallelise(model: Decoder) -> dims.ParallelDims:
    world = dist.get_world_size()
    parallel = dims.ParallelDims(
        dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=2, world_size=world,
        spmd_backend=BACKEND,
    )  # fmt: skip
    parallel.build_mesh()
    for block in model.layers.values():
        block.moe.parallelize(parallel)
    apply_fsdp_to_decoder(
        model,
        parallel.get_mesh("fsdp"),
        param_dtype=torch.float32,
        reduce_dtype=torch.float32,
        pp_enabled=False,
        ep_degree=2,
        edp_mesh=parallel.get_optional_mesh(["efsdp"]),
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    return parallel


def main() -> None:
    parser = out_parser()
    parser.add_argument("--score", choices=("sigmoid", "softmax"), default="sigmoid")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    set_spmd_backend(BACKEND)
    dims.device_type = "cpu"
    seed_everything(91)
    model = Decoder(args.score)
    parallel = parallelise(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    hooks = SimpleNamespace(register_step_pre_hook=optimizer.register_step_pre_hook)
    register_moe_load_balancing_hook(hooks, [model], parallel)
    seed_everything(400 + dist.get_rank())
    losses = []
    for _ in range(6):
        begin = torch.randint(0, VOCAB, (8, 1))
        text = (begin + torch.arange(LENGTH + 1)) % VOCAB
        logits = model(text[:, :-1])
        # torchtitan adds gradients up, and divides by the tokens of all ranks beforehand.
        sums = nn.functional.cross_entropy(
            logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum"
        )
        loss = sums / (8 * LENGTH * dist.get_world_size())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(dist_functional.all_reduce(loss.detach()).item())
    assert losses[-1] < losses[0]
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
