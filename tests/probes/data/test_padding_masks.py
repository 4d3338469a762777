"""Which tokens are padding, and whether a mask hides those."""

import torch

from distdiag.probes.data.forward_arguments import Arguments
from distdiag.probes.data.padding_masks import is_call, pad_of, read_padding

IDS = torch.tensor([[5, 6, 7, 8, 9, 3, 0, 0], [4, 2, 0, 0, 0, 0, 0, 0]])
MASK = (IDS != 0).long()


def forward(): ...


def read(*passes, pad=0):
    given = [Arguments(forward.__code__, (), named) for named in passes]
    reading = read_padding(given, pad)
    return None if reading is None else reading.settle(reading.pending.wait())


def test_the_one_id_that_a_batch_hides_is_padding():
    labels = IDS.masked_fill(IDS == 0, -100)
    assert pad_of({"input_ids": IDS, "attention_mask": MASK, "labels": labels}) == 0
    assert pad_of((IDS + 3, MASK.bool())) == 3


def test_where_that_stands_unhidden_too_nobody_knows():
    assert pad_of((IDS, MASK.clone().index_fill_(1, torch.tensor([7]), 1))) is None
    assert pad_of((IDS, MASK.clone().index_fill_(1, torch.tensor([0]), 0))) is None
    assert pad_of((IDS, torch.ones_like(MASK))) is None
    assert pad_of((IDS, IDS)) is None
    assert pad_of((IDS.float(), MASK.float())) is None


def test_what_a_model_is_called_with_is_no_batch():
    assert is_call(((IDS,), {"attention_mask": MASK}))
    assert not is_call((IDS, MASK))


def test_a_mask_of_other_tokens_hides_some_and_leaves_padding():
    part = read({"input_ids": IDS[:, 4:], "attention_mask": MASK[:, :4]})
    assert (part.num_rows, part.num_tokens, part.num_pads, part.num_masked) == (2, 8, 6, 2)
    assert (part.num_hidden, part.num_shown) == (0, 2)
    part = read({"input_ids": IDS[:, :4], "attention_mask": MASK[:, 4:].bool()})
    assert (part.num_pads, part.num_masked, part.num_hidden, part.num_shown) == (2, 6, 4, 0)


def test_a_mask_of_its_own_tokens_hides_padding_alone():
    part = read({"hidden": IDS.float(), "mask": MASK}, {"input_ids": IDS, "attention_mask": MASK})
    assert (part.num_pads, part.num_masked, part.num_hidden, part.num_shown) == (8, 8, 0, 0)


def test_other_masks_and_ids_are_not_read():
    assert read({"input_ids": IDS, "loss_mask": MASK}) is None
    assert read({"position_ids": IDS, "attention_mask": MASK}) is None
    assert read({"input_ids": IDS, "attention_mask": MASK[:, :4]}) is None
    assert read({"input_ids": IDS, "attention_mask": MASK[:, None, None]}) is None
    assert read({"input_ids": IDS}) is None
