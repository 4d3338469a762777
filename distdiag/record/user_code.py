"""Whether a file is the user's own code, or belongs to Python, torch or a known framework."""

import os
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Final

FRAMEWORKS: Final = frozenset(
    {
        "accelerate",
        "apex",
        "bitsandbytes",
        "colossalai",
        "composer",
        "datasets",
        "deepspeed",
        "diffusers",
        "evaluate",
        "fairscale",
        "flash_attn",
        "horovod",
        "huggingface_hub",
        "ignite",
        "lightning",
        "lightning_fabric",
        "megatron",
        "megatron_core",
        "nemo",
        "optimum",
        "peft",
        "pytorch_lightning",
        "ray",
        "safetensors",
        "sentence_transformers",
        "sglang",
        "timm",
        "torchao",
        "torchaudio",
        "torchdata",
        "torchft",
        "torchmetrics",
        "torchtitan",
        "torchtune",
        "torchvision",
        "transformer_engine",
        "transformers",
        "trl",
        "unsloth",
        "veomni",
        "verl",
        "vllm",
        "xformers",
    }
)
"""Import names of training frameworks: the caller of their functions is the one to look at."""

LIBRARIES: Final = frozenset(
    {
        "_pytest",
        "absl",
        "aiohttp",
        "click",
        "dill",
        "distutils",
        "einops",
        "filelock",
        "fire",
        "fsspec",
        "functorch",
        "h5py",
        "habana_frameworks",
        "httpx",
        "hydra",
        "ignite",
        "intel_extension_for_pytorch",
        "jax",
        "joblib",
        "msgspec",
        "multiprocess",
        "numpy",
        "omegaconf",
        "packaging",
        "pandas",
        "pkg_resources",
        "pluggy",
        "psutil",
        "py_spy",
        "pyarrow",
        "pytest",
        "requests",
        "rich",
        "scipy",
        "setuptools",
        "sklearn",
        "sympy",
        "tensorboard",
        "tokenizers",
        "torch",
        "torch_mlu",
        "torch_musa",
        "torch_npu",
        "torch_xla",
        "torchgen",
        "tqdm",
        "triton",
        "typer",
        "typing_extensions",
        "urllib3",
        "wandb",
        "yaml",
    }
)
"""Import names of torch and of libraries that never are where a distributed fault lies."""

# Code that torch's compiler writes for the user's functions lies in a folder of this name.
_GENERATED: Final = "torchinductor_"

_INSTALLED: Final = ("site-packages", "dist-packages")
_OWN_FOLDER: Final = str(Path(__file__).parents[1]) + os.sep


@lru_cache(maxsize=1)
def _stdlib_folders() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    folders = {folder for path in paths for folder in (path, os.path.realpath(path))}
    return tuple(sorted(folder + os.sep for folder in folders))


def _foreign_package(path: str) -> bool:
    """Whether the file is below an installed package that is not the user's."""
    parts = Path(path).parts
    place = max((n for n, part in enumerate(parts[:-1]) if part in _INSTALLED), default=-1)
    if place < 0:
        return path.startswith(_stdlib_folders())
    package = parts[place + 1].removesuffix(".py")
    return package in FRAMEWORKS or package in LIBRARIES


@lru_cache(maxsize=4096)
def is_user_file(path: str, main_script: str | None) -> bool:
    """Whether frames of this file are the user's own. The main script always is.

    Code that was made at run time (``<string>``, ``<frozen runpy>``) is not.
    """
    if main_script is not None and path == main_script:
        return True
    if not path or path.startswith("<"):
        return False
    absolute = os.path.abspath(path)  # Path.absolute() leaves ".." in
    if main_script is not None and absolute == os.path.abspath(main_script):
        return True
    if absolute.startswith(_OWN_FOLDER) or _GENERATED in absolute:
        return False
    return not _foreign_package(absolute)


def main_script(command: Iterable[str], folder: str) -> str | None:
    """Return the path of the script that a command names, as seen from the folder it ran in."""
    paths = (Path(folder, word) for word in command if word.endswith(".py"))
    return next((os.path.abspath(path) for path in paths if path.is_file()), None)
