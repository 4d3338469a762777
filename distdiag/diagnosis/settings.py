"""The values that a configuration, a command line or the code sets, with where they stand."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from distdiag.diagnosis.causes import Evidence
from distdiag.diagnosis.documents import Document, short_of
from distdiag.events.errors import UNDECODABLE
from distdiag.lint.modules import Module, all_nodes

Scalar = float | int | str | bool

ROLES: Final = {
    "lr": "lr learning_rate max_lr peak_lr base_lr init_lr initial_lr",
    "warmup": "warmup warmup_steps num_warmup_steps warmup_ratio lr_warmup_steps warmup_iters"
    " lr_warmup_iters warmup_epochs warmup_num_steps lr_warmup_fraction warmup_updates",
    "clip": "max_grad_norm grad_clip gradient_clip_val clip_grad gradient_clipping clip_grad_norm"
    " clip_norm gradient_clip_norm max_norm clip",
    "fp16": "fp16 half use_fp16",
    "bf16": "bf16 use_bf16",
    "precision": "precision mixed_precision dtype torch_dtype amp_dtype param_dtype",
    "batch_size": "batch_size per_device_train_batch_size train_batch_size micro_batch_size"
    " train_micro_batch_size_per_gpu per_gpu_train_batch_size local_batch_size bs",
    "drop_last": "drop_last dataloader_drop_last",
    "group_size": "num_generations group_size rollout_n num_samples_per_prompt"
    " n_samples_per_prompt",
    "vocab": "vocab_size n_vocab padded_vocab_size vocabulary_size num_embeddings",
    "hidden": "hidden_size d_model n_embd embed_dim hidden_dim emb_dim embedding_dim dim",
    "layers": "num_hidden_layers n_layer num_layers n_layers",
    "feed_forward": "intermediate_size ffn_dim d_ff ffn_hidden_size n_inner dim_feedforward",
    "tied": "tie_word_embeddings tie_weights weight_tying tie_embeddings tied_embeddings"
    " share_embeddings",
    "optimizer": "optimizer optim optimizer_type optimizer_name",
    "weight_decay": "weight_decay wd",
    "positions": "max_position_embeddings n_positions block_size max_seq_len",
}
"""Names by which public trainers and model configurations call a value."""
_ROLE_OF: Final = {name: role for role, names in ROLES.items() for name in names.split()}

_VALUE: Final = r"(?P<value>\"[^\"]{0,200}\"|'[^']{0,200}'|[^\s,;#{}\[\]()]{1,200})"
_PAIR: Final = re.compile(
    r"(?<![\w.\-])[\"']?(?P<key>[A-Za-z_][\w.\-]{0,80})[\"']?[ \t]{0,8}[:=][ \t]{0,8}" + _VALUE
)
_FLAG: Final = re.compile(
    r"(?<![\w.\-])--?(?P<key>[A-Za-z_][\w.\-]{0,80})(?:=|[ \t]{1,8}(?!-[A-Za-z-]))" + _VALUE
)
_COMMENT: Final = re.compile(r"^\s*(?:#|//|;)|\s#")
_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NOTHING: Final = ("null", "none", "~", "")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value with a role. `inside` are the names of what holds it, outermost first."""

    role: str
    name: str
    value: Scalar
    evidence: Evidence
    inside: tuple[str, ...] = ()

    @property
    def number(self) -> float | None:
        """The value as a number, None for words."""
        if isinstance(self.value, bool | str):
            return None
        return float(self.value)


class Settings:
    """All settings of a context: those of the configuration go before those of the code."""

    def __init__(
        self, documents: Iterable[Document], modules: Iterable[tuple[Document, Module]]
    ) -> None:
        self.config = [each for document in documents for each in _of_document(document)]
        self.code = [each for document, module in modules for each in of_module(document, module)]

    def of(self, role: str) -> list[Setting]:
        """Return the settings of a role: of the configuration, else of the code."""
        found = [setting for setting in self.config if setting.role == role]
        return found or [setting for setting in self.code if setting.role == role]

    def numbers(self, role: str) -> list[Setting]:
        """Return those that are numbers."""
        return [setting for setting in self.of(role) if setting.number is not None]

    def only_number(self, role: str) -> Setting | None:
        """Return the setting of a role if all that there are say one number."""
        found = self.numbers(role)
        return found[0] if len({setting.value for setting in found}) == 1 else None

    def smallest(self, role: str) -> Setting | None:
        """Return the smallest number of a role."""
        return min(self.numbers(role), key=lambda setting: setting.number or 0.0, default=None)

    def is_on(self, role: str) -> Setting | None:
        """Return a setting that is true."""
        return next((setting for setting in self.of(role) if setting.value is True), None)


def scalar(text: str) -> Scalar | None:
    """Return what a word of a configuration stands for, None for nothing."""
    text = text.strip().strip("\"'").strip()
    lowered = text.lower()
    if lowered in _NOTHING:
        return None
    if lowered in _WORDS:
        return _WORDS[lowered]
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _of_document(document: Document) -> Iterator[Setting]:
    if document.path.suffix == ".json":
        try:
            value = msgspec.json.decode(document.text)
        except UNDECODABLE:
            yield from _of_lines(document)
        else:
            yield from _Flat(document).settings(value)
    elif document.path.suffix == ".py":
        yield from _of_python(document)
    else:
        yield from _of_lines(document)


def _of_python(document: Document) -> Iterator[Setting]:
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from of_module(document, Module(Path(document.path), "", (), tree))


class _Flat:
    """The values of a JSON document, each with the line at which it is found in order."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._lines = list(document.numbered())
        self._used: set[tuple[int, str]] = set()

    def settings(self, value: object) -> Iterator[Setting]:
        stack: list[tuple[tuple[str, ...], object]] = [((), value)]
        while stack:
            inside, value = stack.pop()
            if isinstance(value, dict):
                stack += [((*inside, str(k)), v) for k, v in reversed(value.items())]
            elif isinstance(value, list):
                stack += [(inside, item) for item in reversed(value[:100])]
            elif inside and isinstance(value, str | int | float | bool):
                yield from self._setting(inside, value)

    def _setting(self, inside: tuple[str, ...], value: Scalar) -> Iterator[Setting]:
        name = inside[-1]
        role = _ROLE_OF.get(_normal(name))
        if role is None:
            return
        if isinstance(value, str):
            read = scalar(value)
            if read is None:
                return
            value = read
        evidence = self._evidence(name, value)
        yield Setting(role, name, value, evidence, inside[:-1])

    def _evidence(self, name: str, value: Scalar) -> Evidence:
        """Return the line on which a name and its value stand, each line once if there are more."""
        said = [f'"{name}"', str(value).lower() if isinstance(value, bool) else str(value)]
        fitting = [
            (number, line) for number, line in self._lines if all(part in line for part in said)
        ]
        fresh = [each for each in fitting if (each[0], name) not in self._used]
        for number, line in [*fresh, *fitting][:1]:
            self._used.add((number, name))
            return _evidence(self._document, number, line, value)
        return _evidence(self._document, None, f"{name}: {value}", value)


def _of_lines(document: Document) -> Iterator[Setting]:
    """Read `key: value`, `key = value`, `--key value`, nested by indentation as in YAML."""
    holders: list[tuple[int, str]] = []
    for number, line in document.numbered():
        text = line[: m.start()] if (m := _COMMENT.search(line)) else line
        if not text.strip():
            continue
        indent = len(text) - len(text.lstrip(" -"))
        while holders and holders[-1][0] >= indent:
            holders.pop()
        inside = tuple(name for _, name in holders)
        if match := re.match(r"[\s\-]{0,80}[\"']?([\w.\-]{1,80})[\"']?\s{0,8}:\s{0,8}$", text):
            holders.append((indent, match[1]))
            continue
        if match := re.match(r"\s{0,80}\[([\w.\-]{1,80})\]\s{0,8}$", text):
            holders = [(-1, match[1])]
            continue
        yield from _of_line(document, number, text, inside)


def _of_line(
    document: Document, number: int, text: str, inside: tuple[str, ...]
) -> Iterator[Setting]:
    for match in (*_PAIR.finditer(text), *_FLAG.finditer(text)):
        *outer, name = match["key"].split(".")
        role = _ROLE_OF.get(_normal(name))
        value = scalar(match["value"])
        if role is not None and value is not None:
            evidence = _evidence(document, number, text, value)
            yield Setting(role, name, value, evidence, (*inside, *outer))


def of_module(document: Document, module: Module) -> Iterator[Setting]:
    """Yield what code sets to constants: names, fields, keywords, and defaults of arguments."""
    for node in all_nodes(module.tree):
        for name, expr, holder in _named_values(node):
            role = _ROLE_OF.get(_normal(name))
            value = constant(expr)
            if role is not None and value is not None:
                line = getattr(expr, "lineno", 0)
                shown = (
                    module.lines[line - 1] if 0 < line <= len(module.lines) else f"{name}={value}"
                )
                yield Setting(role, name, value, _evidence(document, line, shown, value), holder)


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr, tuple[str, ...]]]:
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value, ()
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value, ()
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, value, ()
        case ast.Call():
            yield from _of_call(node)
        case _:
            pass


def _of_call(call: ast.Call) -> Iterator[tuple[str, ast.expr, tuple[str, ...]]]:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if function == "add_argument" and call.args:
        flag = constant(call.args[-1])
        for keyword in call.keywords:
            if keyword.arg == "default" and isinstance(flag, str):
                yield flag.lstrip("-"), keyword.value, ("arguments",)
        return
    name = function or (call.func.id if isinstance(call.func, ast.Name) else "")
    for keyword in call.keywords:
        if keyword.arg:
            yield keyword.arg, keyword.value, (name,)


def constant(expr: ast.expr) -> Scalar | None:
    """Return the number, text or truth that an expression is, None for others."""
    match expr:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case _:
            return None


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _evidence(document: Document, line: int | None, text: str, value: Scalar) -> Evidence:
    shown = str(value) if isinstance(value, bool) else value
    return Evidence(
        artifact=document.artifact,
        source=document.name,
        line=line or None,
        quote=short_of(text),
        value=shown,
    )
