"""Train, stop in the middle of an epoch, resume from the checkpoint (the job is started again)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

CKPT = "state-{}.pt"


class Rows(Dataset):
    def __init__(self, rank, world):
        self.ids = list(range(rank, 96, world))
        self.x = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        row = self.x[self.ids[i]]
        return row, row.sum()


class Trainer:
    def __init__(self, rank, world):
        torch.manual_seed(7)
        self.rank = rank
        self.model = DDP(
            nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
        )
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loader = DataLoader(Rows(rank, world), batch_size=8, shuffle=True)
        torch.manual_seed(100 + rank)

    def save(self, epoch, step):
        torch.save(
            {
                "model": self.model.module.state_dict(),
                "optim": self.optim.state_dict(),
                "rng": torch.get_rng_state(),
                "epoch": epoch,
                "step": step,
            },
            CKPT.format(self.rank),
        )

    def load(self):
        state = torch.load(CKPT.format(self.rank))
        self.model.module.load_state_dict(state["model"])
        self.optim.load_state_dict(state["optim"])
        torch.set_rng_state(state["rng"])
        return state["epoch"], state["step"]

    def run(self, epochs, stop_at=None, resume=False):
        start_epoch, start_step = self.load() if resume else (0, 0)
        for epoch in range(start_epoch, epochs):
            for step, (x, y) in enumerate(self.loader):
                if epoch == start_epoch and step < start_step:
                    continue
                loss = (self.model(x).squeeze(1) - y).square().mean()
                self.optim.zero_grad()
                loss.backward()
                self.optim.step()
                if (epoch, step + 1) == stop_at:
                    self.save(epoch, step + 1)
                    return
            if self.rank == 0:
                print("epoch", epoch, "loss", loss.item(), flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    Trainer(rank, world).run(2, stop_at=(1, 3))
    Trainer(rank, world).run(2, resume=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
