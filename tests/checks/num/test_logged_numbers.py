import math

import pytest

from distdiag.checks.num.codebook_collapse import CodebookCollapse
from distdiag.checks.num.collapsed_prediction import CollapsedPrediction
from distdiag.checks.num.dominant_loss_term import DominantLossTerm
from distdiag.checks.num.flat_loss import FlatLoss
from distdiag.checks.num.logged_names import (
    is_gradient_norm,
    is_kl,
    is_kl_coefficient,
    is_loss_term,
    is_ratio,
    is_reward_spread,
)
from distdiag.checks.num.memory_growth import MemoryGrowth
from distdiag.checks.num.parameter_concentration import ParameterConcentration
from distdiag.checks.num.saturated_clamp import SaturatedClamp
from distdiag.checks.num.stale_rollout import StaleRollout
from distdiag.checks.num.telling_warning import TellingWarning
from distdiag.checks.num.unlearnt_prediction import UnlearntPrediction
from distdiag.checks.num.zero_kl import ZeroKl
from distdiag.checks.num.zero_loss_term import ZeroLossTerm
from distdiag.checks.num.zero_policy_gradient import ZeroPolicyGradient
from distdiag.config.numerics import NumericsConfig
from distdiag.events.logged import WARNINGS, Clamped, LossTerm, PolicyRatio, Warned
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.logged import CodebookView, MemoryView, ParameterView, WarningView
from tests.checks.numbers import SITE, logged_view, loss_view, memory, one_pass, prediction, window
from tests.checks.streams import event_of
from tests.checks.verdicts import findings


def severities(check, view):
    return [found.severity.value for found in findings(check, view)]


class TestNames:
    @pytest.mark.parametrize(
        ("kind", "yes", "no"),
        [
            (
                is_kl,
                ("kl", "objective/kl", "actor/kl_loss", "KL", "klLoss"),
                ("approx_kl", "kl_coef", "ppo_kl", "kl_target", "kl_min", "ankle", "actor/ppo_kl"),
            ),
            (
                is_kl_coefficient,
                ("kl_coef", "actor/kl_coef", "beta", "klWeight"),
                ("kl", "beta1", "adam_beta", "weight"),
            ),
            (
                is_ratio,
                ("ratio", "importance_ratio", "sampling/importance_sampling_ratio/mean"),
                ("clip_ratio", "compression_ratio", "ratio_min", "lr_ratio"),
            ),
            (is_reward_spread, ("reward_std", "rewards/std", "advantages_std"), ("reward",)),
            (is_gradient_norm, ("grad_norm", "train/grad_norm"), ("max_grad_norm", "v_norm")),
            (
                is_loss_term,
                ("loss_ce", "value_loss", "train/loss_aux"),
                ("loss", "train/loss", "total_loss", "loss_weight", "val_loss"),
            ),
        ],
    )
    def test_words_tell_what_a_number_is(self, kind, yes, no):
        assert [name for name in yes if not kind(name)] == []
        assert [name for name in no if kind(name)] == []


def terms(*gradients, factor=1.0, mask_share=-1.0):
    return tuple(LossTerm(f"Sum Mul{n}", factor, g, mask_share) for n, g in enumerate(gradients))


class TestZeroLossTerm:
    def test_a_term_without_a_gradient_is_reported(self):
        passes = [one_pass(n, terms=terms(0.2, 0.0, mask_share=0.0)) for n in range(48)]
        (found,) = findings(ZeroLossTerm, loss_view(passes, (0, 1)))
        assert found.severity is Severity.WARNING
        assert found.ranks == RankSet([0, 1])
        assert "term 2 of 2" in found.message and "keep 0%" in found.message
        assert found.location.line == 7

    @pytest.mark.parametrize(
        "passes",
        [
            [one_pass(n, terms=terms(0.2, 0.0)) for n in range(47)],
            [one_pass(n, terms=terms(0.2, 0.0, factor=0.0)) for n in range(90)],
            [one_pass(n, terms=terms(0.2, 0.1 * (n > 60))) for n in range(90)],
            [one_pass(n, terms=terms(0.2, math.nan)) for n in range(90)],
            [one_pass(n) for n in range(90)],
        ],
    )
    def test_few_passes_a_factor_of_zero_and_a_later_start_are_right(self, passes):
        assert findings(ZeroLossTerm, loss_view(passes)) == []

    def test_what_one_rank_lacks_is_a_note(self):
        zero = [one_pass(n, terms=terms(0.2, 0.0)) for n in range(60)]
        trained = [one_pass(n, terms=terms(0.2, 0.1)) for n in range(60)]
        assert severities(ZeroLossTerm, loss_view(zero, others=trained)) == ["info"]

    def test_advantages_of_equal_rewards_are_a_note(self):
        passes = [one_pass(n, terms=terms(0.0, mask_share=0.0)) for n in range(60)]
        assert severities(ZeroLossTerm, loss_view(passes, reward_std=[0.0] * 60)) == ["info"]

    def test_logged_zeros_are_a_note(self):
        view = logged_view(loss_ce=[1.0] * 100, loss_aux=[0.0] * 100)
        assert severities(ZeroLossTerm, view) == ["info"]
        view = logged_view(loss_ce=[1.0] * 100, loss_aux=[0.0] * 99 + [0.1])
        assert findings(ZeroLossTerm, view) == []


def test_a_dominant_term_is_a_note_beyond_the_threshold():
    view = logged_view(loss_ce=[1.0] * 60, loss_aux=[150.0] * 60)
    assert severities(DominantLossTerm, view) == ["info"]
    assert findings(DominantLossTerm, logged_view(loss_ce=[1.0] * 60, loss_aux=[90.0] * 60)) == []


class TestFlatLoss:
    def test_a_loss_that_stands_still_is_reported_since_it_does(self):
        passes = [one_pass(n, 3.0 - n / 100) for n in range(20)]
        passes += [one_pass(n, 2.302585) for n in range(20, 60)]
        (found,) = findings(FlatLoss, loss_view(passes, varied=[0]))
        assert (found.severity, found.step) == (Severity.WARNING, 20)

    def test_a_loss_of_what_may_be_one_batch_has_been_learnt_or_is_a_note(self):
        passes = [one_pass(n, 2.302585) for n in range(60)]
        (found,) = findings(FlatLoss, loss_view(passes))
        assert found.severity is Severity.INFO
        assert "no model is known to get other batches" in found.message

    @pytest.mark.parametrize(
        "passes",
        [
            [one_pass(n, 2.302585) for n in range(31)],
            [one_pass(0, 2.302585) for n in range(60)],
            [one_pass(n, 0.0) for n in range(60)],
            [one_pass(n, math.nan) for n in range(60)],
            [one_pass(n, 2.302585, rate=0.0) for n in range(60)],
            [one_pass(n, 2.302585, is_coarse=True) for n in range(60)],
            [one_pass(n, 2.296875) for n in range(60)],
            [one_pass(n, 2.302585 + n % 2) for n in range(60)],
        ],
    )
    def test_few_steps_zero_nan_no_rate_and_half_precision_are_right(self, passes):
        assert findings(FlatLoss, loss_view(passes, varied=[0])) == []


class TestZeroKl:
    def test_with_a_coefficient_it_is_reported(self):
        (found,) = findings(ZeroKl, logged_view((0, 1), kl=[0.0] * 30, kl_coef=[0.1] * 30))
        assert (found.severity, found.ranks) == (Severity.WARNING, RankSet([0, 1]))
        assert "0.1" in found.message

    def test_without_one_it_is_a_note_and_with_zero_it_is_right(self):
        assert severities(ZeroKl, logged_view(kl=[0.0] * 30)) == ["info"]
        assert findings(ZeroKl, logged_view(kl=[0.0] * 30, kl_coef=[0.0] * 30)) == []

    def test_a_start_at_zero_and_few_values_are_right(self):
        kl = [0.0] * 25 + [1e-7] * 5
        assert findings(ZeroKl, logged_view(kl=kl, kl_coef=[0.1] * 30)) == []
        assert findings(ZeroKl, logged_view(kl=[0.0] * 19, kl_coef=[0.1] * 19)) == []
        assert findings(ZeroKl, logged_view(approx_kl=[0.0] * 30, kl_coef=[0.1] * 30)) == []


def rollouts(*deviations, gradient=0.1):
    return [
        one_pass(n, ratio=PolicyRatio(away, 64, gradient, n % 4 == 0))
        for n, away in enumerate(x for away in deviations for x in (away, 0.1, 0.15, 0.2))
    ]


class TestStaleRollout:
    def test_ratios_that_go_ever_farther_from_1_are_reported(self):
        growing = [0.0] + [0.03 * n for n in range(1, 9)]
        (found,) = findings(StaleRollout, loss_view(rollouts(*growing)))
        assert found.severity is Severity.WARNING
        assert found.step == 4

    @pytest.mark.parametrize(
        "deviations",
        [
            [0.0] * 12,
            [1e-3 * n for n in range(9)],
            [0.0] + [0.1] * 11,
            [0.1 + 0.03 * n for n in range(9)],
            [0.0, 0.05, 0.1, 0.15, 0.2, 0.25],
            [0.0] + [0.03 * n for n in range(1, 8)] + [0.0],
            [0.005 * (n % 16) for n in range(4 * 16 - 2)],
        ],
    )
    def test_rounding_a_constant_lag_few_rollouts_and_draws_in_each_pass_are_right(
        self, deviations
    ):
        assert findings(StaleRollout, loss_view(rollouts(*deviations))) == []

    def test_a_logged_ratio_that_drifts_is_reported(self):
        drifting = [1.0 - 0.01 * n for n in range(60)]
        assert severities(StaleRollout, logged_view(ratio=drifting)) == ["warning"]
        assert findings(StaleRollout, logged_view(ratio=drifting[:29])) == []
        assert (
            findings(StaleRollout, logged_view(ratio=[1 + 0.1 * (n % 2) for n in range(60)])) == []
        )
        assert findings(StaleRollout, logged_view(clip_ratio=drifting)) == []


class TestZeroPolicyGradient:
    def test_rewards_that_differ_and_no_gradient(self):
        view = loss_view(rollouts(*[0.0] * 12, gradient=0.0), reward_std=[0.4] * 20)
        assert severities(ZeroPolicyGradient, view) == ["warning"]

    def test_equal_rewards_are_right_and_unknown_ones_a_note(self):
        passes = rollouts(*[0.0] * 12, gradient=0.0)
        assert findings(ZeroPolicyGradient, loss_view(passes, reward_std=[0.0] * 20)) == []
        assert severities(ZeroPolicyGradient, loss_view(passes)) == ["info"]
        trained = rollouts(*[0.0] * 12, gradient=0.1)
        assert findings(ZeroPolicyGradient, loss_view(trained, reward_std=[0.4] * 20)) == []

    def test_a_logged_norm_of_zero(self):
        view = logged_view(grad_norm=[0.0] * 16, reward_std=[0.4] * 16)
        assert severities(ZeroPolicyGradient, view) == ["warning"]
        view = logged_view(grad_norm=[0.0] * 15 + [0.1], reward_std=[0.4] * 16)
        assert findings(ZeroPolicyGradient, view) == []
        assert findings(ZeroPolicyGradient, logged_view(grad_norm=[0.0] * 16)) == []


def predictions(number, first=0, every=1, **values):
    return [one_pass(first + every * n, prediction=prediction(**values)) for n in range(number)]


class TestPredictions:
    def test_worse_than_a_table_of_frequencies(self):
        uniform = math.log(16)
        values = {"entropy": uniform, "cross_entropy": uniform, "targets": (0, 0, 0, 0, 1, 2)}
        late = predictions(40, every=16, **values)
        (found,) = findings(UnlearntPrediction, loss_view(late))
        assert found.severity is Severity.WARNING
        assert findings(UnlearntPrediction, loss_view(late[:30])) == []
        rare = predictions(40, every=16, **{**values, "targets": tuple(range(16))})
        assert findings(UnlearntPrediction, loss_view(rare)) == []
        learnt = predictions(40, every=16, **{**values, "cross_entropy": 0.9})
        assert findings(UnlearntPrediction, loss_view(learnt)) == []

    @pytest.mark.parametrize("targets", [(0,) * 16, tuple(range(16, 32))])
    def test_labels_that_are_places_among_candidates_have_no_frequencies(self, targets):
        values = {"num_classes": 512, "entropy": 6.1, "cross_entropy": 5.9, "num_rows": 16}
        whole = predictions(40, every=16, **values, targets=targets)
        ragged = predictions(4, every=16, **{**values, "num_rows": 8}, targets=targets[:8])
        assert findings(UnlearntPrediction, loss_view([*ragged, *whole])) == []
        drawn = [
            one_pass(16 * n, prediction=prediction(**values, targets=(n % 3, *targets[1:])))
            for n in range(40)
        ]
        assert len(findings(UnlearntPrediction, loss_view(drawn))) == 1

    def test_a_rate_that_rises_is_a_warm_up(self):
        uniform = math.log(16)
        values = {"entropy": uniform, "cross_entropy": uniform, "targets": (0, 0, 0, 0, 1, 2)}
        passes = [
            one_pass(16 * n, rate=1e-6 * n, prediction=prediction(**values)) for n in range(40)
        ]
        assert findings(UnlearntPrediction, loss_view(passes)) == []

    def test_sure_of_one_class_and_wrong(self):
        values = {"entropy": 1e-4, "cross_entropy": 9.0, "top_share": 1.0, "targets": (1, 2)}
        assert severities(CollapsedPrediction, loss_view(predictions(20, **values))) == ["warning"]
        assert findings(CollapsedPrediction, loss_view(predictions(19, **values))) == []
        right = {**values, "cross_entropy": 1e-5}
        assert severities(CollapsedPrediction, loss_view(predictions(20, **right))) == ["info"]
        for change in ({"top_share": 0.9}, {"entropy": 1.0}, {"num_rows": 4}):
            passes = predictions(20, **{**values, **change})
            assert findings(CollapsedPrediction, loss_view(passes)) == []

    def test_a_logged_entropy_that_vanishes_is_a_note(self):
        view = logged_view(entropy=[2.0] * 20 + [0.001] * 20)
        assert severities(CollapsedPrediction, view) == ["info"]
        assert findings(CollapsedPrediction, logged_view(entropy=[2.0] * 20 + [0.1] * 20)) == []


class TestSaturatedClamp:
    @pytest.mark.parametrize(
        ("least", "greatest", "outside", "expected"),
        [
            (math.nan, 1.0, 1.0, ["warning"]),
            (0.5, math.nan, 0.995, ["warning"]),
            (-1.0, 1.0, 0.98, []),
            (0.0, math.nan, 1.0, []),
            (1e-8, math.nan, 1.0, []),
        ],
    )
    def test_what_lies_outside_of_a_bound(self, least, greatest, outside, expected):
        clamps = (Clamped(least, greatest, 64, outside),)
        view = loss_view([one_pass(16 * n, clamps=clamps) for n in range(8)])
        assert severities(SaturatedClamp, view) == expected

    def test_once_within_is_enough(self):
        passes = [one_pass(n, clamps=(Clamped(math.nan, 1.0, 64, n > 3),)) for n in range(9)]
        assert findings(SaturatedClamp, loss_view(passes)) == []


class TestCodebookCollapse:
    def view(self, *windows, **values):
        return CodebookView("codes.weight", {0: windows}, SITE, **values)

    def test_few_codes_late(self):
        late = [window(step, 3) for step in (200, 240, 280)]
        (found,) = findings(CodebookCollapse, self.view(*late))
        assert "3 of 64 codes" in found.message and found.subjects == ("codes.weight",)
        lower = NumericsConfig(codebook_use=0.01)
        assert findings(CodebookCollapse, self.view(*late, thresholds=lower)) == []

    def test_the_beginning_and_one_better_window_are_right(self):
        early = [window(step, 3) for step in (20, 240, 280)]
        assert findings(CodebookCollapse, self.view(*early)) == []
        better = [window(200, 3), window(240, 30), window(280, 3)]
        assert findings(CodebookCollapse, self.view(*better)) == []


def warned(topic, text, ranks=(0,), step=3):
    events = {
        rank: event_of(
            Warned, rank, topic=topic, text=text, category="UserWarning", site=SITE, step=step
        )
        for rank in ranks
    }
    return WarningView(topic, events)


class TestTellingWarning:
    def test_each_topic_has_a_cause_and_a_fix(self):
        for topic, text in WARNINGS.items():
            (found,) = findings(TellingWarning, warned(topic, text))
            assert found.fix != TellingWarning.fix and found.message

    def test_the_variance_of_one_sample_names_its_ranks_and_line(self):
        (found,) = findings(
            TellingWarning, warned("one-sample-variance", "std(): degrees of freedom", (1, 3))
        )
        assert (found.severity, found.ranks) == (Severity.WARNING, RankSet([1, 3]))
        assert (found.location.file, found.location.line) == ("train.py", 7)

    def test_a_scaler_that_skips_its_first_step_is_right(self):
        topic = "scheduler-before-optimizer"
        assert severities(TellingWarning, warned(topic, "…", step=0)) == ["warning"]
        assert severities(TellingWarning, warned(topic, "…", step=1)) == ["info"]

    @pytest.mark.parametrize(
        ("target", "given", "expected"),
        [("8", "8, 1", "warning"), ("1", "8, 1", "info"), ("8, 1", "8, 4", "info")],
    )
    def test_a_target_that_makes_the_loss_larger(self, target, given, expected):
        text = (
            f"Using a target size (torch.Size([{target}])) that is different to the input size "
            f"(torch.Size([{given}]))."
        )
        assert severities(TellingWarning, warned("broadcast-target", text)) == [expected]


class TestMemoryGrowth:
    def test_a_steady_growth_that_will_not_suffice(self):
        (found,) = findings(
            MemoryGrowth,
            MemoryView("host", {0: memory([500 + 4 * n for n in range(60)], num_graphs=50)}),
        )
        assert found.severity is Severity.WARNING
        assert "0.50 MiB with each step" in found.message

    @pytest.mark.parametrize(
        "used",
        [
            [500] * 60,
            [500 + 400 * (1 - 0.9**n) for n in range(60)],
            [500 + 4 * min(n, 30) for n in range(60)],
            [500 + 0.2 * n for n in range(60)],
            [500 + 4 * n for n in range(25)],
            [500 + 40 * (n % 7) for n in range(60)],
        ],
    )
    def test_caches_that_fill_up_and_short_runs_are_right(self, used):
        assert findings(MemoryGrowth, MemoryView("host", {0: memory(used)})) == []

    def test_a_limit_that_is_far_away_is_right(self):
        samples = memory([500 + 2 * n for n in range(60)], limit_mib=64_000)
        assert findings(MemoryGrowth, MemoryView("host", {0: samples})) == []

    def test_what_a_program_collects_may_have_an_end(self):
        samples = memory([500 + 4 * n for n in range(60)], num_graphs=2)
        assert severities(MemoryGrowth, MemoryView("host", {0: samples})) == ["info"]

    @pytest.mark.parametrize(
        ("asked_mib", "expected"), [(900, []), (5000, ["warning"]), (0, ["warning"])]
    )
    def test_what_was_asked_for_at_once_may_be_filled(self, asked_mib, expected):
        values = {"num_graphs": 50, "reserved_bytes": asked_mib << 20}
        samples = memory([500 + 4 * n for n in range(60)], **values)
        assert severities(MemoryGrowth, MemoryView("host", {0: samples})) == expected

    def test_the_first_pass_over_a_data_set_may_fill_a_cache(self):
        samples = memory([500 + 4 * n for n in range(60)], num_batches=480)
        assert severities(MemoryGrowth, MemoryView("host", {0: samples})) == ["info"]
        assert severities(MemoryGrowth, MemoryView("host", {0: samples}, {0: 40})) == ["warning"]
        assert findings(MemoryGrowth, MemoryView("host", {0: samples}, {0: 400})) == []


def test_one_tensor_with_most_of_the_parameters_is_a_note():
    sizes = {f"layers.{n}.weight": 20_000 for n in range(12)}
    large = {**sizes, "embed.weight": 2_000_000}
    assert severities(ParameterConcentration, ParameterView("Model", 0, large, SITE)) == ["info"]
    assert findings(ParameterConcentration, ParameterView("Model", 0, sizes, SITE)) == []
    halves = {**sizes, "embed.weight": 2_000_000, "head.weight": 2_000_000}
    assert findings(ParameterConcentration, ParameterView("Model", 0, halves, SITE)) == []
