"""Downloads, prepares and saves under the guards of accelerate."""

import shutil
import tempfile
import time
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record

state = PartialState(cpu=True)


def share_folder() -> Path:
    folder = [tempfile.mkdtemp() if state.is_main_process else None]
    broadcast_object_list(folder)
    return Path(folder[0])


def download(folder: Path) -> torch.Tensor:
    """Fetch the data unless they are there, one node after the other and one rank first."""
    path = folder / "data.pt"
    with state.main_process_first():
        if not path.exists():
            time.sleep(0.1)
            torch.save(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)), path)
        return torch.load(path)


def tokenize(folder: Path, data: torch.Tensor) -> torch.Tensor:
    path = folder / "mapped.pt"
    with state.local_main_process_first():
        if not path.exists():
            torch.save(data.tanh(), path)
        mapped = torch.load(path)
    return mapped


@state.on_main_process
def save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, folder / "model.pt")


def train(data: torch.Tensor) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this rank's rows, and return the losses and the weights."""
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
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
    seed_everything(47)
    folder = share_folder()
    data = tokenize(folder, download(folder))
    losses, weights = train(data[state.process_index :: state.num_processes])
    save(folder, weights)
    state.wait_for_everyone()
    weights = torch.load(folder / "model.pt")
    state.wait_for_everyone()
    if state.is_main_process:
        shutil.rmtree(folder)
    write_record(args.out, losses, weights)
    state.destroy_process_group()


if __name__ == "__main__":
    main()
