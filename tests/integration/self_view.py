"""Train two steps and write down all that a program sees of itself: self_view.py FOLDER.

Rank N writes FOLDER/N.json: what each place holds, such as "sys.meta_path" or
"hooks.in training.model". What differs from process to process by itself is left out.
"""

import atexit
import faulthandler
import gc
import hashlib
import importlib
import inspect
import json
import logging
import os
import pickle
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel

PUBLIC = (
    *("atexit", "builtins", "gc", "io", "json", "logging", "multiprocessing", "os", "os.path"),
    *("pickle", "random", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "time"),
    *("threading", "torch", "torch.autograd", "torch.distributed", "torch.nn", "torch.optim"),
    *("torch.distributed.distributed_c10d", "torch.distributed.device_mesh", "torch.serialization"),
    *("torch.distributed.fsdp", "torch.nn.functional", "torch.nn.init", "torch.nn.modules.module"),
    *("torch.nn.utils", "torch.optim.lr_scheduler", "torch.optim.optimizer", "torch.utils.data"),
    *("torch.utils.checkpoint", "warnings"),
)
"""Modules whose functions and classes programs call, compare, inspect, pickle."""
CHANGING = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "DISTDIAG_TEST_MARK")

seen: dict[str, object] = {}


def without_addresses(value: object) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", str(value))


def name_of(value: object) -> str:
    named = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', '')}.{named}"


def file_of(function: object) -> str:
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return ""
    return "/".join(Path(code.co_filename).parts[-3:])


def look_of(value: Any) -> dict[str, object]:
    """Return how a function or class looks, and from which file its code is."""
    look: dict[str, object] = {"type": type(value).__qualname__, "file": file_of(value)}
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__"):
        look[name] = without_addresses(getattr(value, name, None))
    look["signature"] = said(lambda: inspect.signature(value))
    look["pickled"] = said(lambda: hashlib.sha256(pickle.dumps(value)).hexdigest())
    return look


def said(action: Callable[[], object]) -> str:
    try:
        return without_addresses(action())
    except Exception as error:  # noqa: BLE001 (the error is the answer)
        return type(error).__name__


def see_public() -> None:
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, type)
    for module in PUBLIC:
        for name, value in list(vars(importlib.import_module(module)).items()):
            if isinstance(value, kinds):
                seen[f"function.{module}.{name}"] = look_of(value)
            if isinstance(value, type) and str(value.__module__).startswith("torch"):
                for inner, method in list(vars(value).items()):
                    if isinstance(method, types.FunctionType):
                        place = f"{value.__module__}.{value.__qualname__}.{inner}"
                        seen[f"function.{place}"] = look_of(method)


def see_python(moment: str) -> None:
    at = f"{moment}."
    seen[f"threads.{at}threading"] = sorted(t.name for t in threading.enumerate())
    seen[f"threads.{at}kernel"] = len(os.listdir("/proc/self/task"))
    seen[f"signals.{at}python"] = {
        str(number): without_addresses(signal.getsignal(number))
        for number in signal.valid_signals()
    }
    status = Path("/proc/self/status").read_text()
    masks = {line.split(":")[0]: line.split()[-1] for line in status.splitlines()}
    seen[f"signals.{at}masks"] = [masks[name] for name in ("SigBlk", "SigIgn", "SigCgt")]
    hooks = (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook)
    seen[f"hooks of Python.{moment}"] = [name_of(each) for each in hooks]
    seen[f"sys.gettrace.{moment}"] = [str(sys.gettrace()), str(sys.getprofile())]
    seen[f"sys.meta_path.{moment}"] = [name_of(each) for each in sys.meta_path]
    seen[f"sys.path.{moment}"] = sys.path
    seen[f"sys.other.{moment}"] = [
        *(sys.argv[:1], sys.getrecursionlimit(), sys.getswitchinterval(), str(sys.flags)),
        *(len(sys.path_hooks), sys.dont_write_bytecode, str(sys.warnoptions), str(sys._xoptions)),
    ]
    seen[f"environment.{moment}"] = stable_environment(os.environ)
    seen[f"warnings.filters.{moment}"] = [without_addresses(each) for each in warnings.filters]
    seen[f"warnings.showwarning.{moment}"] = name_of(warnings.showwarning)
    seen[f"atexit.{moment}"] = atexit._ncallbacks()
    seen[f"logging.{moment}"] = [
        sorted(name for name in logging.root.manager.loggerDict if not name.startswith("torch")),
        [name_of(each) for each in logging.root.handlers],
    ]
    seen[f"gc.{at}callbacks"] = [name_of(each) for each in gc.callbacks]
    seen[f"gc.{at}settings"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug()]
    seen[f"gc.{at}frozen"] = gc.get_freeze_count()
    gc.collect()
    seen[f"gc.{at}objects"] = len(gc.get_objects())
    seen[f"process.{moment}"] = [
        *(
            os.getcwd(),
            os.nice(0),
            faulthandler.is_enabled(),
            resource.getrlimit(resource.RLIMIT_CORE),
        ),
        *(resource.getrlimit(resource.RLIMIT_NOFILE), Path("/proc/self/comm").read_text()),
    ]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    seen[f"process.children.{moment}"] = len(children)
    targets = (
        os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
    )
    seen[f"descriptors.{moment}"] = dict(Counter(re.sub(r"\d+", "N", each) for each in targets))
    maps = Path("/proc/self/maps").read_text()
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/" in line}
    seen[f"mapped files.{moment}"] = sorted(files)
    seen[f"files.{moment}"] = sorted(os.listdir("."))
    seen[f"stack.{moment}"] = [
        file_of(frame.frame.f_code) or frame.filename for frame in inspect.stack()
    ]


def stable_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables without what torchrun chooses anew for each run."""
    return {name: value for name, value in environ.items() if name not in CHANGING}


def see_torch(moment: str) -> None:
    seen[f"torch.settings.{moment}"] = [
        *(torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()),
        *(torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()),
        *(torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        *(torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        torch._C._autograd._profiler_enabled(),
    ]
    seen[f"random.torch.{moment}"] = hashlib.sha256(bytes(torch.get_rng_state())).hexdigest()
    seen[f"random.python.{moment}"] = hashlib.sha256(str(random.getstate()).encode()).hexdigest()
    for name in sorted(vars(modules)):
        if name.startswith("_global_") and isinstance(getattr(modules, name), dict):
            seen[f"hooks.{moment}.{name}"] = len(getattr(modules, name))
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"):
        seen[f"hooks.{moment}.{name}"] = len(getattr(sys.modules["torch.optim.optimizer"], name))
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("BackendSelect")
    seen[f"torch.kernels.{moment}"] = sorted(name for name in registered if "c10d" in name)


def see_objects(moment: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter: Any = next(model.parameters())
    objects = {"optimizer": optimizer, "group": dist.group.WORLD, "parameter": parameter}
    for name, each in [*model.named_modules(prefix="model"), *objects.items()]:
        seen[f"attributes.{moment}.{name}"] = sorted(getattr(each, "__dict__", {}))
        seen[f"attributes.{moment}.{name}.type"] = name_of(type(each))
        hooks = {
            key: len(value)
            for key, value in getattr(each, "__dict__", {}).items()
            if "hook" in key and isinstance(value, dict)
        }
        seen[f"hooks.{moment}.{name}"] = hooks
    told = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    seen[f"hooks.{moment}.parameter.gradient"] = [len(each or ()) for each in told]


def see_all(moment: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    see_python(moment)
    see_torch(moment)
    see_objects(moment, model, optimizer)


class Looking(torch.nn.Module):
    """A part of the model that looks around in the middle of a forward pass."""

    at: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Looking.at is not None:
            look, Looking.at = Looking.at, None
            look()
        return x


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    for x, y in torch.utils.data.DataLoader(data, 8):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def profiled(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> object:
    """Return how often the profiler saw what, but for functions of Python."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, **options) as profiler:
        seen["losses." + " ".join(options)] = train(model, optimizer)
    events = [event.name for event in profiler.events()]
    return dict(sorted(Counter(name for name in events if ".py(" not in name).items()))


def see_compiled() -> None:
    """Count the graphs and breaks of a function that calls what the agent wraps."""

    def step(x: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
        y = torch.nn.functional.softmax(layer(x), -1)
        dist.all_reduce(y)
        return torch.nn.functional.cross_entropy(y, torch.zeros(len(y), dtype=torch.long))

    explained = torch._dynamo.explain(step)(torch.ones(4, 8), torch.nn.Linear(8, 4))
    seen["compiled.graphs"] = [explained.graph_count, explained.graph_break_count]
    seen["compiled.reasons"] = [without_addresses(each.reason) for each in explained.break_reasons]
    seen["compiled.operations"] = [without_addresses(each) for each in explained.ops_per_graph]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    inner = torch.nn.Sequential(
        torch.nn.Linear(8, 8), Looking(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 4)
    )
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters())
    see_all("begin", model, optimizer)
    Looking.at = lambda: see_all("in training", model, optimizer)
    seen["profiler.first steps"] = profiled(model, optimizer)
    seen["profiler.with memory"] = profiled(model, optimizer, profile_memory=True)
    see_compiled()
    see_all("end", model, optimizer)
    see_public()
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seen["environment.child"] = stable_environment(json.loads(child.stdout))
    seen["sys.modules"] = sorted(sys.modules)
    names = vars(sys.modules["__main__"])
    seen["__main__"] = sorted(name for name in names if not name.startswith("__compiled_fn"))
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


main(sys.argv[1])
