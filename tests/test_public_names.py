"""What the package promises to its users by name."""

import distdiag


def test_the_public_names_are_listed_in_order_and_exist():
    assert distdiag.__all__ == sorted(distdiag.__all__)
    assert [name for name in distdiag.__all__ if not hasattr(distdiag, name)] == []
