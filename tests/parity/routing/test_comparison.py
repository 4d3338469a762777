"""What differs first in two recordings, and what it is blamed on."""

import pytest

from distdiag.events.comparisons import Nature, Origin
from distdiag.events.ranks import RankSet
from distdiag.parity.routing.recordings import Recording
from distdiag.parity.routing.study import unmatched
from distdiag.record.recording import Seen
from tests.parity.routing.recordings import Run, compared

SURE = [[0.9, 0.1, 0.0], [0.1, 0.8, 0.1]]


def test_equal_runs_differ_nowhere_and_all_is_counted(tmp_path):
    def write(run, is_second):
        run.weights(w=[1.0])
        run.choice("router", SURE)

    result = compared(tmp_path, write, ranks=(0, 1))
    assert (result.difference, result.cause, result.problem) == (None, None, "")
    assert [(row.rank, row.num_tokens, row.num_flipped) for row in result.rows] == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    assert sum(each.num_tokens for each in result.margins) == 4


def test_a_near_tie_that_rounding_turns_round_is_numeric(tmp_path):
    def write(run, is_second):
        apart = 2.0**-23 * (-1 if is_second else 1)
        run.output("pool", [1.0], [1.0, 2.0 + 2.0**-22 * is_second], ops=("index_add",))
        run.output("embed", [2.0], [1.0])
        run.choice("router", [[0.5 + apart, 0.5, 0.0], *SURE], given=[is_second])
        run.output("router", [is_second], [1.0])
        run.output("", [1.0], [1.0])

    result = compared(tmp_path, write)
    found = result.difference
    assert (found.step, found.layer, found.flip.token) == (0, "router", 0)
    assert (found.flip.experts, found.flip.experts_again) == ((0,), (1,))
    assert found.flip.roundings == pytest.approx(2, rel=0.01)
    assert (found.cause.origin, found.cause.nature) == (Origin.MODULE, Nature.NUMERIC)
    assert (found.cause.name, found.cause.ops) == ("pool", ("index_add",))
    flipped = [(each.num_flipped, each.is_numeric) for each in result.margins if each.num_flipped]
    assert flipped == [(1, True)]


def test_the_earliest_step_on_any_rank_comes_first(tmp_path):
    def write(run, is_second):
        for step in range(3):
            run.step = step
            is_other = is_second and (run.rank, step) in ((0, 2), (1, 1), (1, 2))
            run.choice("router", SURE[::-1] if is_other else SURE)

    found = compared(tmp_path, write, ranks=(0, 1)).difference
    assert (found.step, found.rank, found.culprits) == (1, 1, RankSet([1]))
    assert (found.num_different, found.num_compared) == (3, 6)


@pytest.mark.parametrize("is_meant", [True, False])
def test_draws_in_the_router_are_named_and_meant_where_an_option_asks_for_them(tmp_path, is_meant):
    def write(run, is_second):
        run.random(cpu="a", python=str(is_second))
        noise = {"is_drawn": True, "is_meant_random": is_meant}
        run.choice("router", SURE[::-1] if is_second else SURE, given=[1.0], **noise)
        run.output("router", [1.0], [float(is_second)], **noise)

    cause = compared(tmp_path, write).difference.cause
    assert (cause.origin, cause.name) == (Origin.DRAW, "router")
    assert cause.nature is (Nature.MEANT if is_meant else Nature.LOGIC)
    assert cause.details == ()  # that nobody seeds Python's generator is nothing to tell


def test_rounding_in_a_module_that_draws_seeded_numbers_is_not_blamed_on_these(tmp_path):
    def write(run, is_second):
        noise = 0.25 + 1e-6 * is_second
        run.choice("router", [[0.25, noise, 0.0]], given=[1.0], is_drawn=True)
        run.output("router", [1.0], [float(is_second)], is_drawn=True)

    cause = compared(tmp_path, write).difference.cause
    assert (cause.origin, cause.nature) == (Origin.MODULE, Nature.NUMERIC)


def test_other_samples_are_blamed_on_the_data_even_if_a_part_sees_them_first(tmp_path):
    def write(run, is_second):
        run.output("embed", [is_second], [float(is_second)], outer="block")
        run.choice("router", SURE[::-1] if is_second else SURE, given=[is_second])
        run.output("block", [is_second], [1.0], outer="model")
        rows = ("a", "b") if is_second else ("b", "a")
        run.output("model", [is_second], [1.0], rows=rows)

    cause = compared(tmp_path, write).difference.cause
    assert (cause.origin, cause.nature) == (Origin.DATA, Nature.LOGIC)
    assert "same samples in another order" in cause.details[0]


def test_code_between_modules_is_blamed_on_the_module_that_it_is_in(tmp_path):
    def write(run, is_second):
        run.output("embed", [1.0], [1.0], outer="model")
        run.output("proj", [is_second], [1.0 + is_second], outer="model")
        run.choice("router", SURE[::-1] if is_second else SURE, given=[is_second])
        run.output("router", [is_second], [1.0], outer="model")
        run.output("model", [1.0], [1.0], kind="Net")

    cause = compared(tmp_path, write).difference.cause
    assert (cause.origin, cause.name, cause.kind) == (Origin.MODULE, "model", "Net")
    assert cause.nature is Nature.LOGIC


def test_other_weights_at_the_beginning_are_named(tmp_path):
    def write(run, is_second):
        run.random(cpu=str(is_second))
        run.weights(embed=[1.0], router=[is_second])
        run.choice("router", SURE[::-1] if is_second else SURE)

    cause = compared(tmp_path, write).difference.cause
    assert (cause.origin, cause.nature, cause.name) == (Origin.WEIGHTS, Nature.LOGIC, "router")
    assert "cpu" in cause.details[1]


def test_a_gradient_that_is_summed_otherwise_is_numeric_and_named(tmp_path):
    def write(run, is_second):
        run.output("embed", [1.0], [1.0], kind="Embedding", ops=("embedding",))
        run.choice("router", SURE)
        run.gradient("embed.weight", [1.0, 0.5 + 2.0**-20 * is_second])
        run.step = 1
        run.choice("router", [[0.5, 0.5 + 1e-5 * is_second, 0.0], *SURE])

    cause = compared(tmp_path, write).difference.cause
    assert (cause.origin, cause.nature) == (Origin.GRADIENT, Nature.NUMERIC)
    assert (cause.name, cause.kind, cause.ops) == ("embed.weight", "Embedding", ("embedding",))


def test_equal_scores_in_another_order_are_a_tie(tmp_path):
    def write(run, is_second):
        run.choice("router", [[0.5, 0.5, 0.0]])
        if is_second:  # what topk chose does not follow from the scores alone
            run.writer._data.seek(0)
            run.writer._data.write((1).to_bytes(4, "little"))

    def with_digest(run, is_second):
        original = run.record

        def record(seen, name, **more):
            more["digests"] = {**more["digests"], "chosen": str(is_second)}
            return original(seen, name, **more)

        run.record = record
        write(run, is_second)

    cause = compared(tmp_path, with_digest).difference.cause
    assert (cause.origin, cause.nature) == (Origin.TIE, Nature.NUMERIC)


def test_the_same_routes_are_no_difference_though_something_else_differs(tmp_path):
    def write(run, is_second):
        run.output("pool", [1.0], [1.0 + 2.0**-22 * is_second])
        run.choice("router", SURE)

    result = compared(tmp_path, write)
    assert result.difference is None
    assert (result.cause.origin, result.cause.nature) == (Origin.MODULE, Nature.NUMERIC)


def test_another_number_of_tokens_is_a_difference_without_a_token(tmp_path):
    def write(run, is_second):
        run.choice("router", SURE[is_second:], given=[is_second])
        run.output("router", [is_second], [1.0])

    found = compared(tmp_path, write).difference
    assert (found.flip, found.num_flipped, found.cause.origin) == (None, 2, Origin.DATA)


@pytest.mark.parametrize("lacks", [False, True])
def test_a_choice_that_one_run_alone_makes_cannot_be_compared(tmp_path, lacks):
    def write(run, is_second):
        run.choice("first", SURE)
        if is_second is not lacks:
            run.choice("second", SURE)

    result = compared(tmp_path, write)
    assert result.difference is None
    assert "in one of the runs only" in result.problem


def test_runs_without_routers_or_of_unequal_lengths_cannot_be_compared(tmp_path):
    for name, choices, num_steps in (("none", 0, 2), ("two", 1, 2), ("three", 1, 3)):
        run = Run(tmp_path / name)
        for _ in range(choices):
            run.choice("router", SURE)
        run.close(num_steps)
    none, two, three = (Recording(tmp_path / name) for name in ("none", "two", "three"))
    assert "no router was seen" in next(unmatched(none, none))
    assert "different numbers of steps: 2 and 3" in next(unmatched(two, three))
    assert list(unmatched(two, two)) == []


def test_what_is_recorded_is_read_again(tmp_path):
    run = Run(tmp_path)
    run.choice("router", SURE, k=2)
    run.output("router", [1.0], [3.0, 4.0])
    run.close()
    recording = Recording(tmp_path)
    choice, output = recording.records[0]
    assert (choice.seen, output.seen) == (Seen.CHOICE, Seen.OUTPUT)
    assert recording.choices(0, choice).indices.tolist() == [[0, 1], [1, 0]]
    assert recording.choices(0, choice).outer.tolist() == pytest.approx([0.0, 0.1])
    assert recording.sample(0, output).tolist() == [3.0, 4.0]
