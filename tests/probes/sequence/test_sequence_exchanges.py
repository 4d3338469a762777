"""What is taken for a shared sequence, and what is not."""

import pytest
import torch

from distdiag.events.base import CallSite
from distdiag.probes.base import Patches
from distdiag.probes.sequence.attention_calls import Attention, AttentionCalls
from distdiag.probes.sequence.exchanges import Exchange, ForwardPass, Place, num_distinct
from distdiag.probes.sequence.probe import settled

SITE = CallSite(())
SIZE = 2 * 8 * 2 * 4
ATTENTION = Attention((SIZE, SIZE, SIZE), 0, 16, 2, 4, 8, 8)


def attend(): ...


def experts(): ...


def main(): ...


def place(*functions, line=1):
    """The functions that run, innermost first; the innermost is the module's."""
    codes = [function.__code__ for function in functions]
    lines = tuple((code, line) for code in codes)
    return Place(frozenset(codes), lines, codes[0], is_module=True)


def exchange(where, kind="all_to_all", size=SIZE, **values):
    return Exchange(kind, where, (0, 1), size, values.get("peer", -1), 4, None)


def uses(*steps, attention=ATTENTION):
    """What is found in a pass of exchanges and of places where attention is computed."""
    running = ForwardPass()
    for step in steps:
        if isinstance(step, Exchange):
            running.add(step)
        else:
            running.attend(attention, step, SITE)
    return list(settled(running.take()))


HERE = place(attend, main)


def test_an_exchange_of_the_query_in_the_module_of_attention_is_a_use():
    (use,) = uses(exchange(HERE), HERE)
    assert not use.is_returned
    assert use.num_tokens == 16


def test_what_follows_at_another_line_brings_it_back():
    (use,) = uses(exchange(HERE), HERE, exchange(place(attend, main, line=9)))
    assert use.is_returned


def test_the_first_exchange_of_the_next_layer_brings_nothing_back():
    first, second = uses(exchange(HERE), HERE, exchange(HERE), HERE)
    assert not first.is_returned
    assert not second.is_returned


@pytest.mark.parametrize(
    ("public", "given", "members", "is_returned"),
    [
        ("all_reduce", torch.ones(2, 16), (0, 1), True),
        ("reduce_scatter_tensor", torch.ones(2, 8, 16), (0, 1), True),
        ("all_gather", torch.ones(2, 2 * 4), (0, 1), True),
        ("all_gather", torch.ones(2, 16), (0, 1), False),
        ("all_reduce", torch.ones(16), (0, 1), False),
        ("all_reduce", torch.ones(2, 16, dtype=torch.int64), (0, 1), False),
        ("all_reduce", torch.ones(2, 16), (0, 1, 2, 3), False),
    ],
)
def test_heads_that_are_summed_up_or_gathered_elsewhere_are_brought_back(
    public, given, members, is_returned
):
    running = ForwardPass()
    running.add(exchange(HERE))
    running.attend(ATTENTION, HERE, SITE)
    running.combined(public, given, members)
    (use,) = settled(running.take())
    assert use.is_returned is is_returned


def test_exchanges_of_experts_in_a_module_of_their_own_are_none():
    assert uses(exchange(place(experts, main)), HERE, exchange(place(experts, main))) == []


def layer(): ...


def test_attention_in_a_module_of_its_own_below_the_exchange_is_a_use():
    outer, back = place(layer, main, line=3), place(layer, main, line=7)
    inner = place(attend, layer, main, line=5)
    (use,) = uses(exchange(outer), inner, exchange(back))
    assert use.is_returned
    first, second = uses(exchange(outer), inner, exchange(back), exchange(outer), inner)
    assert (first.is_returned, second.is_returned) == (True, False)


def test_tokens_that_a_layer_sends_to_experts_after_attention_are_none():
    inner, experts = place(attend, layer, main, line=5), place(layer, main, line=7)
    assert uses(inner, exchange(experts), inner, exchange(experts)) == []


def test_tokens_that_go_to_experts_after_attention_in_the_same_module_are_none():
    where = place(attend, main)._replace(offsets=(10, 4))
    later = place(experts, attend, main)._replace(offsets=(2, 30, 4))
    assert uses(where, exchange(later), where, exchange(later)) == []
    before = place(experts, attend, main)._replace(offsets=(2, 6, 4))
    assert len(uses(exchange(before), where)) == 1


def test_messages_in_a_module_that_calls_others_are_no_ring():
    assert uses(exchange(place(layer, main, line=3), "ring"), place(attend, layer, main)) == []


def test_exchanges_of_another_size_are_none():
    assert uses(exchange(HERE, size=SIZE + 8), HERE) == []


def test_scores_tell_what_divides_the_query():
    scores = Attention((), SIZE // 4, 16, 2, 0, 8, 8)
    assert len(uses(exchange(HERE), HERE, attention=scores)) == 1
    assert uses(exchange(HERE, size=SIZE + 8), HERE, attention=scores) == []


def test_scores_that_choose_experts_in_the_module_that_exchanges_tokens_are_none():
    router = Attention((), 16, -1, 2, 0, 8, 4)
    assert uses(exchange(HERE), HERE, attention=router) == []


def test_messages_in_the_module_of_attention_are_a_ring():
    (use,) = uses(exchange(HERE, "ring", size=8, peer=1), HERE)
    assert use.peer == 1


def test_gathered_keys_are_a_use_if_there_are_more_of_them():
    longer = ATTENTION._replace(num_keys=16)
    assert len(uses(exchange(HERE, "all_gather"), HERE, attention=longer)) == 1
    assert uses(exchange(HERE, "all_gather"), HERE) == []


def permuted(where):
    return Exchange("ring", where, (0, 1), SIZE, 1, 4, None, is_permuted=True)


def test_an_all_to_all_that_gives_all_to_one_rank_is_a_ring_in_the_module_of_attention_only():
    (use,) = uses(permuted(HERE), HERE)
    assert use.peer == 1
    assert uses(permuted(place(experts, attend, main)), HERE) == []


WHOLE = ATTENTION._replace(members=(0, 1))
WITHIN = Place(HERE.codes, ((main.__code__, 3), *HERE.lines), HERE.scope, is_module=True)


def test_attention_over_tensors_that_are_split_by_sequence_exchanges_within():
    (use,) = uses(HERE, exchange(WITHIN, "ring", peer=1), exchange(WITHIN), attention=WHOLE)
    assert use.peer == 1
    assert use.num_tokens == 16


def test_what_is_exchanged_elsewhere_or_among_others_is_not_within():
    later = exchange(place(attend, main, line=9), "ring", peer=1)
    others = WHOLE._replace(members=(0, 2))
    assert uses(HERE, later, attention=WHOLE) == []
    assert uses(HERE, exchange(WITHIN, "ring", peer=1), attention=others) == []


def test_rows_that_differ_are_counted():
    rows = torch.randn(6, 4)
    assert num_distinct([rows]).item() == 6
    assert num_distinct([torch.cat([rows, rows])]).item() == 6
    assert num_distinct([rows, rows]).item() == 6
    assert num_distinct([torch.ones(6, 4)]).item() == 1
    assert num_distinct([torch.ones(6, 4, dtype=torch.int64)]).item() == -1


@pytest.fixture
def calls():
    patches = Patches()
    found = []
    watch = AttentionCalls(lambda attention, *_: found.append(attention), patches)
    watch.install()
    yield watch, found
    patches.undo()


def test_calls_are_reported_only_while_they_are_wanted(calls):
    watch, found = calls
    query = torch.randn(2, 3, 5, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert found == []
    watch.is_wanted = True
    result = torch.nn.functional.scaled_dot_product_attention(query, key=query, value=query)
    assert torch.equal(result, expected)
    assert found == [Attention((120, 120, 120), 0, 10, 3, 4, 5, 5)]


@pytest.mark.parametrize(
    "softmax",
    [
        lambda scores: scores.softmax(-1),
        lambda scores: torch.softmax(scores, dim=-1),
        lambda scores: torch.nn.functional.softmax(scores, dim=3),
    ],
)
def test_softmax_over_keys_is_attention(calls, softmax):
    watch, found = calls
    watch.is_wanted = True
    softmax(torch.randn(2, 3, 5, 7))
    assert found == [Attention((), 30, 10, 3, 0, 5, 7)]


def test_softmax_over_experts_or_another_dimension_is_none(calls):
    watch, found = calls
    watch.is_wanted = True
    torch.randn(8, 4).softmax(-1)
    torch.randn(2, 3, 5, 7).softmax(1)
    assert found == []


def test_a_compiled_function_stays_one_graph(calls):
    watch, _ = calls
    watch.is_wanted = True

    @torch.compile(backend="eager", fullgraph=True)
    def both(query):
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        return torch.softmax(out, -1) + out.softmax(-1) + torch.nn.functional.softmax(out, -1)

    query = torch.randn(2, 3, 5, 4)
    result = both(query)
    watch.is_wanted = False
    torch.compiler.reset()
    assert torch.equal(result, both(query))


def test_everything_is_put_back():
    before = torch.nn.functional.scaled_dot_product_attention, torch.softmax
    patches = Patches()
    AttentionCalls(lambda *_: None, patches).install()
    patches.undo()
    assert (torch.nn.functional.scaled_dot_product_attention, torch.softmax) == before
    assert "softmax" not in vars(torch.Tensor)
