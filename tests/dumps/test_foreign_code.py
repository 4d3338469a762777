"""User code is told from libraries by paths of other machines."""

import pytest

from distdiag.dumps.reading import is_foreign_user_file


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/train.py",
        "train.py",
        "src/model.py",
        "/opt/conda/lib/python3.10/site-packages/mine.py",
    ],
)
def test_user_code(path):
    assert is_foreign_user_file(path)


@pytest.mark.parametrize(
    "path",
    [
        "/opt/conda/lib/python3.10/threading.py",
        "/usr/lib64/python3.13t/multiprocessing/connection.py",
        "/usr/lib/python3/dist-packages/torch/optim/adam.py",
        "/opt/conda/lib/python3.10/site-packages/torch/distributed/distributed_c10d.py",
        "torch/distributed/distributed_c10d.py",
        "threading.py",
        "<string>",
        "<frozen runpy>",
        "",
    ],
)
def test_library_code(path):
    assert not is_foreign_user_file(path)
