"""Reinforcement learning: each rank's own environments, and answers compared in groups."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

ENVIRONMENTS, STEPS, ACTIONS = 4, 8, 3


class ActorCritic(nn.Module):
    """A policy and a value on shared features."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.policy = nn.Linear(16, ACTIONS)
        self.value = nn.Linear(16, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(states)
        return self.policy(features), self.value(features).squeeze(-1)


class Environments:
    """A few walkers that are rewarded for staying near the origin; episodes end at random."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.states = torch.randn(ENVIRONMENTS, 4, generator=self.generator)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        push = (actions[:, None] - 1) * 0.3
        noise = 0.1 * torch.randn(ENVIRONMENTS, 4, generator=self.generator)
        self.states = self.states + push + noise
        done = torch.rand(ENVIRONMENTS, generator=self.generator) < 0.1
        fresh = torch.randn(ENVIRONMENTS, 4, generator=self.generator)
        rewards = -self.states.abs().mean(1)
        self.states = torch.where(done[:, None], fresh, self.states)
        return self.states, rewards, done.float()


@torch.no_grad()
def rollout(model: nn.Module, environments: Environments) -> dict[str, Tensor]:
    kept: dict[str, list[Tensor]] = {
        name: [] for name in ("states", "actions", "chances", "values", "rewards", "dones")
    }
    states = environments.states
    for _ in range(STEPS):
        logits, values = model(states)
        chosen = torch.distributions.Categorical(logits=logits)
        actions = chosen.sample()
        after, rewards, dones = environments.step(actions)
        row = (states, actions, chosen.log_prob(actions), values, rewards, dones)
        for name, value in zip(kept, row, strict=True):
            kept[name].append(value)
        states = after
    _, last = model(states)
    data = {name: torch.stack(values) for name, values in kept.items()}
    advantages, running = torch.zeros_like(data["rewards"]), torch.zeros(ENVIRONMENTS)
    for step in reversed(range(STEPS)):
        following = last if step == STEPS - 1 else data["values"][step + 1]
        alive = 1 - data["dones"][step]
        delta = data["rewards"][step] + 0.99 * following * alive - data["values"][step]
        running = delta + 0.99 * 0.95 * alive * running
        advantages[step] = running
    data["returns"] = advantages + data["values"]
    data["advantages"] = advantages
    return {name: value.flatten(0, 1) for name, value in data.items()}


def normalised(advantages: Tensor) -> Tensor:
    """Normalise over the samples of all ranks."""
    sums = torch.stack(
        [advantages.sum(), advantages.square().sum(), advantages.new_tensor(len(advantages))]
    )
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return (advantages - mean) / ((sums[1] / sums[2] - mean**2).sqrt() + 1e-8)


def ppo(losses: list[float]) -> nn.Module:
    rank = dist.get_rank()
    model = DistributedDataParallel(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    environments = Environments(1000 + rank)
    seed_everything(30 + rank)
    order = torch.Generator().manual_seed(77 + rank)
    for update in range(3):
        optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / 3)
        data = rollout(model.module, environments)
        data["advantages"] = normalised(data["advantages"])
        for _ in range(2):
            for rows in torch.randperm(len(data["states"]), generator=order).split(8):
                logits, values = model(data["states"][rows])
                chosen = torch.distributions.Categorical(logits=logits)
                ratio = (chosen.log_prob(data["actions"][rows]) - data["chances"][rows]).exp()
                gain = data["advantages"][rows]
                surrogate = torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2))
                loss = -surrogate.mean()
                loss = loss + 0.5 * (values - data["returns"][rows]).square().mean()
                loss = loss - 0.01 * chosen.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                losses.append(loss.item())
            distance = (ratio.log().mean().detach() / dist.get_world_size()).abs()
            dist.all_reduce(distance)
            if distance > 0.5:
                break
    return model.module


def grouped(losses: list[float]) -> nn.Module:
    """Sample several answers for each prompt, and weigh them by their reward within the group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = ActorCritic()
    policy.value.requires_grad_(False)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    model = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    seed_everything(30 + rank)
    for step in range(4):
        prompts = torch.randn(world * 2, 4, generator=torch.Generator().manual_seed(step))
        prompts = prompts[rank::world].repeat_interleave(4, dim=0)
        with torch.no_grad():
            old, _ = policy(prompts)
            answers = torch.distributions.Categorical(logits=old).sample()
            rewards = (answers == prompts.argmax(1) % ACTIONS).float()
            groups = rewards.view(-1, 4)
            gain = (
                (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
            ).flatten()
            chances = old.log_softmax(-1).gather(1, answers[:, None]).squeeze(1)
            far, _ = reference(prompts)
            far = far.log_softmax(-1).gather(1, answers[:, None]).squeeze(1)
        for _ in range(2):
            logits, _ = model(prompts)
            new = logits.log_softmax(-1).gather(1, answers[:, None]).squeeze(1)
            ratio = (new - chances).exp()
            apart = (far - new).exp() - (far - new) - 1
            losses_each = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain) + 0.04 * apart
            loss = losses_each.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return policy


def q_learning(losses: list[float]) -> nn.Module:
    """Off-policy: a replay buffer of each rank's own, and a target network."""
    rank = dist.get_rank()
    network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, ACTIONS))
    target = copy.deepcopy(network).requires_grad_(False)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    environments = Environments(1000 + rank)
    seed_everything(30 + rank)
    buffer: list[tuple[Tensor, ...]] = []
    for step in range(24):
        states = environments.states
        with torch.no_grad():
            best = network(states).argmax(1)
        random = torch.rand(ENVIRONMENTS) < 0.3
        actions = torch.where(random, torch.randint(0, ACTIONS, (ENVIRONMENTS,)), best)
        after, rewards, dones = environments.step(actions)
        buffer.append((states, actions, rewards, after, dones))
        if step < 8:
            continue
        rows = [buffer[i] for i in torch.randint(0, len(buffer), (2,)).tolist()]
        states, actions, rewards, after, dones = (
            torch.cat(part) for part in zip(*rows, strict=True)
        )
        goal = rewards + 0.99 * (1 - dones) * target(after).max(1).values
        loss = nn.functional.smooth_l1_loss(model(states).gather(1, actions[:, None])[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 4 == 0:
            target.load_state_dict(network.state_dict())
    return network


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=("grouped", "ppo", "q-learning"), default="ppo")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    losses: list[float] = []
    model = {"grouped": grouped, "ppo": ppo, "q-learning": q_learning}[args.way](losses)
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
