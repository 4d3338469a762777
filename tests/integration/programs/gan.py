"""Trains two DDP models in turn with two optimizers that step at different rates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

NOISE = 4


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(47)
    generator = DistributedDataParallel(
        nn.Sequential(nn.Linear(NOISE, 16), nn.ReLU(), nn.Linear(16, 2)), broadcast_buffers=False
    )
    critic = DistributedDataParallel(
        nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(), nn.Linear(16, 1)), broadcast_buffers=False
    )
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3)
    score_loss = nn.functional.binary_cross_entropy_with_logits
    seed_everything(70 + dist.get_rank())
    losses = []
    for step in range(9):
        real = torch.randn(8, 2) + 2.0
        fake = generator(torch.randn(8, NOISE)).detach()
        scores = critic(torch.cat([real, fake]))
        labels = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
        critic_loss = score_loss(scores, labels)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        losses.append(critic_loss.item())
        if step % 3 != 2:
            continue
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        generator_loss = score_loss(
            critic.module(generator(torch.randn(8, NOISE))), torch.ones(8, 1)
        )
        generator_optimizer.zero_grad()
        generator_loss.backward()
        generator_optimizer.step()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        losses.append(generator_loss.item())
    weights = {f"generator.{n}": w for n, w in generator.module.state_dict().items()}
    weights |= {f"critic.{n}": w for n, w in critic.module.state_dict().items()}
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
