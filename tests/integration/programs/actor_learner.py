"""Collects experience on rank 0 and learns on rank 1; each side has a loop of its own."""

import torch
import torch.distributed as dist
from torch import nn
from training_record import out_parser, seed_everything, write_record

NUM_ROUNDS, BATCH = 5, 8


class Actor:
    """Plays with the newest policy and sends what happened."""

    def __init__(self, policy: nn.Linear) -> None:
        self.policy = policy

    def run(self) -> list[float]:
        rewards = []
        for _ in range(NUM_ROUNDS):
            states = torch.randn(BATCH, 4)
            with torch.no_grad():
                actions = self.policy(states).argmax(1)
            reward = (actions == states[:, :2].argmax(1)).float()
            dist.broadcast(torch.cat([states, actions[:, None], reward[:, None]], 1), src=0)
            self.update_policy()
            rewards.append(reward.mean().item())
        return rewards

    def update_policy(self) -> None:
        for parameter in self.policy.parameters():
            dist.broadcast(parameter.data, src=1)


class Learner:
    """Improves the policy from each batch and publishes it."""

    def __init__(self, policy: nn.Linear) -> None:
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)

    def run(self) -> list[float]:
        losses = []
        for _ in range(NUM_ROUNDS):
            batch = torch.empty(BATCH, 6)
            dist.broadcast(batch, src=0)
            for _inner in range(3):
                log_probability = self.policy(batch[:, :4]).log_softmax(1)
                taken = log_probability.gather(1, batch[:, 4:5].long())
                loss = -(taken.squeeze(1) * (batch[:, 5] - 0.5)).mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                losses.append(loss.item())
            for value in self.policy.state_dict().values():
                dist.broadcast(value, src=1)
        return losses


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(71)
    policy = nn.Linear(4, 2)
    losses = Actor(policy).run() if dist.get_rank() == 0 else Learner(policy).run()
    write_record(args.out, losses, policy.state_dict())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
