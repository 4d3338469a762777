"""``distdiag compare`` on runs of which one differs from the other in one thing."""

from pathlib import Path

import pytest

from distdiag.comparison import compare, facts_of
from tests.integration.launch import Launch

PROGRAM = Path(__file__).parent / "compared.py"
CHANGES = {
    "lr": (["--lr=0.2"], {}, ("argument", "--lr")),
    "width": (["--width=16"], {}, ("argument", "--width")),
    "batch": (["--batch=8"], {}, ("argument", "--batch")),
    "seed": (["--seed=3"], {}, ("seed", "torch")),
    "data seed": (["--data_seed=3"], {}, ("argument", "--data_seed")),
    "data": (["--data_seed=3"], {}, ("trace", "data given to DDP Sequential")),
    "optimizer": (["--optimizer=adam"], {}, ("argument", "--optimizer")),
    "frozen": (["--freeze=yes"], {}, ("plan", "DDP Sequential 0.weight")),
    "bias": (["--bias=no"], {}, ("plan", "DDP Sequential 0.bias")),
    "wrapper": (["--wrap=fsdp"], {}, ("argument", "--wrap")),
    "dropout": (["--dropout=0.5"], {}, ("argument", "--dropout")),
    "precision": (["--precision=medium"], {}, ("setting", "float32 matmul precision")),
    "dtype": (["--dtype=float64"], {}, ("setting", "default dtype")),
    "deterministic": (["--deterministic=yes"], {}, ("setting", "deterministic algorithms")),
    "threads": (["--threads=2"], {}, ("setting", "threads")),
    "variable of the script": (["--variable=INFO"], {}, ("variable", "NCCL_DEBUG")),
    "start": (["--seed=3"], {}, ("trace", "weights of DDP Sequential")),
    "gradients": (["--data_seed=3"], {}, ("trace", "gradients of DDP Sequential")),
    "rates": (["--lr=0.2"], {}, ("trace", "learning rate of SGD of DDP Sequential")),
    **{
        name: ([], {name: value}, ("variable", name))
        for name, value in {
            "NCCL_ALGO": "Ring",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SOCKET_IFNAME": "eth0",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "CUDA_LAUNCH_BLOCKING": "1",
            "PYTHONHASHSEED": "7",
            "TOKENIZERS_PARALLELISM": "false",
            "NVIDIA_TF32_OVERRIDE": "0",
            "MY_DATA_FOLDER": "/data/b",
            "MY_API_KEY": "sk-0123456789abcdef",
            "GLOO_SOCKET_IFNAME": "lo",
        }.items()
    },
}
"""Arguments, variables, and what is to be found among the first five differences."""
QUICK = ("seed", "frozen", "NCCL_ALGO", "MY_API_KEY")


def run(folder, args=(), environ=None):
    done = Launch(environ=environ or {}).checked(PROGRAM, args, options=["--run-dir", str(folder)])
    assert done.exit_status == 0, done.describe()
    return facts_of(folder)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """Return the facts of a run with nothing changed."""
    return run(tmp_path_factory.mktemp("usual") / "run")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CHANGES],
)
def test_the_one_thing_that_was_changed_is_among_the_first_five(usual, tmp_path, name):
    args, environ, wanted = CHANGES[name]
    found = compare(usual, run(tmp_path / "run", args, environ))
    first = [(each.kind, each.name) for each in found[:5]]
    assert wanted in first, found
    assert not any("sk-0123456789abcdef" in str(each) for each in found)


@pytest.mark.timeout(200)
def test_nothing_differs_where_nothing_was_changed(usual, tmp_path):
    assert compare(usual, run(tmp_path / "run")) == ()
