"""Weights that the configuration of a model calls tied, and that are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from distdiag.probes.keepers import Tree
from distdiag.probes.module_names import clean_name

_FLAG = "tie_word_embeddings"


def untied_pairs(tree: Tree) -> dict[tuple[int, str], str]:
    """Return heads that are not the embedding, by module and name, with the embedding's name.

    Only where the configuration is sure to mean them: one embedding and one linear layer of its
    shape below the module that has the flag.
    """
    found: dict[tuple[int, str], str] = {}
    for path, module, _ in tree:
        if getattr(getattr(module, "config", None), _FLAG, None) is not True:
            continue
        if hasattr(module, "get_output_embeddings"):
            found |= _declared(module, path)
            continue
        parts = list(module.named_modules())
        embeddings = [(name, part) for name, part in parts if isinstance(part, nn.Embedding)]
        for name, embedding in embeddings:
            heads = list(_heads(parts, embedding))
            alike = [part for _, part in embeddings if part.weight.shape == embedding.weight.shape]
            if len(heads) == 1 and len(alike) == 1 and heads[0].weight is not embedding.weight:
                full = f"{path}.{name}" if path else name
                found[id(heads[0]), "weight"] = clean_name(f"{full}.weight")
    return found


def _declared(module: Any, path: str) -> dict[tuple[int, str], str]:  # noqa: ANN401
    """Ask a model that knows its embedding and its head."""
    try:
        head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return {}
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return {}  # a wrapper that trains a copy, or none
    if head.weight is embedding.weight or head.weight.shape != embedding.weight.shape:
        return {}
    names = {id(part): name for name, part in module.named_modules()}
    name = names.get(id(embedding))
    if name is None:
        return {}
    full = f"{path}.{name}" if path else name
    return {(id(head), "weight"): clean_name(f"{full}.weight")}


def _heads(parts: list[tuple[str, nn.Module]], embedding: nn.Embedding) -> Iterator[nn.Linear]:
    for _, part in parts:
        if isinstance(part, nn.Linear) and part.weight.shape == embedding.weight.shape:
            yield part
