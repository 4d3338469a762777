"""Trains a tiny random GPT-2 with the Hugging Face Trainer, with evaluation and checkpoints."""

import os
import tempfile

import torch
from torch.utils.data import Dataset
from training_record import out_parser, write_record
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCAB = 100


class RandomTokens(Dataset):
    """Token sequences drawn once from a seeded generator."""

    def __init__(self, num_samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, VOCAB, (num_samples, 12), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class LossHistory(TrainerCallback):
    """Keeps the losses that the trainer logs."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        names = ("loss", "eval_loss", "grad_norm")
        self.losses += [float(logs[name]) for name in names if name in (logs or {})]


def main() -> None:
    args = out_parser().parse_args()
    torch.manual_seed(23)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2,
            n_embd=32,
            n_head=4,
            n_positions=32,
            vocab_size=VOCAB,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    history = LossHistory()
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=os.environ.get("HF_TRAINER_OUTPUT", folder),
            max_steps=8,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=3,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=23,
        )
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=RandomTokens(37, seed=1),
            eval_dataset=RandomTokens(11, seed=2),
            callbacks=[history],
        )
        trainer.train()
        metrics = trainer.evaluate()
        trainer.save_model()
        trainer.accelerator.wait_for_everyone()
    losses = [*history.losses, metrics["eval_loss"]]
    write_record(args.out, losses, model.state_dict())
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
