"""ENV002, ENV003 and ENV004: versions, settings and GPUs that differ between ranks."""

import pytest

from distdiag.checks.env.differing_gpus import DifferingGpus
from distdiag.checks.env.differing_settings import DifferingSettings
from distdiag.checks.env.differing_versions import DifferingVersions
from distdiag.events.environment import FactKind
from distdiag.findings.finding import Severity
from distdiag.views.surroundings import SurroundingsView
from tests.checks.verdicts import findings

VERSION, VARIABLE, SETTING = FactKind.VERSION, FactKind.VARIABLE, FactKind.SETTING


def view(kind, name, *values):
    facts = [{(kind, name): value} if value is not None else {} for value in values]
    return SurroundingsView(dict(enumerate(facts)))


def test_another_torch_on_one_rank_of_three_is_reported_with_that_rank():
    (finding,) = findings(DifferingVersions, view(VERSION, "torch", "2.9.1", "2.9.1", "2.8.0"))
    assert finding.severity is Severity.WARNING
    assert tuple(finding.ranks) == (2,)
    assert finding.message == (
        "ranks have different versions: torch is 2.9.1 on ranks 0-1 and 2.8.0 on rank 2"
    )


@pytest.mark.parametrize("values", [("1.0", "2.0"), ("1.0", None)])
def test_a_package_that_not_all_need_is_a_note_at_most(values):
    found = findings(DifferingVersions, view(VERSION, "wandb", *values))
    assert all(each.severity is Severity.INFO for each in found)
    assert len(found) == (None not in values)


def test_a_setting_of_nccl_on_one_node_is_reported():
    (finding,) = findings(DifferingSettings, view(VARIABLE, "NCCL_P2P_DISABLE", "1", None))
    assert finding.severity is Severity.WARNING
    assert "NCCL_P2P_DISABLE is 1 on rank 0 and not set on rank 1" in finding.message
    assert finding.subjects == ("NCCL_P2P_DISABLE",)


def test_arithmetic_that_differs_is_a_note():
    (finding,) = findings(DifferingSettings, view(SETTING, "default dtype", "float32", "float64"))
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize("name", ["RANK", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "HOME"])
def test_what_may_differ_is_not_reported(name):
    assert not findings(DifferingSettings, view(VARIABLE, name, "0", "1"))
    assert not findings(DifferingVersions, view(VARIABLE, name, "0", "1"))


def test_ranks_that_agree_are_not_reported():
    assert not findings(DifferingVersions, view(VERSION, "torch", "2.9.1", "2.9.1"))


def test_models_of_gpu_that_differ_are_a_note():
    (finding,) = findings(DifferingGpus, view(FactKind.DEVICE, "GPU", "H100", "H100", "A100"))
    assert finding.severity is Severity.INFO
    assert (
        finding.message == "ranks have different GPUs: GPU is H100 on ranks 0-1 and A100 on rank 2"
    )
    assert tuple(finding.ranks) == (2,)


@pytest.mark.parametrize("values", [("H100", "H100"), ("H100", None), (None, None)])
def test_equal_gpus_and_ranks_without_one_are_not_reported(values):
    assert not findings(DifferingGpus, view(FactKind.DEVICE, "GPU", *values))
    assert not findings(DifferingGpus, view(FactKind.DEVICE, "host", "a", "b"))
