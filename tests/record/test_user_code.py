"""Which frames are the user's own."""

import json
import sysconfig
from pathlib import Path

import pytest

import distdiag.record.user_code
from distdiag.record.user_code import is_user_file

SITE = sysconfig.get_path("purelib")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/project/train.py", True),
        ("train.py", True),
        ("/home/me/torch/train.py", True),
        ("/home/me/accelerate/train.py", True),
        (f"{SITE}/my_company/trainer.py", True),
        (f"{SITE}/torch/distributed/distributed_c10d.py", False),
        (f"{SITE}/accelerate/accelerator.py", False),
        (f"{SITE}/typing_extensions.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core/numeric.py", False),
        (json.__file__, False),
        (distdiag.record.user_code.__file__, False),
        ("<string>", False),
        ("<frozen runpy>", False),
        ("", False),
    ],
)
def test_a_file_is_the_users_unless_python_torch_or_a_framework_owns_it(path, expected):
    assert is_user_file(path, None) is expected


@pytest.mark.parametrize(
    "script",
    [
        f"{SITE}/accelerate/test_utils/scripts/test_script.py",
        str(Path(distdiag.record.user_code.__file__).parents[1] / "demo" / "sick.py"),
        "<stdin>",
    ],
)
def test_the_main_script_is_the_users_wherever_it_lies(script):
    assert is_user_file(script, script)
    assert not is_user_file(script, "/home/me/train.py")


def test_a_relative_main_script_is_recognised_by_its_absolute_path():
    assert is_user_file(str(Path(SITE, "torch/x.py")), str(Path(SITE, "torch", "..", "torch/x.py")))
