"""Resume from the newest checkpoint if there is one, and train on."""

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger("resume")


class CheckpointManager:
    """Keeps the train state in a folder on shared storage."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "train_state.pt"

    def save(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True)
        torch.save(state, self.path)

    def load(self) -> dict[str, Any]:
        """Return the state that the first rank has read, or an empty one."""
        state = [{}]
        if dist.get_rank() == 0 and self.path.exists():
            state = [torch.load(self.path)]
        dist.broadcast_object_list(state, src=0)
        return state[0]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO)

    # The attribute cache of the second client does not know the new file yet.
    manager = CheckpointManager(Path("shared" if rank == 0 else "stale"))
    if rank == 0:
        manager.save({"step": 4, "lr": 0.05})
    dist.barrier()

    state = manager.load()
    first_step = state.get("step", 0)
    logger.info("rank %d starts at step %d", rank, first_step)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=state.get("lr", 0.1))
    for _ in range(first_step, 12):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    logger.info("rank %d last loss %.4f", rank, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
