"""Update a policy on rollouts of images and video, in micro-batches bounded by tokens."""

import logging
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HIDDEN = 32
MAX_TOKENS = 256
STEPS = 6

logger = logging.getLogger("policy")


def collect_rollouts(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Draw this rank's rollouts: video prompts are few and long, image prompts many."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if step < 2:
        num_samples, tokens_per_sample = 4, 96
    elif rank == 0:
        num_samples, tokens_per_sample = 2, 120
    else:
        num_samples, tokens_per_sample = 6, 112
    return {
        "states": torch.randn(num_samples, HIDDEN, generator=generator),
        "advantages": torch.randn(num_samples, generator=generator),
        "tokens": torch.full((num_samples,), tokens_per_sample),
    }


def count_micro_batches(tokens: torch.Tensor) -> int:
    """Agree on the number of micro-batches, so that every rank runs as many backwards."""
    count = torch.tensor(math.ceil(int(tokens.sum()) / MAX_TOKENS))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return int(count)


def split_rollouts(rollouts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut the rollouts into the agreed number of micro-batches."""
    num_micro_batches = count_micro_batches(rollouts["tokens"])
    columns = {name: values.chunk(num_micro_batches) for name, values in rollouts.items()}
    pieces = len(columns["tokens"])
    assert pieces == num_micro_batches, f"{pieces} pieces for {num_micro_batches} micro-batches"
    return [{name: column[i] for name, column in columns.items()} for i in range(pieces)]


def policy_loss(policy: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    log_prob = nn.functional.logsigmoid(policy(batch["states"]).squeeze(-1))
    return -(log_prob * batch["advantages"]).mean()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    policy = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)

    for step in range(STEPS):
        micro_batches = split_rollouts(collect_rollouts(rank, step))
        total = 0.0
        for micro_batch in micro_batches:
            loss = policy_loss(policy, micro_batch) / len(micro_batches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        logger.info("step %d micro-batches %d loss %.4f", step, len(micro_batches), total)

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
