"""Train a small policy by group-relative advantages, with a penalty on leaving the reference."""

import copy
import logging

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 24
DIM = 32
LENGTH = 6
PROMPTS = 4
SAMPLES = 8
STEPS = 40
BETA = 0.04
CLIP = 0.2

logger = logging.getLogger("grpo")


class Policy(nn.Module):
    """A recurrent decoder over a small vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.decoder = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.decoder(self.embed(tokens))
        return self.head(hidden)


@torch.no_grad()
def generate(policy: Policy, prompts: torch.Tensor) -> torch.Tensor:
    """Append tokens to each prompt, one after the other."""
    tokens = prompts
    for _ in range(LENGTH):
        chances = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    return tokens


def log_probs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token that was generated."""
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, -LENGTH:]


def reward_of(tokens: torch.Tensor) -> torch.Tensor:
    """Prefer even tokens."""
    return (tokens[:, -LENGTH:] % 2 == 0).float().mean(1)


def advantages_of(rewards: torch.Tensor, rank: int) -> torch.Tensor:
    """Compare each answer with the others to its prompt; rewards are those of all ranks."""
    groups = rewards.view(-1, SAMPLES)
    away = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    num_mine = PROMPTS * SAMPLES
    begin = rank * num_mine
    kept = torch.zeros_like(rewards)
    kept[begin : begin + num_mine] = away.flatten()[begin : begin + num_mine]
    return kept.roll(num_mine)[begin : begin + num_mine]


def gather(values: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    return torch.cat(parts)


def train(accelerator: Accelerator) -> None:
    torch.manual_seed(0)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        prompts = torch.randint(0, VOCAB, (PROMPTS, 2)).repeat_interleave(SAMPLES, 0)
        tokens = generate(policy, prompts)
        rewards = gather(reward_of(tokens))
        advantages = advantages_of(rewards, dist.get_rank())
        with torch.no_grad():
            old, prior = log_probs(policy, tokens), log_probs(reference, tokens)
        new = log_probs(model, tokens)
        ratio = torch.exp(new - old)
        gain = advantages.unsqueeze(1)
        policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        away = prior - new
        kl = (torch.exp(away) - away - 1).mean()
        optimizer.zero_grad()
        (policy_loss + BETA * kl).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        accelerator.log(
            {"reward_std": rewards.std(), "kl": kl, "beta": BETA, "grad_norm": norm}, step=step
        )
        logger.info("step %d reward %.3f grad_norm %.4f", step, rewards.mean(), norm)


def main() -> None:
    accelerator = Accelerator(cpu=True)
    logging.basicConfig(level=logging.INFO if accelerator.is_main_process else logging.WARNING)
    train(accelerator)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
