"""Fine-tunes and resumes: new heads, thawed encoders, averages, best weights, whole states."""

import copy
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_record import out_parser, seed_everything, write_record

CLASSES = 5


class Classifier(nn.Module):
    """An encoder and a head."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16)
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.dropout(self.encoder(inputs)))


def loader(epoch_seed: int = 0, *, train: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(3 + epoch_seed)
    dataset = TensorDataset(
        torch.randn(64, 8, generator=generator),
        torch.randint(0, CLASSES, (64,), generator=generator),
    )
    sampler = DistributedSampler(dataset, shuffle=train, seed=4)
    return DataLoader(dataset, batch_size=8, sampler=sampler, drop_last=train)


def epoch_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader,
    epoch: int,
    losses: list[float],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    if epoch == 0:
        torch.manual_seed(100 + dist.get_rank())  # each rank draws dropout masks of its own
    batches.sampler.set_epoch(epoch)
    model.train()
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    model.eval()
    counts = torch.zeros(2)
    for inputs, labels in loader(9, train=False):
        counts += torch.tensor([(model(inputs).argmax(1) == labels).sum(), len(labels)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def new_head(folder: Path, losses: list[float]) -> nn.Module:
    if dist.get_rank() == 0:
        seed_everything(1)
        torch.save({"state_dict": Classifier(11).state_dict()}, folder / "pretrained.pt")
    dist.barrier()
    state = torch.load(folder / "pretrained.pt", map_location="cpu")["state_dict"]
    state = {k: v for k, v in state.items() if not k.startswith("head.")}
    model = Classifier()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) == {"head.weight", "head.bias"} and not unexpected
    nn.init.normal_(model.head.weight, std=0.01)
    nn.init.zeros_(model.head.bias)
    wrapped = DistributedDataParallel(model)
    groups = [
        {"params": model.encoder.parameters(), "lr": 1e-3},
        {"params": model.head.parameters(), "lr": 1e-2},
    ]
    optimizer = torch.optim.AdamW(groups)
    batches = loader()
    for epoch in range(2):
        epoch_of(wrapped, optimizer, batches, epoch, losses)
    return model


def thawed(folder: Path, losses: list[float]) -> nn.Module:
    """Train the head alone, then the rest as well; the wrapper is made anew, as it must be."""
    model = Classifier()
    model.encoder.requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    batches = loader()
    epoch_of(wrapped, optimizer, batches, 0, losses)
    for parameter in model.encoder.parameters():
        parameter.requires_grad = True
    wrapped = DistributedDataParallel(model)
    optimizer.add_param_group({"params": list(model.encoder.parameters()), "lr": 0.005})
    for epoch in (1, 2):
        epoch_of(wrapped, optimizer, batches, epoch, losses)
    return model


def thawed_in_place(folder: Path, losses: list[float]) -> nn.Module:
    """All train from the start for DDP, but the encoder has a learning rate of 0 at first."""
    model = Classifier()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05)
    batches = loader()
    epoch_of(wrapped, optimizer, batches, 0, losses)
    optimizer.add_param_group({"params": list(model.encoder.parameters()), "lr": 0.005})
    for epoch in (1, 2):
        epoch_of(wrapped, optimizer, batches, epoch, losses)
    return model


def new_head_midway(folder: Path, losses: list[float]) -> nn.Module:
    """Train, give the model a head for another task, wrap again, train on."""
    model = Classifier()
    wrapped = DistributedDataParallel(model)
    epoch_of(wrapped, torch.optim.Adam(wrapped.parameters(), 1e-2), loader(), 0, losses)
    del wrapped
    model.head.reset_parameters()
    wrapped = DistributedDataParallel(model)
    epoch_of(wrapped, torch.optim.Adam(wrapped.parameters(), 1e-2), loader(1), 0, losses)
    model.head = nn.Linear(16, CLASSES)
    wrapped = DistributedDataParallel(model)
    epoch_of(wrapped, torch.optim.Adam(wrapped.parameters(), 1e-2), loader(2), 0, losses)
    return model


def best(folder: Path, losses: list[float]) -> nn.Module:
    """Keep the best weights, and read them back for the test at the end."""
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    batches, best_accuracy = loader(), -1.0
    for epoch in range(3):
        epoch_of(model, optimizer, batches, epoch, losses)
        now = accuracy(model)
        scheduler.step(now)
        if now > best_accuracy:
            best_accuracy = now
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), folder / "best.pt")
    dist.barrier()
    model.module.load_state_dict(torch.load(folder / "best.pt", map_location="cpu"))
    losses.append(accuracy(model))
    return model.module


def averaged(folder: Path, losses: list[float]) -> nn.Module:
    """Keep an average, resume both, and evaluate with the average in the model's place."""
    model = DistributedDataParallel(Classifier())
    average = copy.deepcopy(model.module).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = loader()
    for epoch in range(2):
        epoch_of(model, optimizer, batches, epoch, losses)
        with torch.no_grad():
            for old, new in zip(
                average.state_dict().values(), model.module.state_dict().values(), strict=True
            ):
                old.copy_(old * 0.9 + new * 0.1 if old.is_floating_point() else new)
    if dist.get_rank() == 0:
        both = {"model": model.module.state_dict(), "ema": average.state_dict()}
        torch.save({**both, "optimizer": optimizer.state_dict()}, folder / "last.pt")
    dist.barrier()
    state = torch.load(folder / "last.pt", weights_only=True)
    average.load_state_dict(state["ema"])
    kept = copy.deepcopy(model.module.state_dict())
    model.module.load_state_dict(state["ema"])
    losses.append(accuracy(model))
    model.module.load_state_dict(kept)
    epoch_of(model, optimizer, batches, 2, losses)
    return average


def resumed(folder: Path, losses: list[float]) -> nn.Module:
    """Stop in the middle of an epoch; resume weights, optimizer, schedule and place in the data."""
    for life in range(2):
        seed_everything(20 + life)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=12)
        first = 0
        if life:
            for _ in range(2):  # the first time for the log only
                state = torch.load(folder / "last.pt", map_location="cpu", weights_only=False)
                model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            first = state["step"]
            torch.set_rng_state(state["rng"][dist.get_rank()])
        else:
            torch.manual_seed(100 + dist.get_rank())
        wrapped, batches = DistributedDataParallel(model), loader()
        for step, (inputs, labels) in enumerate(
            batch for e in range(3) for batch in of(batches, e)
        ):
            if not first <= step < (12 if life else 6):
                continue
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        if not life:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            save_all({name: part.state_dict() for name, part in parts.items()}, folder)
    return model


def of(batches: DataLoader, epoch: int) -> DataLoader:
    batches.sampler.set_epoch(epoch)
    return batches


def save_all(state: dict[str, object], folder: Path) -> None:
    """Save on rank 0, with the random states of all."""
    states = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
    dist.all_gather(states, torch.get_rng_state())
    if dist.get_rank() == 0:
        torch.save({**state, "step": 6, "rng": states}, folder / "last.pt")
    dist.barrier()


WAYS = {
    "averaged": averaged,
    "best": best,
    "new-head": new_head,
    "new-head-midway": new_head_midway,
    "resumed": resumed,
    "thawed": thawed,
    "thawed-in-place": thawed_in_place,
}


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", choices=sorted(WAYS), default="new-head")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    seed_everything(10)
    losses: list[float] = []
    model = WAYS[args.way](Path(folder[0]), losses)
    losses.append(accuracy(model))
    write_record(args.out, losses, model.state_dict())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
