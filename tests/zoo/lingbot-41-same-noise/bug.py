"""Train a sharded flow-matching policy that maps an observation to a chunk of actions."""

import argparse
import logging
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

OBSERVATION = 10
ACTION = 4
CHUNK = 6
HIDDEN = 48
EPISODES = 256
EPOCHS = 2

logger = logging.getLogger("policy")


class FlowPolicy(nn.Module):
    """Predict the velocity that carries noise to the actions of a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.observation = nn.Linear(OBSERVATION, HIDDEN)
        self.time = nn.Linear(1, HIDDEN)
        self.action_in = nn.Linear(CHUNK * ACTION, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.action_out = nn.Linear(HIDDEN, CHUNK * ACTION)

    def velocity(
        self, observation: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor
    ) -> torch.Tensor:
        hidden = self.observation(observation) + self.action_in(noisy) + self.time(time)
        for block in self.blocks:
            hidden = hidden + nn.functional.silu(block(hidden))
        return self.action_out(hidden)

    def forward(
        self, observation: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the times at which it was taken."""
        noise = torch.randn_like(actions)
        time = torch.rand(len(actions), 1).pow(1 / 1.5)
        noisy = time * noise + (1 - time) * actions
        predicted = self.velocity(observation, noisy, time)
        return nn.functional.mse_loss(predicted, noise - actions), time


def set_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def read_episodes() -> Dataset:
    generator = torch.Generator().manual_seed(17)
    observations = torch.randn(EPISODES, OBSERVATION, generator=generator)
    mixing = torch.randn(OBSERVATION, CHUNK * ACTION, generator=generator)
    return TensorDataset(observations, torch.tanh(observations @ mixing))


def build_model() -> FlowPolicy:
    model = FlowPolicy()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(seed: int, batch_size: int) -> None:
    set_seed(seed)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    episodes = read_episodes()
    sampler = DistributedSampler(episodes, seed=seed)
    loader = DataLoader(episodes, batch_size=batch_size, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for step, (observation, actions) in enumerate(loader):
            loss, time = model(observation, actions)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

            times = torch.empty(dist.get_world_size() * len(time), 1)
            dist.all_gather_into_tensor(times, time)
            logger.info(
                "epoch %d step %d loss %.4f at %d times", epoch, step, loss, len(times.unique())
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--batch-size", type=int, default=16, help="chunks of a rank in a batch")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    train(args.seed, args.batch_size)
    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
