"""Fine-tune a small Llama with the Trainer and a loss on capped logits."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCAB = 64
NUM_SAMPLES = 160
LOGIT_CAP = 30.0
IGNORE = -100

CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
)


class Samples(Dataset):
    """Counting sequences of different lengths; the labels leave out the prompt."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 33, (1,), generator=generator))
        start, stride = torch.randint(1, 8, (2,), generator=generator)
        tokens = (start + stride * torch.arange(length)) % VOCAB
        labels = tokens.clone()
        labels[: length // 3] = IGNORE
        return {"input_ids": tokens, "labels": labels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        rows = [sample[name] for sample in samples]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    input_ids = pad("input_ids", 0)
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": pad("labels", IGNORE),
    }


class CappedTrainer(Trainer):
    """Keeps the logits within bounds."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = LOGIT_CAP * torch.tanh(outputs.logits / LOGIT_CAP)
        total = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            ignore_index=IGNORE,
            reduction="sum",
        )
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def train(batch_size: int) -> None:
    arguments = TrainingArguments(
        output_dir="output",
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=0.2,
        optim="sgd",
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=True,
        seed=0,
    )
    set_seed(0)
    trainer = CappedTrainer(
        model=LlamaForCausalLM(CONFIG),
        args=arguments,
        train_dataset=Samples(),
        data_collator=collate,
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of a micro-batch")
    args = parser.parse_args()

    train(args.batch_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
