"""Orders files by a key-value store: by keys that are waited for, and by a counter."""

import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record


def connect() -> dist.TCPStore:
    """Start a store on rank 0, at a port that is free, and connect the others to it."""
    rank = dist.get_rank()
    port = [0]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, src=0)
    return store if rank == 0 else dist.TCPStore("127.0.0.1", port[0], is_master=False)


def prepare(store: dist.Store) -> None:
    """Write the data, and say where they are."""
    folder = Path(tempfile.mkdtemp())
    torch.save(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)), folder / "data.pt")
    store.set("folder", str(folder))
    torch.save({"lr": 0.05}, folder / "settings.pt")
    store.set("settings", "complete")


def wait_for_count(store: dist.Store, key: str, count: int) -> None:
    while store.add(key, 0) < count:
        time.sleep(0.01)


def train(data: torch.Tensor, lr: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this rank's rows, and return the losses and the weights."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for batch in data.split(4):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(61)
    store = connect()
    if rank == 0:
        prepare(store)
    folder = Path(store.get("folder").decode())
    data = torch.load(folder / "data.pt")
    store.wait(["settings"])
    settings = torch.load(folder / "settings.pt")

    losses, weights = train(data[rank::world_size], settings["lr"])
    torch.save(losses, folder / f"losses-{rank}.pt")
    store.add("written", 1)
    wait_for_count(store, "written", world_size)
    for other in range(world_size):
        print(f"rank {other}: {torch.load(folder / f'losses-{other}.pt')[-1]:.4f}")
    store.add("read", 1)
    if rank == 0:
        wait_for_count(store, "read", world_size)
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
