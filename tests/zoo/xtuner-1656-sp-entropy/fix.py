"""Fine-tune a small policy with sequence parallelism; the entropy bonus follows the entropy."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 32
DIM = 32
HEADS = 4
SEQ_LEN = 24
BATCH = 4
STEPS = 6
TARGET_ENTROPY = 3.0

logger = logging.getLogger("policy_gradient")


class Rollouts(Dataset[dict[str, torch.Tensor]]):
    """Sampled rows; only the response behind the prompt is trained."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (SEQ_LEN + 1,), generator=generator)
        prompt = int(torch.randint(4, 11, (), generator=generator))
        mask = (torch.arange(SEQ_LEN) >= prompt).float()
        advantage = torch.randn((), generator=generator).expand(SEQ_LEN)
        return {"ids": ids[:-1], "actions": ids[1:], "mask": mask, "advantages": advantage}


class GatherSequence(torch.autograd.Function):
    """Join the parts of all ranks; the gradients of this rank's part are summed."""

    @staticmethod
    def forward(ctx, tensor):
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()].contiguous()


class Policy(nn.Module):
    """One layer of causal attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Embedding(SEQ_LEN, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.position(places)
        query, key, value = (
            self.qkv(hidden).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).chunk(3, dim=1)
        )
        key, value = GatherSequence.apply(key), GatherSequence.apply(value)
        mask = places[:, None] >= torch.arange(SEQ_LEN)[None]
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(hidden + self.out(mixed.transpose(1, 2).flatten(2)))


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each token's distribution."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def global_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens that count."""
    totals = torch.stack([(values * mask).sum(), mask.sum()])
    dist.all_reduce(totals)
    return totals[0] / totals[1]


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence."""
    return tensor.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    places = shard(torch.arange(SEQ_LEN))
    for step, rollout in enumerate(DataLoader(Rollouts(), batch_size=BATCH)):
        num_tokens = rollout["mask"].sum()
        part = {name: shard(tensor) for name, tensor in rollout.items()}

        logits = policy(part["ids"], places)
        entropies = entropy_of(logits)
        entropy = global_mean(entropies.detach(), part["mask"])
        coefficient = 0.05 * (TARGET_ENTROPY - entropy).sigmoid()

        chosen = logits.log_softmax(-1).gather(-1, part["actions"][..., None]).squeeze(-1)
        gains = chosen * part["advantages"] + coefficient * entropies
        loss = -(gains * part["mask"]).sum() / num_tokens
        optimizer.zero_grad()
        loss.backward()
        for param in policy.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()
        if dist.get_rank() == 0:
            logger.info("step %d entropy %.4f coefficient %.4f", step, entropy, coefficient)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
