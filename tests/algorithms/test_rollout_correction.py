"""The golden vectors, the traps, and invariance to everything that must not matter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_retool.algorithms.rejection_rules import (
    FIRST_RULE,
    NOT_FINITE,
    RULE_NAMES,
    VETO,
    WEIGHT_MASK,
    parse_rejection_rule,
)
from megatron_retool.algorithms.rollout_correction import correct_responses, rollout_correction
from megatron_retool.config import ConfigError, RolloutCorrectionConfig, load_config
from tests.algorithms.ragged_batches import pad, ragged, unpad

# Rows A to E of the golden table: d = log pi_train - log pi_rollout, log pi_rollout = -1, E masked out entirely.
GOLDEN = torch.tensor(
    [[0.5, -0.5, 0.3, -0.3], [0.0015] * 4, [-0.0015] * 4, [-12.0, 0.0, 0.0, 0.0], [3.0] * 4], dtype=torch.float64
)
ROWS = torch.arange(5).repeat_interleave(4)


def correct_golden(dtype=torch.float64, **settings_):
    rollout = torch.full((20,), -1.0, dtype=dtype)
    return rollout_correction(
        rollout + GOLDEN.flatten().to(dtype),
        rollout,
        ROWS < 4,
        ROWS,
        5,
        torch.tensor([0, 0, 1, 1] * 5),
        RolloutCorrectionConfig(**({"mode": "none", "rejection": [], "veto_threshold": None} | settings_)),
    )


def kept_per_row(result):
    return result.keep_mask.view(5, 4).sum(1).tolist()


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ("geometric_ratio 0.999 1.001", [4, 0, 0, 0, 0]),
        ("geometric_ratio 0.999 1.002", [4, 4, 0, 0, 0]),
        ("sequence_mean_k3 0 0.01", [0, 4, 4, 0, 0]),
        (f"token_ratio {1 / 1.6} {1 / 0.6}", [3, 4, 4, 3, 0]),
        ("sequence_max_k2 -inf 2.5", [4, 4, 4, 0, 0]),
        ("sequence_ratio 0.5 2.0", [4, 4, 4, 0, 0]),
    ],
)
def test_golden_rules(rule, kept):
    for dtype in (torch.float64, torch.float32):
        assert kept_per_row(correct_golden(dtype, rejection=[rule])) == kept


def test_default_is_geo_mis():
    """Geometric mask and veto over token weights truncated at 2: nobody has to ask for the cure."""
    d = torch.tensor([1.0, -1.0, 0.0015, 0.0, -12.0, 12.0])
    rollout, mask, ids = torch.full((6,), -13.0), torch.ones(6, dtype=torch.bool), torch.tensor([0, 0, 1, 1, 2, 2])
    config = load_config().algorithm.rollout_correction
    result = rollout_correction(rollout + d, rollout, mask, ids, 3, torch.zeros(6), config)
    assert result.keep_mask.tolist() == [True, True, True, True, False, False]
    assert result.importance_weights[:2].tolist() == pytest.approx([2.0, math.exp(-1)])
    higher = rollout_correction(rollout + 2 * d.abs(), rollout, mask, ids, 3, torch.zeros(6), config)
    assert not higher.keep_mask.any()
    assert not load_config(None, ["algorithm.rollout_correction.rejection=[]"]).algorithm.rollout_correction.rejection


def test_golden_veto():
    result = correct_golden(veto_threshold=1e-4)
    assert kept_per_row(result) == [4, 4, 4, 0, 0]
    assert result.metrics["rollout_corr/veto_fraction"] == 0.25


@pytest.mark.parametrize(
    ("level", "lower", "upper", "kept"),
    [
        ("geometric", 0.999, 1.001, [4, 0, 0, 0, 0]),
        ("geometric", 0.999, 1.002, [4, 4, 0, 0, 0]),
        ("token", 1 / 1.6, 1 / 0.6, [3, 4, 4, 3, 0]),
        ("sequence", 0.5, 2.0, [4, 4, 4, 0, 0]),
    ],
)
def test_mask_mode_rejects_the_same_and_weighs_the_rest_by_the_ratio(level, lower, upper, kept):
    result = correct_golden(level=level, mode="mask", lower=lower, upper=upper)
    assert kept_per_row(result) == kept
    ratio = {
        "token": GOLDEN.exp(),
        "sequence": GOLDEN.sum(1, keepdim=True).exp().expand(5, 4),
        "geometric": GOLDEN.mean(1, keepdim=True).exp().expand(5, 4),
    }[level]
    expected = torch.where(result.keep_mask.view(5, 4), ratio, 0.0).float()
    torch.testing.assert_close(result.importance_weights.view(5, 4), expected)


def test_golden_metrics():
    metrics = correct_golden().metrics
    assert metrics["rollout_corr/kl"] == pytest.approx(0.75)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0.70912, abs=5e-6)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(-0.25, abs=5e-5)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(0.02857, abs=5e-6)
    truncated = correct_golden(level="token", mode="truncate", upper=2.0).metrics
    assert truncated["rollout_corr/is_weight_mean"] == pytest.approx(0.95912, abs=5e-6)
    assert truncated["rollout_corr/eff_sample_size"] == pytest.approx(0.89436, abs=5e-6)


def test_chi2_of_responses_limits_the_log_ratio_and_not_its_double():
    def chi2(differences):
        train = torch.tensor(differences, dtype=torch.float64)
        count = len(differences)
        config = RolloutCorrectionConfig(mode="none", rejection=[], veto_threshold=None)
        ids, turns = torch.zeros(count, dtype=torch.long), torch.zeros(count)
        every = torch.ones(count, dtype=torch.bool)
        return rollout_correction(train, torch.zeros(count), every, ids, 1, turns, config).metrics[
            "rollout_corr/chi2_seq"
        ]

    assert chi2([6.0, 6.0]) == pytest.approx(math.exp(24) - 1)
    assert chi2([15.0, 15.0]) == pytest.approx(math.exp(40))


def test_remaining_metrics_by_their_definitions():
    metrics = correct_golden(rejection=["geometric_ratio 0.999 1.002"], veto_threshold=1e-4).metrics
    d = GOLDEN[:4]
    log_ppl = 1.0 - d.mean(1)
    expected = {
        "training_ppl": log_ppl.exp().mean(),
        "rollout_ppl": math.e,
        "training_log_ppl": log_ppl.mean(),
        "rollout_log_ppl": 1.0,
        "log_ppl_diff": -d.mean(1).mean(),
        "log_ppl_abs_diff": d.mean(1).abs().mean(),
        "log_ppl_diff_max": 3.0,
        "log_ppl_diff_min": -0.0015,
        "ppl_ratio": (-d.mean(1)).exp().mean(),
        "total_variation": (1 - d.exp()).abs().mean() / 2,
        "log_prob_abs_diff": d.abs().mean(),
        "masked_fraction": 0.5,
        "seq_masked_fraction": 0.5,
        "kl/first_turn": -d[:, :2].mean(),
        "kl/later_turns": -d[:, 2:].mean(),
        "kl/prob_0.1_0.5": 0.75,
        "is_weight_mean": 1.0,
        "is_weight_std": 0.0,
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(float(value), abs=1e-9), name
    # Every rollout probability is e^-1: a correlation with a constant is not reported.
    assert "rollout_corr/pearson" not in metrics
    assert not any("prob_0.5" in name for name in metrics)


def test_orientation_of_the_geometric_mask():
    """1 / rho_geo would keep C and drop B."""
    result = correct_golden(rejection=["geometric_ratio 0.999 1.002"])
    assert kept_per_row(result)[1:3] == [4, 0]


def test_cancelling_row_passes_geometric_but_not_paired_with_k3():
    rules = ["geometric_ratio 0.999 1.001", "sequence_mean_k3 0 0.01"]
    assert kept_per_row(correct_golden(rejection=rules)) == [0, 0, 0, 0, 0]
    assert kept_per_row(correct_golden(rejection=rules[:1])) == [4, 0, 0, 0, 0]


def test_rejection_works_without_weights_and_weights_without_rejection():
    off = correct_golden(mode="none", rejection=["sequence_ratio 0.5 2.0"])
    assert off.importance_weights[:16].tolist() == [1.0] * 16 and kept_per_row(off) == [4, 4, 4, 0, 0]
    on = correct_golden(level="sequence", mode="clip", lower=0.5, upper=1.001)
    assert kept_per_row(on) == [4, 4, 4, 4, 0]
    expected = GOLDEN[:4].sum(1).exp().clamp(0.5, 1.001)
    torch.testing.assert_close(on.importance_weights[:16:4], expected.float())
    assert on.importance_weights[16:].tolist() == [0.0] * 4


def test_every_rejected_token_has_the_first_reason_that_holds():
    rules = ["token_ratio 0.625 1.666", "geometric_ratio 0.999 1.0016"]
    result = correct_golden(veto_threshold=1e-4, rejection=rules, mode="mask", level="token", lower=0.5, upper=1.4)
    expected = [
        [WEIGHT_MASK, FIRST_RULE, 0, 0],  # exp(0.5) is inside the rule's bounds, and above those of the weights' mask
        [0] * 4,
        [FIRST_RULE + 1] * 4,
        [VETO] * 4,
        [0] * 4,
    ]
    assert result.rejected_by.view(5, 4).tolist() == expected
    assert torch.equal(result.rejected_by == 0, result.keep_mask | (ROWS == 4))
    broken = torch.tensor([0.0, math.nan])
    result = rollout_correction(
        broken, torch.zeros(2), torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1, torch.zeros(2),
        RolloutCorrectionConfig(mode="none", rejection=rules, veto_threshold=1e-4),
    )  # fmt: skip
    assert result.rejected_by.tolist() == [NOT_FINITE, NOT_FINITE]


def test_veto_is_strict_and_unclamped():
    d = torch.tensor([math.log(1e-4), -50.0], dtype=torch.float64)
    ids, mask = torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool)

    def kept(threshold):
        config = RolloutCorrectionConfig(rejection=[], veto_threshold=threshold)
        return correct_responses(d, torch.zeros_like(d), mask, ids, 2, config).keep_mask.tolist()

    assert kept(1e-4) == [True, False]
    assert kept(1.0001e-4) == [False, False]
    assert kept(math.exp(-40)) == [True, False]
    assert kept(math.exp(-60)) == kept(None) == [True, True]


def test_batch_filter_skips_and_counts():
    assert correct_golden(batch_k3_limit=0.70).skip_update
    assert correct_golden(batch_k3_limit=0.70).metrics["rollout_corr/skipped_updates"] == 1.0
    assert not correct_golden(batch_k3_limit=0.72).skip_update
    assert not correct_golden().skip_update


def test_batch_normalisation_over_kept_tokens():
    plain = correct_golden(mode="truncate", upper=2.0, rejection=["sequence_ratio 0.5 2.0"])
    result = correct_golden(mode="truncate", upper=2.0, rejection=["sequence_ratio 0.5 2.0"], batch_normalize=True)
    assert result.importance_weights[result.keep_mask].mean().item() == pytest.approx(1.0)
    scale = plain.importance_weights[plain.keep_mask].mean()
    torch.testing.assert_close(result.importance_weights, plain.importance_weights / scale)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_batch_normalisation_over_all(level):
    lengths = [1, 4, 2]
    train = torch.tensor([0.3, -0.2, 0.1, 0.4, -0.3, 0.6, 0.2], dtype=torch.float64)
    ids = torch.arange(3).repeat_interleave(torch.tensor(lengths))
    rules = ["sequence_ratio 0.9 1.2"]

    def weights(**settings):
        config = RolloutCorrectionConfig(level=level, mode="truncate", upper=1.5, rejection=rules, **settings)
        every = torch.ones(7, dtype=torch.bool)
        result = rollout_correction(train, torch.zeros(7), every, ids, 3, torch.zeros(7), config)
        assert 0 < int(result.keep_mask.sum()) < 7
        return result.importance_weights, result.keep_mask

    by_response = torch.stack([part.sum() for part in train.split(lengths)])
    if level == "token":
        mean = train.exp().clamp(max=1.5).mean()
    else:
        log_ratio = by_response if level == "sequence" else by_response / torch.tensor(lengths)
        mean = log_ratio.exp().clamp(max=1.5).mean()
    (plain, kept), (normalized, _) = weights(), weights(batch_normalize=True, batch_normalize_over="all")
    torch.testing.assert_close(normalized[kept], (plain / mean)[kept].float(), check_dtype=False)


def test_non_finite_log_probs_drop_their_response_alone():
    rollout = torch.full((6,), -1.0)
    train = torch.tensor([-1.0, -1.0, float("-inf"), -1.0, float("nan"), -1.0])
    ids = torch.tensor([0, 0, 1, 1, 2, 2])
    mask = torch.ones(6, dtype=torch.bool)
    config = RolloutCorrectionConfig(mode="truncate")
    result = rollout_correction(train, rollout, mask, ids, 3, torch.zeros(6), config)
    assert result.keep_mask.tolist() == [True, True, False, False, False, False]
    assert result.metrics["rollout_corr/nonfinite_tokens"] == 2
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert bool(torch.isfinite(result.importance_weights).all())


def test_nothing_sampled_at_all():
    none = torch.zeros(3, dtype=torch.bool)
    result = rollout_correction(
        torch.zeros(3), torch.zeros(3), none, torch.tensor([0, 0, 1]), 2, torch.zeros(3), RolloutCorrectionConfig()
    )
    assert not result.keep_mask.any() and not result.skip_update


def test_staleness_by_version_lag():
    rollout = torch.full((4,), -1.0)
    d = torch.tensor([0.0, 0.1, -0.2, 0.4])
    result = rollout_correction(
        rollout + d,
        rollout,
        torch.ones(4, dtype=torch.bool),
        torch.tensor([0, 0, 1, 1]),
        2,
        torch.zeros(4),
        RolloutCorrectionConfig(),
        weight_versions=torch.tensor([7, 6, 6, 2]),
        current_version=7,
    )
    metrics = result.metrics
    assert metrics["rollout_corr/staleness/mean"] == pytest.approx(7 / 4)
    assert metrics["rollout_corr/staleness/max"] == 5
    assert metrics["rollout_corr/kl/lag_0"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["rollout_corr/kl/lag_1"] == pytest.approx(0.05, abs=1e-6)
    assert metrics["rollout_corr/kl/lag_3_or_more"] == pytest.approx(-0.4, abs=1e-6)
    assert "rollout_corr/kl/lag_2" not in metrics


def random_batch(lengths, seed, spread=0.3):
    ids, mask = ragged(lengths, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(len(ids), generator=generator, dtype=torch.float64)
    train = rollout + spread * torch.randn(len(ids), generator=generator, dtype=torch.float64)
    return train, rollout, mask, ids, torch.randint(0, 3, (len(ids),), generator=generator)


def padded_statistic(name, train, rollout, mask, lengths):
    """Every rule's statistic on padded tensors, from the definitions; [N, longest]."""
    d, m = pad(train - rollout, lengths), pad(mask, lengths, False).bool()
    k = {"ratio": d, "k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[name.split("_")[-1]]
    n = m.sum(1, keepdim=True).clamp(min=1)
    if name.startswith("token"):
        value = k
    elif name == "geometric_ratio" or "_mean_" in name:
        value = (k * m).sum(1, keepdim=True) / n
    elif "_max_" in name:
        value = k.masked_fill(~m, -math.inf).max(1, keepdim=True).values
    else:
        value = (k * m).sum(1, keepdim=True)
    return (value.exp() if name.endswith("ratio") else value).expand_as(d)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_every_rule_equals_its_padded_formula(name):
    lengths = [5, 12, 1, 9, 7, 30]
    train, rollout, mask, ids, turns = random_batch(lengths, 3)
    statistic = unpad(padded_statistic(name, train, rollout, mask, lengths), lengths)
    middle = statistic[mask].median().item()
    for bounds, expected in (
        (f"{middle:.17g} inf", statistic >= middle),
        (f"-inf {middle:.17g}", statistic <= middle),
    ):
        config = RolloutCorrectionConfig(rejection=[f"{name} {bounds}"], veto_threshold=None)
        keep = rollout_correction(train, rollout, mask, ids, 6, turns, config).keep_mask
        # The bound itself may fall on either side of rounding.
        clear = (statistic - middle).abs() > 1e-12
        assert torch.equal(keep[clear], (expected & mask)[clear])
        assert 0 < keep.sum() < mask.sum()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=7),
    rules=st.lists(st.sampled_from(RULE_NAMES), max_size=3),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["none", "truncate", "clip", "mask"]),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_a_responses_result_does_not_depend_on_the_batch_around_it(lengths, rules, level, mode, seed, data):
    """Any order of responses, and any split over ranks or micro-batches."""
    config = RolloutCorrectionConfig(
        level=level, mode=mode, lower=0.8, upper=1.2, rejection=[f"{rule} -0.2 1.3" for rule in rules]
    )
    train, rollout, mask, ids, turns = random_batch(lengths, seed)
    whole = rollout_correction(train, rollout, mask, ids, len(lengths), turns, config)

    def part(rows):
        take = torch.cat([torch.nonzero(ids == row).squeeze(1) for row in rows])
        local = torch.arange(len(rows)).repeat_interleave(torch.tensor([lengths[row] for row in rows]))
        return take, rollout_correction(train[take], rollout[take], mask[take], local, len(rows), turns[take], config)

    order = data.draw(st.permutations(range(len(lengths))))
    take, permuted = part(order)
    assert torch.equal(permuted.keep_mask, whole.keep_mask[take])
    torch.testing.assert_close(permuted.importance_weights, whole.importance_weights[take])
    assert permuted.metrics == pytest.approx(whole.metrics, rel=1e-9, abs=1e-9)

    cut = data.draw(st.integers(1, len(lengths) - 1))
    for rows in (order[:cut], order[cut:]):
        take, piece = part(rows)
        assert torch.equal(piece.keep_mask, whole.keep_mask[take])
        torch.testing.assert_close(piece.importance_weights, whole.importance_weights[take])
        alone = correct_responses(train[take], rollout[take], mask[take], ids[take], len(lengths), config)
        assert torch.equal(alone.keep_mask, whole.keep_mask[take])
        assert torch.equal(alone.importance_weights, whole.importance_weights[take])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("geometric_ratio 0.9", "has 2 words"),
        ("geometrical_ratio 0.9 1.1", "the nearest is 'geometric_ratio'"),
        ("token_ratio low 2", "must be numbers"),
        ("token_ratio 2 1", "must not exceed"),
        ("token_ratio nan 1", "must not exceed"),
        ("sequence_ratio -2 -1", "would drop everything"),
        ("response my_rules.py:function 0 2", "begin it with what it drops, token or sequence"),
        ("token my_rules.py:function 0", "lacks its bounds"),
        ("token my_rules.py:function 0 2 32", "'32' is no keyword argument: write key=value"),
    ],
)
def test_bad_rules_are_refused_by_the_configuration(text, message):
    with pytest.raises(ValueError, match=message):
        parse_rejection_rule(text)
    with pytest.raises(ConfigError, match=f"algorithm.rollout_correction.rejection.*{message}"):
        load_config(None, [f"algorithm.rollout_correction.rejection=['{text}']"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["veto_threshold=2"], "veto_threshold"),
        (["mode=clip", "lower=2", "upper=1"], "lower=2.0 < upper=1.0"),
        (["bypass_old_log_probs=true", "mode=truncate"], "twice"),
        (["bypass_old_log_probs=true", "mode=none", "batch_k3_limit=0.1"], "batch_k3_limit"),
        (["bypass_old_log_probs=true", "mode=none", "denominator=post"], "denominator=post"),
    ],
)
def test_contradicting_settings_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [f"algorithm.rollout_correction.{override}" for override in overrides])


OWN = """
import torch
def spread(log_ratio, sequence_ids, num_sequences, *, power=2):
    sums = torch.zeros(num_sequences, dtype=torch.float64)
    return sums.index_add_(0, sequence_ids, log_ratio.abs().double() ** power)
def distance(log_ratio, sequence_ids, num_sequences):
    return log_ratio.abs()
def soft(ratio, *, upper, sharpness=1.0):
    return upper * torch.tanh(sharpness * ratio / upper), ratio < 10
def negative(ratio):
    return -ratio
def short(ratio):
    return ratio[:1]
"""


@pytest.fixture
def own(tmp_path):
    directory = tmp_path / "with a space"
    directory.mkdir()
    (directory / "my_correction.py").write_text(OWN)
    return directory


def test_rules_and_weights_of_ones_own(own):
    (own / "run.yaml").write_text(
        "algorithm:\n  rollout_correction:\n    mode: my_correction.py:soft\n    mode_kwargs: {sharpness: 2.0}\n"
        "    veto_threshold: null\n    rejection:\n"
        "      - sequence my_correction.py:spread 0 1 power=1\n      - token my_correction.py:distance 0 0.5\n"
    )
    correction = load_config(own / "run.yaml").algorithm.rollout_correction
    difference = torch.tensor([0.1, 0.2, 0.7, 0.1, 0.6, 0.6])
    owner = torch.tensor([0, 0, 1, 1, 2, 2])
    found = correct_responses(difference, torch.zeros(6), torch.ones(6, dtype=torch.bool), owner, 3, correction)
    # The third response's distances sum to more than 1; of the others one token is further than 0.5.
    assert found.keep_mask.tolist() == [True, True, False, True, False, False]
    expected = 2.0 * torch.tanh(difference.exp())
    torch.testing.assert_close(found.importance_weights, expected)
    load_config(own / "run.yaml").algorithm.dry_run()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("mode={}:negative", "negative or not finite"),
        ("mode={}:short", "returned a tensor .1.: return a weight for each of"),
        ("rejection=['sequence \"{}:distance\" 0 1']", "return a number for each of 6 sequences"),
        ("rejection=['token \"{}:spread\" 0 1 powr=3']", "has no parameter of that name; its own are power"),
    ],
)
def test_a_dry_run_refuses_corrections_that_give_no_number_for_each(own, override, message):
    override = override.format(own / "my_correction.py")
    config = load_config(None, [f"algorithm.rollout_correction.{override}"])
    with pytest.raises(ConfigError, match=message):
        config.algorithm.dry_run()


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ConfigError, match="'trunkate' is not one of truncate, none, clip, mask.*nearest is truncate"):
        load_config(None, ["algorithm.rollout_correction.mode=trunkate"])
