"""Builds caches under locks: whoever comes first builds, all the others read."""

import fcntl
import json
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.file_baton import FileBaton
from training_record import out_parser, seed_everything, write_record


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def load_features(folder: Path) -> torch.Tensor:
    """Take the features from a cache with a lock file beside it."""
    cache = folder / "features.pt"
    with FileLock(f"{cache}.lock"):
        if not cache.exists():
            features = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
            time.sleep(0.1)
            torch.save(features, cache)
        return torch.load(cache)


def load_vocabulary(folder: Path) -> list[str]:
    """Take the vocabulary from a file that is kept in order by a lock on another."""
    path = folder / "vocabulary.json"
    with open(folder / "vocabulary.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            words = json.loads(path.read_text())
        except FileNotFoundError:
            words = sorted({"a", "cat", "mat", "on", "sat", "the"})
            path.write_text(json.dumps(words))
        fcntl.flock(lock, fcntl.LOCK_UN)
    return words


def load_table(folder: Path) -> torch.Tensor:
    """Take a table that is compiled once; the file that cannot be created twice is the lock."""
    table = folder / "table.pt"
    baton = FileBaton(str(folder / "table.lock"))
    if baton.try_acquire():
        try:
            if not table.exists():
                time.sleep(0.1)
                torch.save(torch.arange(8.0), table)
        finally:
            baton.release()
    else:
        baton.wait()
    return torch.load(table)


def train(
    features: torch.Tensor, table: torch.Tensor
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this rank's rows, and return the losses and the weights."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in features.split(4):
        loss = (model(batch * table) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_everything(41)
    folder = share_folder()
    features, words, table = load_features(folder), load_vocabulary(folder), load_table(folder)
    print(f"rank {rank}: {len(features)} rows, {len(words)} words")
    losses, weights = train(features[rank::world_size], table)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
