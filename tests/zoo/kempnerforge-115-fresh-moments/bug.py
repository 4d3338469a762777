"""Pre-train a small model with FSDP2, save with DCP, go on in a fresh trainer."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

FOLDER = "ckpt"


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


class Checkpointer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step):
        state = self.state()
        state["step"] = step
        dcp.save(state, checkpoint_id=FOLDER)

    def load(self):
        state = self.state()
        state["step"] = 0
        dcp.load(state, checkpoint_id=FOLDER)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["step"]


def train(model, optimizer, steps, gen):
    for step in steps:
        x = torch.randn(8, 16, generator=gen)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, loss.item(), flush=True)


def main():
    dist.init_process_group("gloo")
    gen = torch.Generator().manual_seed(dist.get_rank())
    model, optimizer = build()
    train(model, optimizer, range(8), gen)
    Checkpointer(model, optimizer).save(8)
    del model, optimizer
    model, optimizer = build()
    start = Checkpointer(model, optimizer).load()
    train(model, optimizer, range(start, start + 6), gen)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
