"""Fine-tunes a tiny BERT for two classes: layer by layer, and with a new head after some steps."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_record import out_parser, seed_everything, write_record
from transformers import BertConfig, BertForSequenceClassification

VOCAB = 40


def build() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            num_labels=2,
        )
    )


def main() -> None:
    args = out_parser().parse_args()
    dist.init_process_group("gloo")
    seed_everything(63)
    classifier = build()
    classifier.bert.requires_grad_(False)
    model = DistributedDataParallel(classifier)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(6):
        if step == 1:
            # The upper layer thaws. DDP must be told of it: it knows what was trained before.
            classifier.bert.encoder.layer[1].requires_grad_(True)
            model = DistributedDataParallel(classifier, find_unused_parameters=True)
            layer = list(classifier.bert.encoder.layer[1].parameters())
            optimizer.add_param_group({"params": layer, "lr": 1e-4})
        if step == 2:
            # Another task: a fresh head, and the same optimizer goes on with it.
            seed_everything(64)
            classifier.classifier = nn.Linear(16, 2)
            model = DistributedDataParallel(classifier, find_unused_parameters=True)
            optimizer.param_groups[0]["params"] = list(classifier.classifier.parameters())
        seed_everything(65 + 10 * step + dist.get_rank())
        tokens = torch.randint(0, VOCAB, (4, 8))
        loss = model(input_ids=tokens, labels=tokens[:, 0] % 2).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[-1]:.4f}")
    write_record(args.out, losses, classifier.state_dict())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
