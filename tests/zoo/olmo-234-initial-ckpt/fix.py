"""Save the untrained model, prove that the checkpoint can be read, and then train."""

import gc
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CHECKPOINTS = Path("checkpoints")
STEPS = 8
SETTLE_S = 0.2

logger = logging.getLogger("olmo")


class Trainer:
    """Trains a model whose checkpoints have one file of each rank."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def save_sharded_checkpoint(self, step: int) -> Path:
        """Write this rank's share of the parameters."""
        folder = CHECKPOINTS / f"step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(self.model.state_dict())[self.rank :: self.world_size]
        shard = {name: self.model.state_dict()[name] for name in names}
        torch.save(shard, folder / f"rank{self.rank}.pt")
        return folder

    def restore_sharded_checkpoint(self, folder: Path) -> None:
        """Read the shares of all ranks."""
        state: dict[str, torch.Tensor] = {}
        for rank in range(self.world_size):
            state |= torch.load(folder / f"rank{rank}.pt")
        self.model.load_state_dict(state)

    def fit(self) -> float:
        """Train and return the last loss."""
        model = DistributedDataParallel(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(STEPS):
            loss = model(torch.randn(8, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()


def release_memory() -> None:
    """Give back what the copies of the saved tensors took."""
    gc.collect()
    time.sleep(SETTLE_S)


def main() -> None:
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO)

    trainer = Trainer()
    folder = trainer.save_sharded_checkpoint(step=0)
    release_memory()
    dist.barrier()
    trainer.restore_sharded_checkpoint(folder)
    logger.info("rank %d can read the checkpoint of step 0", trainer.rank)
    logger.info("rank %d last loss %.4f", trainer.rank, trainer.fit())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
