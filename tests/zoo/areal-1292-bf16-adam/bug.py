"""Train a policy on advantages, sharded, with the weights of its checkpoint in bfloat16."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB = 128
DIM = 32
TOKENS = 24
BATCH = 8
STEPS = 16
LEARNING_RATE = 1e-5


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.silu(self.up(self.norm(hidden))))


class Policy(nn.Module):
    """A small decoder that looks at one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def rollouts(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of a rank and the advantages of their sequences."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    tokens = torch.randint(VOCAB, (BATCH, TOKENS), generator=generator)
    rewards = (tokens < VOCAB // 4).float().mean(dim=1)
    return tokens, (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def load_policy() -> Policy:
    torch.manual_seed(0)
    policy = Policy().to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, mp_policy=mixed)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)
    return policy


def train(rank: int) -> None:
    policy = load_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        tokens, advantages = rollouts(rank, step)
        logits = policy(tokens[:, :-1]).float()
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses.view(BATCH, -1) * advantages[:, None]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.5f}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank())
    if dist.get_rank() == 0:
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
