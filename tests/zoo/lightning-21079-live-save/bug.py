"""DDP training; rank 0 writes checkpoints in a background thread."""

import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Remote:
    """A file behind a slow line."""

    def __init__(self, file):
        self.file = file

    def write(self, data):
        time.sleep(0.004)
        return self.file.write(data)

    def flush(self):
        self.file.flush()


class AsyncCheckpointIO:
    def __init__(self):
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.futures = []

    def _write(self, state, path):
        with open(path, "wb") as file:
            torch.save(state, Remote(file))

    def save(self, state, path):
        self.futures.append(self.pool.submit(self._write, state, path))

    def teardown(self):
        self.pool.shutdown(wait=True)
        for f in self.futures:
            f.result()


def main():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10)))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    io = AsyncCheckpointIO()
    gen = torch.Generator().manual_seed(rank)
    for step in range(30):
        x = torch.randn(16, 32, generator=gen)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        time.sleep(0.02)
        if rank == 0 and step % 10 == 9:
            state = {
                "step": step,
                "model": model.module.state_dict(),
                "optimizer": opt.state_dict(),
            }
            io.save(state, f"step{step}.ckpt")
    io.teardown()
    dist.barrier()
    if rank == 0:
        got = torch.load("step9.ckpt", weights_only=True)
        steps = [int(each["step"]) for each in got["optimizer"]["state"].values()]
        print(f"checkpoint of step {got['step']}: the optimizer took {steps} steps", flush=True)


dist.init_process_group("gloo")
main()
dist.destroy_process_group()
