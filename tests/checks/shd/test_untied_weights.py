from distdiag.checks.shd.untied_weights import UntiedWeights
from distdiag.events.ranks import RankSet
from distdiag.views.models import ContentView
from tests.checks.models import content, plan
from tests.checks.streams import plain_site
from tests.checks.verdicts import findings


def model(*plans_of_ranks):
    """The view of a model with these plans on rank 0, 1, …."""
    by_rank = {
        rank: tuple((each, content()) for each in plans)
        for rank, plans in enumerate(plans_of_ranks)
    }
    return ContentView("FSDP2 Net", 0, by_rank, {rank: plain_site(10 + rank) for rank in by_rank})


HEAD = plan("head.weight", untied_from="embed.weight")


def test_the_head_and_the_embedding_are_named_with_the_ranks_where_they_are_two():
    tied = plan("head.weight", tied_to="embed.weight")
    (finding,) = findings(UntiedWeights, model([plan("embed.weight"), tied], [HEAD], [HEAD]))
    assert (finding.ranks, finding.subjects) == (RankSet([1, 2]), ("head.weight", "embed.weight"))
    assert finding.location.line == 11
    assert "head.weight and embed.weight of FSDP2 Net are two tensors on ranks 1-2" in (
        finding.message
    )


def test_each_pair_is_a_finding():
    other = plan("decoder.head.weight", untied_from="decoder.embed.weight")
    found = findings(UntiedWeights, model([HEAD, other], [HEAD, other]))
    assert [finding.subjects[0] for finding in found] == ["head.weight", "decoder.head.weight"]


def test_tied_weights_are_silent():
    tied = [plan("embed.weight"), plan("head.weight", tied_to="embed.weight")]
    assert not findings(UntiedWeights, model(tied, tied))


def test_views_of_flat_parameters_are_never_one_object():
    flat = plan("head.weight", untied_from="embed.weight", wrapper="FSDP1")
    assert not findings(UntiedWeights, model([flat], [flat]))


def test_the_call_that_parted_them_is_named():
    lost = plan("head.weight", untied_from="embed.weight", untied_by="to_empty")
    (finding,) = findings(UntiedWeights, model([lost], [lost]))
    assert finding.message.endswith("though they were one until `to_empty` was called")
