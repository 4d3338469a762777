"""What is read of masks, scores and lengths that attention is given."""

import sys
import types

import pytest
import torch

from distdiag.probes.base import Patches
from distdiag.probes.sequence.attention_calls import Attention, AttentionCalls, Given
from distdiag.probes.sequence.attention_masks import read_mask

CALL = Attention((), 0, 16, 2, 4, 4, 8)
VISIBLE = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1, 1]]).bool()


def seen(form, *args, call=CALL, num_ranks=2, **kwargs):
    reading = read_mask(Given(form, args, kwargs), call, num_ranks)
    return None if reading is None else reading.settle(reading.pending.wait())


def of_mask(mask, **values):
    return seen("query", None, None, None, mask, **values)


FORMS = {
    "bool": VISIBLE[:, None, None],
    "wide": VISIBLE[:, None, None].expand(2, 2, 4, 8),
    "floats": torch.zeros(2, 1, 1, 8).masked_fill(~VISIBLE[:, None, None], -torch.inf),
    "thousands": torch.zeros(2, 1, 1, 8).masked_fill(~VISIBLE[:, None, None], -1e4),
}


@pytest.mark.parametrize("mask", FORMS.values(), ids=FORMS)
def test_each_form_of_a_mask_shows_the_same_keys(mask):
    found = of_mask(mask)
    assert found.parts == of_mask(FORMS["bool"]).parts
    assert found.shares == (0.625, 0.875)
    assert found.aligned == ""


def test_scores_show_which_keys_are_seen():
    scores = torch.randn(2, 2, 4, 8).masked_fill(~VISIBLE[:, None, None], -torch.inf)
    assert seen("scores", scores).parts == of_mask(FORMS["bool"]).parts


def test_a_part_that_is_repeated_is_equal_everywhere():
    found = of_mask(VISIBLE[:, None, None, :4].repeat(1, 1, 1, 2))
    assert len(set(found.parts)) == 1


def test_a_causal_mask_of_fewer_queries_than_keys_is_known_in_each_form():
    below = torch.ones(4, 8).tril()
    assert of_mask(below.bool()).aligned == "first"
    assert of_mask(torch.zeros(4, 8).masked_fill(below == 0, -torch.inf)).aligned == "first"
    assert seen("query", None, None, None, is_causal=True).aligned == "first"
    assert seen("query", None, None, None, None, 0.0, True).aligned == "first"
    rows = torch.randn(2, 4, 2, 4)
    assert seen("rows", rows, rows, rows, causal=True).aligned == "last"


def test_other_rows_of_it_are_not():
    assert of_mask(torch.ones(8, 8).tril()[4:].bool()).aligned == ""
    assert of_mask(torch.ones(4, 4).tril().bool(), call=CALL._replace(num_keys=4)).aligned == ""
    assert seen("query", None, None, None, is_causal=True, call=CALL._replace(num_keys=4)) is None


def test_what_hides_nothing_or_is_no_mask_of_these_keys_is_not_read():
    assert seen("query", None, None, None) is None
    assert of_mask(torch.ones(4, 1).bool()) is None
    assert of_mask(torch.ones(8).bool()) is None
    assert seen("rows", torch.randn(2, 4, 2, 4), None, None) is None
    assert of_mask(FORMS["bool"], num_ranks=3).parts == ()


def test_lengths_of_packed_rows_are_read_to_their_end(monkeypatch):
    found = []
    patches = Patches()
    calls = AttentionCalls(lambda attention, _, call: found.append((attention, call)), patches)
    calls.is_wanted = True
    library = types.ModuleType("flash_attn_interface")
    library.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q, cu_seqlens_k, *_: q
    monkeypatch.setitem(sys.modules, "flash_attn_interface", library)
    calls.install_library("flash_attn_interface")
    rows, ends = torch.randn(16, 2, 4), torch.tensor([0, 3, 8], dtype=torch.int32)
    library.flash_attn_varlen_func(rows, rows, rows, ends, cu_seqlens_k=ends)
    patches.undo()
    ((attention, call),) = found
    reading = read_mask(call, attention, 2)
    known = reading.settle(reading.pending.wait())
    assert known.ends == (8, 8)
    assert known.num_rows == (16, 16)
