"""Trains with the Hugging Face Trainer: classification, accumulation, resuming, best weights."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from training_record import out_parser, write_record
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCAB = 60


class Texts(Dataset):
    """Random sentences of several lengths, with a label for each or for each token."""

    def __init__(self, num: int, seed: int, *, classes: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(num):
            length = int(torch.randint(4, 12, (), generator=self.generator))
            tokens = torch.randint(1, VOCAB, (length,), generator=self.generator)
            label = tokens.sum() % classes if classes else tokens
            self.rows.append({"input_ids": tokens, "labels": label})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([row["input_ids"] for row in rows], batch_first=True)
    batch = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    labels = [row["labels"] for row in rows]
    if labels[0].ndim:
        batch["labels"] = pad(labels, batch_first=True, padding_value=-100)
    else:
        batch["labels"] = torch.stack(labels)
    return batch


def classifier() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=3,
        )
    )


def language() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            max_position_embeddings=16,
            tie_word_embeddings=True,
        )
    )


def metrics(prediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def trainer_for(way: str, folder: str, **more) -> Trainer:
    settings = {
        "output_dir": folder,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
        "save_strategy": "no",
    } | more
    set_seed(5)
    is_classifier = way in ("classify", "best", "frozen")
    model = classifier() if is_classifier else language()
    if way == "frozen":
        for parameter in model.bert.embeddings.parameters():
            parameter.requires_grad = False
    return Trainer(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=Texts(46, seed=1, classes=3 * is_classifier),
        eval_dataset=Texts(21, seed=2, classes=3 * is_classifier),
        data_collator=collate,
        compute_metrics=metrics if is_classifier else None,
        callbacks=[EarlyStoppingCallback(2)] if way == "best" else [],
    )


def run(way: str, folder: str) -> Trainer:
    if way in ("classify", "frozen"):
        trainer = trainer_for(
            way, folder, eval_strategy="epoch", warmup_steps=2, label_smoothing_factor=0.1
        )
        trainer.train()
    elif way == "best":
        trainer = trainer_for(
            way,
            folder,
            num_train_epochs=3,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
        )
        trainer.train()
    elif way == "resume":
        trainer = trainer_for(
            way,
            folder,
            max_steps=8,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="cosine",
        )
        trainer.train()
        trainer.accelerator.wait_for_everyone()
        trainer = trainer_for(
            way, folder, max_steps=8, save_strategy="no", lr_scheduler_type="cosine"
        )
        trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-3")))
    elif way == "checkpointing":
        trainer = trainer_for(
            way,
            folder,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=True,
            train_sampling_strategy="group_by_length",
        )
        trainer.train()
    else:
        trainer = trainer_for(
            way,
            folder,
            gradient_accumulation_steps=3,
            eval_strategy="steps",
            eval_steps=2,
            optim="adafactor",
            dataloader_num_workers=1,
        )
        trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.eval_dataset)
    return trainer


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default="classify")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    trainer = run(args.way, folder[0])
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    write_record(args.out, losses, trainer.accelerator.unwrap_model(trainer.model).state_dict())
    trainer.accelerator.wait_for_everyone()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
