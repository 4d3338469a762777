"""Gathers the results of an evaluation with Accelerate, and counts each sample once."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_record import out_parser, write_record

SAMPLES = 26


def build_loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 8, generator=generator)
    numbers = torch.arange(SAMPLES)
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long(), numbers), batch_size=4)


def cut_at_the_end(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Cut what was gathered of all batches to the length of the data set."""
    right = []
    for inputs, targets, _ in loader:
        answers = model(inputs).argmax(1)
        answers, targets = accelerator.gather((answers, targets))
        right.append(answers == targets)
    return torch.cat(right)[: len(loader.dataset)].float().mean().item()


def cut_the_last(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Cut the last batch by the number of samples before it."""
    num_right = samples_seen = 0
    for step, (inputs, targets, _) in enumerate(loader):
        answers, truth = accelerator.gather((model(inputs).argmax(1), targets))
        if step == len(loader) - 1:
            answers = answers[: len(loader.dataset) - samples_seen]
            truth = truth[: len(loader.dataset) - samples_seen]
        else:
            samples_seen += truth.shape[0]
        num_right += int((answers == truth).sum())
    return num_right / len(loader.dataset)


def by_number(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Keep one result for each number of a sample."""
    found: dict[int, bool] = {}
    for inputs, targets, numbers in loader:
        right = model(inputs).argmax(1) == targets
        for number, each in zip(*(t.tolist() for t in accelerator.gather((numbers, right)))):  # noqa: B905
            found[number] = each
    return sum(found.values()) / len(found)


def for_metrics(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Let Accelerate drop what was filled up; a number for each rank is gathered besides."""
    right, sizes = [], []
    for inputs, targets, _ in loader:
        answers = model(inputs).argmax(1)
        right.append(accelerator.gather_for_metrics(answers == targets))
        sizes.append(accelerator.gather(torch.tensor([float(len(inputs))])))
    accelerator.print(f"{torch.cat(sizes).sum():.0f} rows")
    return torch.cat(right).float().mean().item()


def in_training(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Gather rewards of the batches that are trained on, the filled up one included."""
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    spread = torch.zeros(())
    for inputs, targets, _ in loader:
        with torch.no_grad():
            rewards = (model(inputs).argmax(1) == targets).float()
            everyone = accelerator.gather(rewards)
        spread = everyone.std()
        loss = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        accelerator.backward((loss * (rewards - everyone.mean())).mean())
        optimizer.step()
        optimizer.zero_grad()
    return spread.item()


WAYS = (cut_at_the_end, cut_the_last, by_number, for_metrics, in_training)


def main() -> None:
    parser = out_parser()
    parser.add_argument("--way", default=WAYS[0].__name__, choices=[way.__name__ for way in WAYS])
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)
    set_seed(29)
    model, loader = accelerator.prepare(nn.Linear(8, 2), build_loader())
    way = next(way for way in WAYS if way.__name__ == args.way)
    with torch.set_grad_enabled(way is in_training):
        figures = [way(accelerator, model, loader) for _ in range(2)]
    accelerator.print(f"figures {figures}")
    write_record(args.out, figures, accelerator.unwrap_model(model).state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main()
