from textwrap import dedent

import pytest

from distdiag.config.selection import Selection
from distdiag.lint.linting import lint_files

HEAD = """
import os
import time

import torch
import torch.distributed as dist
"""


@pytest.fixture
def lint(tmp_path):
    """Return a function that writes files, looks at them and returns the findings of one rule.

    The program is train.py; others are given by name. The imports of most programs come first.
    """

    def run(code, program, **others):
        texts = {"train": HEAD + dedent(program)} | {n: dedent(t) for n, t in others.items()}
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        result = lint_files([tmp_path], Selection(select=(code,)))
        assert result.not_checked == {}
        return [found for found in result.findings if found.code == code]

    return run


@pytest.fixture
def marked(lint):
    """Return a function that says whether exactly the lines marked with ``# here`` are found."""

    def run(code, program, **others):
        expected = [
            number
            for number, line in enumerate((HEAD + dedent(program)).splitlines(), 1)
            if line.endswith("# here")
        ]
        found = [finding.line for finding in lint(code, program, **others)]
        assert found == expected
        return bool(expected)

    return run
