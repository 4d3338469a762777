"""Patterns over names, and what a pattern without a match probably means."""

import pytest

from distdiag.config.placement_rules import closest, generic, matches

NAMES = [f"model.layers.{n}.attn.{part}.weight" for n in (0, 11) for part in ("wq", "wo")]


def test_a_star_crosses_dots_and_case_counts():
    assert matches("model.*.weight", NAMES[0])
    assert matches("*.wq.*", NAMES[0])
    assert not matches("Model.*", NAMES[0])
    assert not matches("layers.*", NAMES[0])


def test_only_whole_numbers_between_dots_are_stars():
    assert generic("a.0.w1.12") == "a.*.w1.*"


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.*.attn.wq.weight",
        "base.model.layers.0.attn.wq.weight",
        "model.layers.*.attn.wq",
        "model.layers.*.atn.wq.weight",
    ],
    ids=["no prefix", "another prefix", "a module", "misspelt"],
)
def test_the_name_that_is_meant(pattern):
    assert closest(pattern, NAMES) == "model.layers.*.attn.wq.weight"


@pytest.mark.parametrize("pattern", ["zzz", "*", "", "experts.gate_up"])
def test_nothing_is_like_it(pattern):
    assert closest(pattern, ["abc"]) == ""
