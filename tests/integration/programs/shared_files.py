"""Lets rank 0 write data and weights in several formats, which all ranks read after a barrier."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from training_record import out_parser, seed_everything, write_record

NUM_SAMPLES = 48


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    return Path(folder[0])


def build(folder: Path) -> None:
    """Write targets as a memory-mapped array, and each sample's inputs as a file."""
    inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(2))
    shape = (NUM_SAMPLES, 1)
    targets = np.lib.format.open_memmap(folder / "targets.npy", "w+", np.float32, shape)
    targets[:] = inputs.sum(1, keepdim=True).numpy()
    targets.flush()
    del targets
    (folder / "inputs").mkdir()
    for index, row in enumerate(inputs):
        torch.save(row.clone(), folder / "inputs" / f"{index}.pt")


class FileDataset(Dataset):
    """Samples whose inputs are files of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.targets = np.load(folder / "targets.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.load(self.folder / "inputs" / f"{index}.pt")
        return inputs, torch.tensor(self.targets[index])


def share_weights(folder: Path, model: nn.Module, step: int) -> None:
    """Give all ranks what rank 0 has saved, in two formats."""
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        save_file(model.state_dict(), folder / f"model-{step}.safetensors")
    dist.barrier()
    model.load_state_dict(torch.load(folder / "model.pt"))
    model.load_state_dict(load_file(folder / f"model-{step}.safetensors"))
    dist.barrier()


def train(folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on the files, and share the weights after each epoch."""
    dataset = FileDataset(folder)
    sampler = DistributedSampler(dataset, shuffle=False)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2):
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        share_weights(folder, model.module, epoch)
    return losses, model.module.state_dict()


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(73)
    folder = share_folder()
    if dist.get_rank() == 0:
        build(folder)
    dist.barrier()
    losses, weights = train(folder)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
