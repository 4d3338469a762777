"""Names that meet with another prefix, and holes among them."""

from __future__ import annotations

from distdiag.probes.checkpoints.model_loads import NO_RENAMING, holes, renaming

W = (4, 4)


def test_a_prefix_is_taken_away_added_or_changed() -> None:
    names = {"a.weight": W, "b.weight": W}
    more = {f"module.{name}": shape for name, shape in names.items()}
    assert renaming(more, names)[:2] == ("module.", "")
    assert renaming(names, more)[:2] == ("", "module.")
    assert renaming({"x.y.a.weight": W}, {"y.x.a.weight": W})[:2] == ("x.y.", "y.x.")


def test_another_shape_does_not_meet() -> None:
    assert renaming({"module.a": W}, {"a": (2, 4)}) == NO_RENAMING


def test_only_what_lies_between_its_like_is_a_hole() -> None:
    loaded = {f"layers.{number}.w": W for number in (0, 2)}
    assert list(holes({"layers.1.w": W, "layers.3.w": W}, loaded)) == ["layers.1.w"]
    assert not list(holes({"layers.1.w": (2, 2), "head.w": W}, loaded))
