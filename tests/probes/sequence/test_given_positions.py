"""Which arguments of modules are taken for the positions of a rank's tokens."""

import torch

from distdiag.probes.data.forward_arguments import Arguments
from distdiag.probes.sequence.probe import PARTED, doubt_of, positions_in

LENGTH = 6
IDS = torch.arange(LENGTH).expand(2, -1)
TABLE = torch.randn(1, LENGTH, 8)


def plain(hidden): ...


def moving(hidden, sp_rank): ...


def found(*passes):
    given = [Arguments(function.__code__, (), named) for function, named in passes]
    return [id(tensor) for tensor in positions_in(given, LENGTH)]


def test_whole_numbers_and_tables_of_angles_are_positions():
    assert found((plain, {"hidden": TABLE, "position_ids": IDS})) == [id(IDS)]
    assert found((plain, {"position_embeddings": (TABLE, TABLE)})) == [id(TABLE)] * 2
    assert found((plain, {"freqs": TABLE, "mask": IDS})) == [id(TABLE)]


def test_what_the_innermost_module_was_given_counts():
    assert found((plain, {"cos": TABLE}), (plain, {"position_ids": IDS})) == [id(TABLE)]


def test_what_is_for_another_number_of_tokens_is_not():
    assert found((plain, {"position_ids": torch.arange(2 * LENGTH)})) == []
    assert found((plain, {"cos": torch.randn(2 * LENGTH, 8)})) == []
    assert found((plain, {"cos": torch.randn(LENGTH, 2 * LENGTH, 8)})) == []


def test_biases_and_masks_are_no_positions():
    assert found((plain, {"position_bias": TABLE, "position_mask": IDS})) == []
    assert found((plain, {"position_weights": torch.randn(1, LENGTH, LENGTH)})) == []


def test_whole_numbers_that_a_module_may_move_on_by_its_rank_say_nothing():
    assert found((moving, {"position_ids": IDS})) == []
    assert found((plain, {}), (moving, {}), (plain, {"position_ids": IDS})) == []
    assert found((moving, {"cos": TABLE})) == [id(TABLE)]


def rope(hidden, offset): ...


def shifted(hidden, offset): ...


def test_functions_that_place_tokens_by_more_than_they_are_given_make_it_doubtful():
    def doubt(*called):
        return doubt_of([Arguments(plain.__code__, (), {}, tuple(f.__code__ for f in called))])

    assert doubt(rope) == "rope may move positions on by the rank"
    assert doubt(plain, shifted) == ""


def test_bounds_of_documents_make_it_doubtful():
    assert doubt_of([Arguments(plain.__code__, (), {"cu_seqlens": IDS})]) == PARTED
    assert doubt_of([Arguments(plain.__code__, (), {"cu_seqlens": None, "cos": IDS})]) == ""
