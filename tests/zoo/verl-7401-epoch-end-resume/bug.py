"""SFT over epochs with a stateful data loader; stopped at the end of an epoch and resumed."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

FOLDER = "state"
EPOCHS = 3


class Net(nn.Module):
    def __init__(self, vocab=32, dim=32):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(vocab, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, vocab),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


class Run:
    def __init__(self):
        self.rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = DDP(Net())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-3)
        gen = torch.Generator().manual_seed(1)
        ids = (
            torch.randint(0, 32, (96, 1), generator=gen)
            + torch.arange(13) * torch.randint(1, 3, (96, 1), generator=gen)
        ) % 32
        data = TensorDataset(ids)
        self.sampler = DistributedSampler(data, num_replicas=world, rank=self.rank, shuffle=True)
        self.loader = StatefulDataLoader(data, batch_size=8, sampler=self.sampler, drop_last=True)
        self.per_epoch = len(self.loader)
        self.step = 0

    def path(self, name):
        return os.path.join(FOLDER, name)

    def save(self):
        torch.save(self.loader.state_dict(), self.path(f"loader_{self.rank}.pt"))
        if self.rank == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
            }
            torch.save(state, self.path("model.pt"))
        dist.barrier()

    def load(self):
        state = torch.load(self.path("model.pt"), weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.loader.load_state_dict(
            torch.load(self.path(f"loader_{self.rank}.pt"), weights_only=False)
        )

    def fit(self, stop=None):
        for epoch in range(self.step // self.per_epoch, EPOCHS):
            self.sampler.set_epoch(epoch)
            for (batch,) in self.loader:
                loss = F.cross_entropy(
                    self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
                )
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.step += 1
                if self.step == stop:
                    self.save()
                    return
        if self.rank == 0:
            print(f"finished after step {self.step} of {EPOCHS * self.per_epoch}", flush=True)


def main():
    dist.init_process_group("gloo")
    os.makedirs(FOLDER, exist_ok=True)
    first = Run()
    first.fit(stop=2 * first.per_epoch)
    resumed = Run()
    resumed.load()
    resumed.fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
