"""Trains with Accelerate: accumulation, gathered metrics, saved state and a trigger to stop."""

import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_record import out_parser, write_record


def build_loader(num_samples: int, *, shuffle: bool) -> DataLoader:
    generator = torch.Generator().manual_seed(num_samples)
    inputs = torch.randn(num_samples, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4, shuffle=shuffle)


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    errors = []
    for inputs, targets in loader:
        with torch.no_grad():
            error = (model(inputs).squeeze(1) - targets).abs()
        # The last batch was padded: this drops what was counted twice.
        errors.append(accelerator.gather_for_metrics(error))
    model.train()
    return torch.cat(errors).mean().item()


def main() -> None:
    args = out_parser().parse_args()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(29)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model,
        optimizer,
        build_loader(45, shuffle=True),
        build_loader(13, shuffle=False),
        scheduler,
    )
    set_seed(29, device_specific=True)  # each rank draws dropout masks of its own
    folder = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    broadcast_object_list(folder)
    losses = []
    for epoch in range(2):
        for inputs, targets in train_loader:
            with accelerator.accumulate(model):
                loss = (model(inputs).squeeze(1) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        losses.append(evaluate(accelerator, model, eval_loader))
        accelerator.print(f"epoch {epoch} error {losses[-1]:.4f}")
        if accelerator.process_index == 1 and losses[-1] < 1e-6:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
        accelerator.save_state(str(Path(folder[0]) / f"epoch-{epoch}"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(Path(folder[0]) / "epoch-1"))
    write_record(args.out, losses, accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
