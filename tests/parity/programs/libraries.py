"""Trains rightly under a library that keeps the loop, or parts of it, to itself."""

import argparse
import os

os.environ.setdefault("LOCAL_RANK", "0")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

WORDS, IGNORED = 12, -100


class Texts(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        draw = torch.Generator().manual_seed(number)
        length = int(torch.randint(3, 9, (), generator=draw))
        return torch.randint(1, WORDS, (length + 1,), generator=draw)


def collate(texts):
    longest = max(map(len, texts)) - 1
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    labels = torch.full((len(texts), longest), IGNORED)
    for row, words in enumerate(texts):
        ids[row, : len(words) - 1], labels[row, : len(words) - 1] = words[:-1], words[1:]
    return {"input_ids": ids, "labels": labels}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(WORDS, 16), nn.Linear(16, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids, labels=None, num_items_in_batch=None, **_):
        logits = self.head(F.gelu(self.up(self.embed(input_ids))))
        if labels is None:
            return logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


def summed(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def share(batch, is_broken):
    """Return what the loss of a rank is multiplied by, whose gradients are averaged."""
    count = (batch["labels"] != IGNORED).sum().float()
    if is_broken:
        return 1 / count
    dist.all_reduce(count)
    return dist.get_world_size() / count


def with_accelerate(is_broken):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    loader = DataLoader(Texts(), 4, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        accelerator.backward(summed(model, batch) * share(batch, is_broken))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(is_broken):
    import tempfile

    from transformers import Trainer, TrainingArguments

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            max_steps=6,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            average_tokens_across_devices=not is_broken,
            remove_unused_columns=False,
        )
        Trainer(Net(), arguments, train_dataset=Texts(), data_collator=collate).train()


def with_lightning(is_broken):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, _):
            return summed(self.net, batch) * share(batch, is_broken)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(Texts(), 4, collate_fn=collate))


def with_deepspeed(is_broken, stage=1):
    import deepspeed

    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05),
        training_data=Texts(),
        collate_fn=collate,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000,
        },
        dist_init_required=False,
    )
    for batch in engine.training_dataloader:
        engine.backward(summed(engine, batch) * share(batch, is_broken))
        engine.step()


LIBRARIES = {
    "accelerate": with_accelerate,
    "trainer": with_trainer,
    "lightning": with_lightning,
    "deepspeed": with_deepspeed,
    "deepspeed0": lambda is_broken: with_deepspeed(is_broken, 0),
    "deepspeed2": lambda is_broken: with_deepspeed(is_broken, 2),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--broken", action="store_true")
    args = parser.parse_args()
    if args.library.startswith("deepspeed"):
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    LIBRARIES[args.library](args.broken)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
