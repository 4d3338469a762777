"""Losses with weights of the user's own, with gradients reduced by a wrapper or by hand."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

WIDTH, CLASSES, STEPS = 8, 4, 6


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def batch() -> tuple[Tensor, Tensor]:
    number = int(torch.randint(3, 9, ()))
    inputs = torch.randn(number, WIDTH)
    return inputs, (inputs[:, :CLASSES]).argmax(1)


def reduce(model: nn.Module, divisor: float) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if divisor != 1:
            parameter.grad.div_(divisor)


def count_of_all(labels: Tensor) -> int:
    count = torch.tensor(len(labels))
    dist.all_reduce(count)
    return int(count)


def by_hand(way: str, losses: list[float]) -> nn.Module:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seed_everything(20 + dist.get_rank())
    for _ in range(STEPS):
        inputs, labels = batch()
        logits = model(inputs)
        total = functional.cross_entropy(logits, labels, reduction="sum")
        if way == "weighed-sum":  # a weight of 2 that has nothing to do with ranks
            loss = 2.0 * total / count_of_all(labels)
        elif way == "scaled-sum":  # the sum over ranks is divided below
            loss = total / count_of_all(labels) * dist.get_world_size()
        elif way == "two-tasks":
            loss = 2 * total / count_of_all(labels) + 0.5 * logits.square().mean()
        else:
            loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        if way == "clipped-first":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reduce(model, dist.get_world_size() if way in ("scaled-sum", "clipped-first") else 1)
        optimizer.step()
        losses.append(loss.item())
    return model


def sharded(way: str, losses: list[float]) -> nn.Module:
    """Sum gradients up over ranks, since the loss is divided by the samples of all of them."""
    model = model_of()
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed_everything(23 + dist.get_rank())
    for _ in range(STEPS):
        inputs, labels = batch()
        total = functional.cross_entropy(model(inputs), labels, reduction="sum")
        loss = 2.0 * total / count_of_all(labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


def wrapped(way: str, losses: list[float]) -> nn.Module:
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seed_everything(21 + dist.get_rank())
    num_passes = 2 if way == "weighed-passes" else 1
    for _ in range(STEPS):
        optimizer.zero_grad()
        for number in range(num_passes):
            inputs, labels = batch()
            model.require_backward_grad_sync = number == num_passes - 1
            logits = model(inputs)
            if way == "weighed-classes":
                weight = torch.tensor([1.0, 2.0, 2.0, 1.0])
                loss = 2.0 * functional.cross_entropy(logits, labels, weight=weight)
            elif way == "two-losses":
                loss = 2.0 * functional.cross_entropy(logits, labels)
                target = torch.softmax(inputs[:, :CLASSES], -1)
                log_probs = logits.log_softmax(-1)
                loss = loss + 2 * functional.kl_div(log_probs, target, reduction="batchmean")
            else:
                loss = 2 * functional.cross_entropy(logits, labels) / num_passes
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return model.module


def adversaries(way: str, losses: list[float]) -> nn.Module:
    """A generator and a critic that is weighed by 2, each reduced by hand."""
    generator, critic = nn.Linear(4, WIDTH), nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    seed_everything(22 + dist.get_rank())
    judge = functional.binary_cross_entropy_with_logits
    for _ in range(STEPS):
        real, fake = torch.randn(4, WIDTH), generator(torch.randn(4, 4))
        loss = 2.0 * (judge(critic(real), torch.ones(4, 1)) / 2)
        loss = loss + judge(critic(fake.detach()), torch.zeros(4, 1))
        of_critic.zero_grad()
        loss.backward()
        reduce(critic, dist.get_world_size())
        of_critic.step()
        fooled = 2 * judge(critic(fake), torch.ones(4, 1), reduction="sum") / 8
        of_generator.zero_grad()
        fooled.backward()
        reduce(generator, 1)
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return generator


WAYS = {
    "adversaries": adversaries,
    "clipped-first": by_hand,
    "scaled-sum": by_hand,
    "summed-means": by_hand,
    "two-losses": wrapped,
    "two-tasks": by_hand,
    "weighed-classes": wrapped,
    "weighed-passes": wrapped,
    "weighed-shards": sharded,
    "weighed-sum": by_hand,
}


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(WAYS), required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    seed_everything(1)
    losses: list[float] = []
    model = WAYS[args.way](args.way, losses)
    write_record(args.out, losses, model.state_dict())
    del model  # its reducer must not outlive the group
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
