"""Builds looked-at steps of optimizers, and calls of gradient scalers."""

from distdiag.config.numerics import USUAL
from distdiag.events.updates import OptimizerUpdate, ScalerStep, TensorUpdate
from distdiag.views.updates import UpdateView
from tests.checks.streams import event_of, plain_site


def tensor(name="norm.weight", **values):
    """A parameter in bfloat16 around 1.0, of which a step moves nothing."""
    usual = {
        "dtype": "bfloat16",
        "gradient_dtype": "bfloat16",
        "num_elements": 64,
        "learning_rate": 1e-4,
        "state": (("exp_avg", "bfloat16"), ("exp_avg_sq", "bfloat16")),
        "num_sampled": 64,
        "num_unchanged": 64,
        "num_moved": 0,
        "num_small": 64,
        "expected_changes": 0.8,
        "update": 1e-4,
        "weight": 1.0,
        "spacing": 2**-7,
        "gradient_norm": 0.1,
    }
    return TensorUpdate(name, **{**usual, **values})


def moving(name="head.weight", **values):
    """A parameter in float32 that moves."""
    usual = {
        "dtype": "float32",
        "gradient_dtype": "float32",
        "state": (("exp_avg", "float32"),),
        "num_unchanged": 0,
        "num_moved": 64,
        "num_small": 0,
        "expected_changes": 0.0,
    }
    return tensor(name, **{**usual, **values})


def look(number=0, *tensors, rank=0, **values):
    """One looked-at step of a rank."""
    usual = {
        "optimizer": "AdamW",
        "model": "DDP Net",
        "rate": 1e-4,
        "full_rate": 1e-4,
        "step": number,
        "site": plain_site(10),
        "rounds_to_nearest": True,
    }
    return event_of(
        OptimizerUpdate, rank, number=number, tensors=tensors or (tensor(),), **{**usual, **values}
    )


def looks(*tensors, numbers=(0, 1, 2, 4), **values):
    """The first looks of a rank, at each of which the parameters are as given."""
    return tuple(look(number, *tensors, **values) for number in numbers)


def view(*by_rank):
    """The view of the looks of rank 0, 1, …."""
    return UpdateView(dict(enumerate(by_rank)), USUAL)


def call(rank=0, *, is_skipped=False, number=0, **values):
    """One call of a scaler."""
    usual = {
        "scaler": "GradScaler#1",
        "optimizer": "SGD",
        "num_skipped": int(is_skipped),
        "num_stepped": number,
        "scale": 65536.0,
        "step": number,
        "site": plain_site(12),
    }
    return event_of(ScalerStep, rank, number=number, is_skipped=is_skipped, **{**usual, **values})
