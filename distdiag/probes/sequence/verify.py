"""The active mode ``--verify-sequence``: numbered tokens go through the program's own functions."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distdiag.config.subjects import MOST_ATTENDING, MOST_TOKENS, SequenceConfig
from distdiag.events.base import CallSite, Frame
from distdiag.events.sequences import SequenceUnverified, TokenSpec, TokenTrace
from distdiag.probes.base import Probe
from distdiag.probes.call_sites import frames_of
from distdiag.probes.collectives.used_groups import UsedGroups, ranks_of
from distdiag.probes.guard import guarded
from distdiag.probes.out_of_sight import in_sight
from distdiag.probes.sequence.library_functions import (
    Entry,
    Ready,
    Unavailable,
    config_of,
    library_sequences,
)
from distdiag.probes.sequence.token_passes import Functions, seen_by
from distdiag.record.marks import MARKED
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signal
from distdiag.record.user_code import is_user_file


class _Pair(NamedTuple):
    name: str
    functions: Functions
    config: SequenceConfig
    members: tuple[int, ...] | None
    is_form_sure: bool = True


class Moments(NamedTuple):
    """When to verify, as `Signals` says; `tensors_shared` hears nothing of the tokens."""

    before_backward: Signal[[]]
    sequence_cut: Signal[object, Sequence[Tensor]]
    tensors_shared: Signal[Any, Any, str]


class VerifySequence(Probe):
    """Verifies before the first backward pass, when the ranks' groups and models are all there."""

    name: ClassVar[str] = "verify-sequence"

    def __init__(
        self,
        recorder: Recorder,
        config: SequenceConfig,
        moments: Moments,
        models: Callable[[], Sequence[nn.Module]],
        libraries: Sequence[Entry],
    ) -> None:
        """Verify what the config names, and what is marked by then; else what libraries have.

        `models` returns those that there are.
        """
        super().__init__(recorder)
        self._config = config
        self._moments = moments
        self._models = models
        self._libraries = libraries
        self._mesh: object = None
        self._is_done = False

    def _install(self) -> None:
        self._subscribe(self._moments.before_backward, self._before_backward)
        self._subscribe(self._moments.sequence_cut, self._before_cut)

    @guarded
    def _before_cut(self, mesh: object, _: Sequence[Tensor]) -> None:
        self._mesh = mesh

    def _before_backward(self) -> None:
        if self._is_done or self.is_off or torch.compiler.is_compiling():
            return
        self._is_done = True
        with in_sight(), self.guard:  # these are functions of the program
            device = self._device()
            members = ranks_of(_found_function(self._config.group)) if self._config.group else None
            pairs = list(self._pairs(members))
            found = [] if pairs or MARKED else self._in_libraries()
            pairs += [_pair_of(each, self._config) for each in found if isinstance(each, Ready)]
            unable = [each for each in found if isinstance(each, Unavailable) and each.is_set_up]
            if not pairs and not unable:
                raise ValueError(
                    "no function is named in [sequence], and no split and gather marked"
                )
            for pair in pairs:
                self._verify(pair, device)

    def _verify(self, pair: _Pair, device: torch.device) -> None:
        spec = spec_of(pair.config, _world_size(), pair.config.dim, pair.functions)
        # Nobody is to take the all-to-alls of tokens for those of gradients or parameters.
        with self._moments.tensors_shared.muted():
            trace = trace_of(pair.functions, spec, device, pair.members)
        trace["is_form_sure"] = pair.is_form_sure
        trace["functions"] = definitions(pair.functions, self.recorder.main_script)
        site = CallSite(frames_of(sys._getframe(2), self.recorder.main_script))
        write_trace(self.recorder, pair.name, site, trace)

    def _pairs(self, members: tuple[int, ...] | None) -> Iterator[_Pair]:
        attentions = self._config.attention or ("",) * len(self._config.split)
        for split, gather, attention in zip(
            self._config.split, self._config.gather, attentions, strict=True
        ):
            attends = _resolved(attention) if attention else None
            functions = Functions(_resolved(split), _resolved(gather), attends)
            yield _Pair(f"{split}, {gather}", functions, self._config, members)
        for (role, name), mark in tuple(MARKED.items()):
            other = MARKED.get(("gather", name))
            if role == "split" and other is not None:
                functions = Functions(mark.function, other.function)
                config = msgspec.structs.replace(self._config, dim=mark.dim)
                yield _Pair(label_of(functions), functions, config, members)

    def _in_libraries(self) -> list[Ready | Unavailable]:
        """Return what libraries have, and write down what cannot be verified of it.

        What the program has not set up is worth a word only where nothing else is verified.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return []
        found = list(library_sequences(self._libraries, self._models(), self._mesh))
        is_any = any(isinstance(each, Ready) for each in found)
        for each in found:
            if isinstance(each, Unavailable) and (each.is_set_up or not is_any):
                self.recorder.event(SequenceUnverified, name=each.name, reason=each.reason)
        return found

    def _device(self) -> torch.device:
        for model in self._models():
            for parameter in model.parameters():
                if parameter.device.type != "meta":
                    device: torch.device = parameter.device
                    return device
        return torch.device("cpu")


def _pair_of(ready: Ready, config: SequenceConfig) -> _Pair:
    config = config_of(config, ready)
    return _Pair(ready.entry.name, ready.functions, config, ready.members, ready.is_form_sure)


def spec_of(
    config: SequenceConfig, num_ranks: int, dim: int, functions: Functions | None = None
) -> TokenSpec:
    """Return the numbered tensor that a config asks for.

    Raises:
        ValueError: it has too many tokens, or documents that do not fill a row.

    """
    length = config.length_over(num_ranks)
    shape = [size for size in (config.batch, config.heads, config.hidden) if size]
    if not 0 <= dim <= len(shape):
        raise ValueError(f"a tensor with the dimensions {shape} and the length has no dim {dim}")
    shape.insert(dim, length)
    attends = functions is not None and functions.attention is not None
    most = MOST_ATTENDING if attends else MOST_TOKENS
    if config.batch * length > most:
        raise ValueError(f"at most {most} tokens can be followed, not {config.batch} * {length}")
    if attends and not config.hidden:
        raise ValueError("attention needs values with a hidden dimension")
    if config.documents and sum(config.documents) != length:
        raise ValueError(f"documents of {sum(config.documents)} tokens do not fill {length}")
    return TokenSpec(
        shape=tuple(shape),
        dim=dim,
        batch=config.batch,
        length=length,
        dtype=config.dtype,
        is_causal=config.causal,
        documents=config.documents,
        reduction=config.reduction,
        has_backward=config.backward,
    )


def trace_of(
    functions: Functions,
    spec: TokenSpec,
    device: torch.device,
    members: tuple[int, ...] | None = None,
) -> dict[str, Any]:
    """Run the functions; return all that a `TokenTrace` has but its name, number and site.

    Without `members` they are the ranks of the group that was used, this rank alone if none was.

    Raises:
        ValueError: several groups were used.

    """
    is_group = dist.is_available() and dist.is_initialized()
    used = UsedGroups() if is_group else None
    seen = seen_by(functions, spec, device)
    rank = dist.get_rank() if is_group else 0
    if members is None:
        members = (used.members() if used is not None else ()) or (rank,)
    return {"members": members, "spec": spec, **seen}


def write_trace(recorder: Recorder, name: str, site: CallSite, trace: dict[str, Any]) -> None:
    """Write down what this rank saw, for the report."""
    number = recorder.num_verified[name]
    recorder.num_verified[name] += 1
    recorder.event(TokenTrace, name=name, number=number, site=site, **trace)


def label_of(functions: Functions) -> str:
    """Return the names of split and gather."""
    names = []
    for function in filter(None, functions[:2]):
        name = getattr(function, "__qualname__", type(function).__qualname__)
        names.append(f"{getattr(function, '__module__', '')}:{name}")
    return ", ".join(names)


def definitions(functions: Functions, main_script: str | None) -> tuple[tuple[str, Frame], ...]:
    """Return where the functions are defined, by stage, as far as they are written in Python."""
    found: dict[str, Frame] = {}
    for stage, function in zip(Functions._fields, functions, strict=True):
        code = getattr(inspect.unwrap(function), "__code__", None) if function else None
        if code is not None:
            file = code.co_filename
            is_user = is_user_file(file, main_script)
            found[stage] = Frame(file, code.co_firstlineno, code.co_name, is_user)
    return tuple(found.items())


def _found_function(reference: str) -> object:
    module, _, path = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _resolved(reference: str) -> Callable[..., Any]:
    found = _found_function(reference)
    if not callable(found):
        raise TypeError(f"{reference} is no function")
    return found


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
