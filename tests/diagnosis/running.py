"""Diagnose a context that a test writes down."""

from __future__ import annotations

import json
from pathlib import Path

from distdiag.diagnosis.context import read_context
from distdiag.diagnosis.diagnose import diagnose
from distdiag.diagnosis.result import Diagnosis


def diagnosed(folder: Path, context: dict[str, object]) -> Diagnosis:
    """Write a context into a folder, and return its diagnosis."""
    path = folder / "context.json"
    path.write_text(json.dumps(context))
    return diagnose(read_context(path))


def causes(diagnosis: Diagnosis) -> dict[str, float]:
    """Return the ids of the causes with their confidence."""
    return {cause.id: cause.confidence for cause in diagnosis.root_causes}
