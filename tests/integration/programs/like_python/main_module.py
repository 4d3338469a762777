"""Uses the main module as multiprocessing, pickle, dataclasses and typing do."""

import dataclasses
import inspect
import io
import multiprocessing
import pickle
import sys
import typing


@dataclasses.dataclass
class Sample:
    """A value that travels between processes."""

    number: int
    tags: "typing.ClassVar[tuple[str, ...]]" = ()


def double(sample: Sample) -> Sample:
    return Sample(sample.number * 2)


def run_pool(start_method: str) -> list[Sample]:
    with multiprocessing.get_context(start_method).Pool(2) as pool:
        return pool.map(double, [Sample(1), Sample(2), Sample(3)])


def save_and_load(sample: Sample) -> Sample:
    # Imported late, since every spawned process imports this module.
    import torch

    buffer = io.BytesIO()
    torch.save({"sample": sample}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)["sample"]


def main() -> None:
    print("class", Sample.__module__, pickle.loads(pickle.dumps(Sample(5))))
    print("saved", save_and_load(Sample(6)))
    print("fields", [field.name for field in dataclasses.fields(Sample)])
    print("hints", typing.get_type_hints(Sample), "source", len(inspect.getsource(double)))
    print("main", sys.modules["__main__"].double is double)
    for start_method in ("fork", "spawn", "forkserver"):
        print(start_method, run_pool(start_method))


print("imported as", __name__) if __name__ == "__main__" else None

if __name__ == "__main__":
    main()
