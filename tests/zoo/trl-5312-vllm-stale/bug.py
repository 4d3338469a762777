"""Train a small policy on its own samples, which an engine generates with a copy of the weights."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 24
DIM = 32
LENGTH = 6
PROMPTS = 4
SAMPLES = 8
STEPS = 20
INNER_STEPS = 2
CLIP = 0.2

logger = logging.getLogger("grpo")

Weights = dict[str, torch.Tensor]


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


class Engine:
    """Generates with weights of its own, which it puts away while the trainer needs the memory."""

    def __init__(self, weights: Weights) -> None:
        self.model = Policy().requires_grad_(False)
        self.parked: Weights = {}
        self.load(weights)

    def load(self, weights: Weights) -> None:
        self.model.load_state_dict(weights)

    def sleep(self) -> None:
        self.parked = {name: each.clone() for name, each in self.model.state_dict().items()}
        for each in self.model.parameters():
            each.data = torch.empty(0)

    def wake_up(self) -> None:
        for name, each in self.model.named_parameters():
            each.data = self.parked[name]

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, and the log-probability of each that was generated."""
        tokens = prompts
        for _ in range(LENGTH):
            chances = self.model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
        return tokens, log_probs(self.model, tokens)


def log_probs(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens[:, :-1]).log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)[:, -LENGTH:]


def advantages_of(tokens: torch.Tensor) -> torch.Tensor:
    """Compare each answer with the others to its prompt: even tokens are preferred."""
    rewards = (tokens[:, -LENGTH:] % 2 == 0).float().mean(1).view(-1, SAMPLES)
    away = rewards - rewards.mean(1, keepdim=True)
    return (away / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def train() -> None:
    torch.manual_seed(0)
    policy = Policy()
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    engine = Engine(policy.state_dict())
    engine.sleep()
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        engine.wake_up()
        prompts = torch.randint(0, VOCAB, (PROMPTS, 2)).repeat_interleave(SAMPLES, 0)
        tokens, old = engine.generate(prompts)
        engine.sleep()
        gain = advantages_of(tokens)
        for _ in range(INNER_STEPS):
            ratio = torch.exp(log_probs(model, tokens) - old)
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * gain, clipped * gain).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        logger.info("step %d loss %.4f", step, loss)


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    train()
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
