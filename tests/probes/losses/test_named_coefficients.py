from __future__ import annotations

import argparse
import sys

from torch import nn

from distdiag.probes.losses.probe import named_coefficients


class Proxy:
    """Stands for something that is not there now."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(f"nothing has {name} outside of a request")


args = argparse.Namespace(aux_loss_coef=0.013, lr=0.017)
balance_weight = 0.019
proxy = Proxy()


def test_numbers_that_are_named_coefficients_are_read_and_proxies_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--aux-coef", "0.023", "--balance-coef=0.029"])
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].router_aux_loss_coef = 0.031
    model.config = {"z_loss_coef": 0.037, "dropout": 0.041}
    vars(model[0])["cfg"] = Proxy()
    found = named_coefficients(sys._getframe(), __file__, [model])
    assert {0.013, 0.019, 0.023, 0.029, 0.031, 0.037} <= found
    assert not {0.017, 0.041} & found
