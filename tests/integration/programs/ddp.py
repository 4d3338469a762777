"""Trains under DDP with unused parameters, gradient accumulation and an evaluation on rank 0."""

import contextlib
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from training_record import out_parser, seed_everything, write_record

ACCUMULATE = 2


class TwoHeads(nn.Module):
    """A backbone with a head that is used for some batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.main_head = nn.Linear(32, 4)
        self.aux_head = nn.Linear(32, 4)

    def forward(self, inputs: Tensor, *, use_aux: bool) -> Tensor:
        features = self.backbone(inputs)
        logits = self.main_head(features)
        return logits + self.aux_head(features) if use_aux else logits


def build_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(260, 16, generator=generator)
    labels = torch.randint(0, 4, (260,), generator=generator)
    dataset = TensorDataset(inputs, labels)
    return DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset, seed=3))


@torch.no_grad()
def evaluate(model: TwoHeads, loader: DataLoader) -> float:
    model.eval()
    correct = sum(int((model(x, use_aux=True).argmax(1) == y).sum()) for x, y in loader)
    model.train()
    return correct / len(loader.dataset)


def train(model: DistributedDataParallel, loader: DataLoader) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for step, (inputs, labels) in enumerate(loader):
            is_last = (step + 1) % ACCUMULATE == 0 or step + 1 == len(loader)
            with contextlib.nullcontext() if is_last else model.no_sync():
                # Ranks use the second head in different steps: find_unused_parameters allows it.
                logits = model(inputs, use_aux=(step + dist.get_rank()) % 3 == 0)
                loss = nn.functional.cross_entropy(logits, labels)
                (loss / ACCUMULATE).backward()
            losses.append(loss.item())
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} accuracy {evaluate(model.module, loader):.3f}")
        dist.barrier()
    return losses


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(7 + dist.get_rank())
    model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    losses = train(model, build_loader())

    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    checkpoint = Path(shared[0]) / "model.pt"
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), checkpoint)
    dist.barrier()
    model.module.load_state_dict(torch.load(checkpoint))
    dist.barrier()
    write_record(args.out, losses, model.module.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
