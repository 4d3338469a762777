"""Update a sharded actor on rollouts, in micro-batches of bounded token count."""

import logging
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

HIDDEN = 32
MAX_TOKENS_PER_GPU = 512
STEPS = 6

logger = logging.getLogger("actor")


def split_by_tokens(
    batch: dict[str, torch.Tensor], max_tokens: int, dp_group: dist.ProcessGroup | None = None
) -> list[dict[str, torch.Tensor]]:
    """Split a batch so that no micro-batch holds more than `max_tokens` tokens."""
    num_micro_batches = torch.tensor(math.ceil(int(batch["lengths"].sum()) / max_tokens))
    if dp_group is not None:
        dist.all_reduce(num_micro_batches, op=dist.ReduceOp.MAX, group=dp_group)
    indices = torch.arange(len(batch["lengths"])).tensor_split(int(num_micro_batches))
    return [{name: values[index] for name, values in batch.items()} for index in indices]


class Actor:
    """The policy under training."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        torch.manual_seed(0)
        self.module = nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        )
        fully_shard(self.module[0], mesh=mesh)
        fully_shard(self.module[2], mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        """Run one optimizer step over the batch."""
        micro_batches = split_by_tokens(batch, MAX_TOKENS_PER_GPU, self.mesh.get_group())
        total = 0.0
        for micro_batch in micro_batches:
            values = self.module(micro_batch["states"]).squeeze(-1)
            loss = -(nn.functional.logsigmoid(values) * micro_batch["advantages"]).sum()
            loss = loss / len(batch["lengths"])
            loss.backward()
            total += loss.item()
        grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": total, "grad_norm": grad_norm.full_tensor().item()}


def rollout(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Sample responses; as training goes on, some prompts get longer answers."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    base_length = 100 + (60 * rank if step >= 3 else 0)
    return {
        "states": torch.randn(8, HIDDEN, generator=generator),
        "advantages": torch.randn(8, generator=generator),
        "lengths": base_length + torch.arange(8),
    }


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)

    actor = Actor(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    for step in range(STEPS):
        metrics = actor.update(rollout(rank, step))
        logger.info("step %d loss %.4f norm %.4f", step, metrics["loss"], metrics["grad_norm"])

    logger.info("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
