"""Regression with accelerate; the learning rate falls when the validation loss stops to."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def make_data(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=gen)
    w = torch.randn(16, 2, generator=torch.Generator().manual_seed(99))
    return TensorDataset(x, torch.sin(x @ w) + 0.3 * torch.randn(n, 2, generator=gen))


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    train = DataLoader(make_data(192, 1), batch_size=8, shuffle=True)
    held = DataLoader(make_data(64, 2), batch_size=8)
    model, optimizer, train, held, scheduler = accelerator.prepare(
        model, optimizer, train, held, scheduler
    )
    for epoch in range(12):
        model.train()
        for x, y in train:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        model.eval()
        losses = []
        with torch.no_grad():
            for x, y in held:
                losses.append(
                    accelerator.gather_for_metrics(
                        F.mse_loss(model(x), y, reduction="none").mean(-1)
                    )
                )
        value = torch.cat(losses).mean().item()
        scheduler.step(value)
        if accelerator.is_main_process:
            print(
                f"epoch {epoch} held-out {value:.4f} lr {optimizer.param_groups[0]['lr']:.6f}",
                flush=True,
            )
    accelerator.end_training()


if __name__ == "__main__":
    main()
