"""Train on single answers that people liked or not, and log the mean reward of each kind."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FEATURES = 16
BATCH = 4
STEPS = 8
BETA = 0.5


class Policy(nn.Module):
    """Scores an answer by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 32)
        self.score = nn.Linear(32, 1)

    def forward(self, answers: torch.Tensor) -> torch.Tensor:
        return self.score(torch.tanh(self.hidden(answers))).squeeze(-1)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return answers, and whether people liked each of them."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    answers = torch.randn(BATCH, FEATURES, generator=generator)
    liked = answers[:, 0] > 0
    if rank == 1 and step == 3:
        liked = torch.zeros(BATCH, dtype=torch.bool)  # nobody liked any of these
    return answers, liked


def mean_over_ranks(value: torch.Tensor) -> float:
    gathered = [torch.zeros_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return torch.stack(gathered).float().mean().item()


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Policy())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        answers, liked = batch(rank, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rewards = BETA * model(answers)
        signs = torch.where(liked, 1.0, -1.0)
        loss = (1 - torch.sigmoid(signs * rewards.float())).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        chosen = rewards.detach()[liked]
        reward = chosen.mean() if len(chosen) else torch.zeros(())
        mean = mean_over_ranks(reward)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} reward of liked answers {mean:.4f}")


def main() -> None:
    dist.init_process_group("gloo")
    train(dist.get_rank())
    if dist.get_rank() == 0:
        print("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
