"""The thresholds of the checks of numbers."""

import pytest

from distdiag.config.numerics import NumericsConfig, numerics_config_of


def test_a_table_changes_what_it_names():
    assert numerics_config_of({"module_imbalance": 7}) == NumericsConfig(module_imbalance=7.0)


@pytest.mark.parametrize("table", [{"module_imbalance": 0}, {"codebook_use": 2}, {"unknown": 1}, 3])
def test_a_value_that_does_not_fit_names_the_table(table):
    with pytest.raises(ValueError, match="numerics"):
        numerics_config_of(table)
