"""Train experts that a bias keeps in balance, without an auxiliary loss."""

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

DIM = 16
NUM_EXPERTS = 4
TOP_K = 2
BATCH = 64
STEPS = 6
BIAS_RATE = 1e-3

logger = logging.getLogger("balance")


class MoE(nn.Module):
    """Choose by biased scores, weigh by the plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, DIM) * 0.2)
        self.register_buffer("expert_bias", torch.zeros(NUM_EXPERTS))
        self.register_buffer("tokens_per_expert", torch.zeros(NUM_EXPERTS))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(tokens).sigmoid()
        chosen = (scores + self.expert_bias).topk(TOP_K, -1).indices
        mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
        parts = torch.relu(torch.einsum("td,edf->tef", tokens, self.up))
        return (parts * (scores * mask).unsqueeze(-1)).sum(1), chosen

    @torch.no_grad()
    def count(self, chosen: Tensor) -> None:
        self.tokens_per_expert.add_(torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS))


class Block(nn.Module):
    """A checkpointed layer of experts around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE()

    def forward(self, tokens: Tensor) -> Tensor:
        out, chosen = checkpoint(self.moe, self.norm(tokens), use_reentrant=False)
        self.moe.count(chosen)
        return tokens + out


def update_bias(model: nn.Module) -> None:
    """Raise the bias of experts with few tokens by how far they are from an even share."""
    share = dist.get_world_size() * BATCH * TOP_K / NUM_EXPERTS
    for block in model:
        counts = block.moe.tokens_per_expert
        dist.all_reduce(counts)
        block.moe.expert_bias.add_(BIAS_RATE * (share - counts))
        counts.zero_()


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(30 + dist.get_rank())
    for step in range(STEPS):
        tokens = torch.randn(BATCH, DIM, generator=data)
        loss = (model(tokens) - tokens.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        usage = model[0].moe.tokens_per_expert.sum().item()
        update_bias(model)
        logger.info("step %d loss %.4f assignments %d", step, loss.item(), usage)


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO, format=f"rank {dist.get_rank()} %(message)s")
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
