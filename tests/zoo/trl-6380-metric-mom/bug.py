"""Train a policy on groups of sampled completions, and log how far it moves."""

import argparse
import copy

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

VOCAB = 24
EOS = 0
DIM = 32
GROUP = 4
MAX_LENGTH = 24
STEPS = 12
UPDATES = 3
EPSILON = 0.2
BETA = 0.02


class Policy(nn.Module):
    """A recurrent model of the next token that sees the prompt at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mixer(self.embed(tokens))
        return self.head(hidden + self.embed(tokens[:, :1]))


@torch.no_grad()
def sample_group(policy: nn.Module, prompt: int, step: int) -> torch.Tensor:
    """Return completions of one prompt after its token; what follows an end token is padding."""
    generator = torch.Generator().manual_seed(1000 * step + prompt)
    tokens = torch.full((GROUP, 1), prompt)
    for _ in range(MAX_LENGTH):
        probabilities = policy(tokens)[:, -1].softmax(dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)], 1)
    return tokens


def completion_mask(tokens: torch.Tensor) -> torch.Tensor:
    """Mark the tokens of the completions up to their end tokens."""
    ended = (tokens[:, 1:] == EOS).cumsum(dim=1)
    return ((ended - (tokens[:, 1:] == EOS).int()) == 0).float()


def advantages_of(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compare each completion with its group: even prompts want long ones, odd ones short ones."""
    wish = torch.where(tokens[:, 0] % 2 == 0, 1.0, -1.0)
    rewards = (wish * mask.sum(dim=1)).view(-1, GROUP)
    spread = rewards.std(dim=1, keepdim=True) + 1e-4
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / spread).view(-1, 1)


class GroupTrainer:
    """Updates the policy on rollouts and keeps metrics of all ranks."""

    def __init__(self, accelerator: Accelerator, prompts: list[int]) -> None:
        self.accelerator = accelerator
        self.prompts = prompts
        policy = Policy()
        self.reference = copy.deepcopy(policy).requires_grad_(False)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-2)
        self.policy, self.optimizer = accelerator.prepare(policy, optimizer)
        self.metrics: dict[str, float] = {}

    def log_probs(self, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return model(tokens[:, :-1]).log_softmax(dim=-1)

    def log_mean(self, name: str, values: torch.Tensor, mask: torch.Tensor) -> None:
        """Keep the mean over the completion tokens."""
        mean = (values * mask).sum() / mask.sum().clamp(min=1.0)
        self.metrics[name] = self.accelerator.gather(mean).nanmean().item()

    def update(
        self, tokens: torch.Tensor, mask: torch.Tensor, old: torch.Tensor, ref: torch.Tensor
    ) -> None:
        all_log_probs = self.log_probs(self.policy, tokens)
        new = all_log_probs.gather(2, tokens[:, 1:, None]).squeeze(2)
        advantages = advantages_of(tokens, mask)
        ratio = torch.exp(new - old)
        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
        kl = torch.exp(ref - new) - (ref - new) - 1
        token_loss = BETA * kl - torch.min(ratio * advantages, clipped * advantages)
        num_tokens = self.accelerator.reduce(mask.sum(), reduction="sum")
        loss = (token_loss * mask).sum() * self.accelerator.num_processes / num_tokens
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

        self.log_mean("kl", kl.detach(), mask)
        entropy = -(all_log_probs.exp() * all_log_probs).sum(dim=-1)
        self.log_mean("entropy", entropy.detach(), mask)
        self.log_mean("clip_ratio", ((ratio - 1).abs() > EPSILON).float(), mask)

    def train_step(self, step: int) -> None:
        policy = self.accelerator.unwrap_model(self.policy)
        tokens = torch.cat([sample_group(policy, prompt, step) for prompt in self.prompts])
        mask = completion_mask(tokens)
        with torch.no_grad():
            picks = tokens[:, 1:, None]
            old = self.log_probs(policy, tokens).gather(2, picks).squeeze(2)
            ref = self.log_probs(self.reference, tokens).gather(2, picks).squeeze(2)
        for _ in range(UPDATES):
            self.update(tokens, mask, old, ref)
        reported = " ".join(f"{name} {value:.5f}" for name, value in self.metrics.items())
        self.accelerator.print(f"step {step} {reported}")


def train(accelerator: Accelerator, batch_size: int) -> None:
    prompts = range(1, VOCAB)
    first = accelerator.process_index
    mine = list(prompts[first :: accelerator.num_processes][:batch_size])
    trainer = GroupTrainer(accelerator, mine)
    for step in range(STEPS):
        trainer.train_step(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="prompts of one rank in a step")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    train(accelerator, args.batch_size)
    accelerator.print("training finished")
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
