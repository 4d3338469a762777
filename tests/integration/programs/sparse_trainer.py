"""Trains a small sparse transformer with the Hugging Face Trainer, its layers recomputed.

Without an auxiliary loss: transformers 5.24 multiplies it by the number of ranks with the rest, and
by that of accumulation steps, which is MOE009.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from training_record import out_parser, write_record
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCAB, LENGTH = 64, 16
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


class Texts(Dataset):
    """Numbers that go up by one, of several lengths."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = LENGTH - index % 5
        tokens = 1 + (index + torch.arange(length)) % (VOCAB - 1)
        return {"input_ids": tokens, "labels": tokens}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    tokens = pad([row["input_ids"] for row in rows], batch_first=True)
    labels = pad([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def qwen3() -> PreTrainedModel:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=16, head_dim=8)
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--model", choices=("mixtral", "qwen3"), default="mixtral")
    parser.add_argument("--recompute", choices=("exact", "reentrant"), default="exact")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    set_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": args.recompute == "reentrant"},
            ddp_find_unused_parameters=False,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=args.model == "qwen3",
            disable_tqdm=True,
            seed=7,
        )
        trainer = Trainer(
            model={"mixtral": mixtral, "qwen3": qwen3}[args.model](),
            args=settings,
            train_dataset=Texts(64),
            eval_dataset=Texts(10),
            data_collator=collate,
        )
        trainer.train()
        losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
        assert losses[-1] < losses[0]
        model = trainer.accelerator.unwrap_model(trainer.model)
        write_record(args.out, losses, model.state_dict())
        trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
