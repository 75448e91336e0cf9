from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.algos import functions
from tandem.algos.columns import advantages, loss_ref, step_columns
from tandem.algos.filters import varied_rewards
from tandem.algos.functions import keep_function
from tandem.algos.table import ALGORITHMS, configure
from tandem.algos.terms import LossInputs, TokenLoss
from tandem.errors import ConfigError, RegistryError
from tandem.types import Algorithm, Metrics

REQUIRED = {"dr_grpo": {"length_constant": 64}}
HERE = "tests.algos.test_table"


def scaled_loss(inputs: LossInputs, *, factor: float) -> TokenLoss:
    return TokenLoss({"scaled": factor * inputs.policy_logprobs}, Metrics())


def reads_values(inputs: LossInputs) -> TokenLoss:
    return TokenLoss({"hidden": inputs.token("values")}, Metrics())


MINE = Algorithm("mine", "this test", {}, None, f"{HERE}:scaled_loss")
GREEDY = Algorithm("greedy", "this test", {}, None, f"{HERE}:reads_values")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_row_runs_with_its_defaults(name: str) -> None:
    algorithm = configure(name, REQUIRED.get(name))
    assert algorithm.name == name
    assert algorithm.source
    assert algorithm.needs >= {"tokens", "mask", "temperature"}
    assert algorithm.params.keys() == ALGORITHMS[name].params.keys()
    assert configure(name, algorithm.params) == algorithm


def test_rows_are_what_their_papers_say() -> None:
    grpo, dapo = configure("grpo"), configure("dapo")
    assert (grpo.params["scale"], grpo.params["aggregation"], grpo.keep) == ("group", "seq-mean-token-mean", None)
    assert (dapo.params["clip_high"], dapo.params["aggregation"], dapo.keep) == (0.28, "token-mean", "varied_rewards")
    dr = configure("dr_grpo", REQUIRED["dr_grpo"])
    assert (dr.params["scale"], dr.params["aggregation"]) == ("none", "seq-mean-token-sum-norm")
    sft = configure("sft")
    assert (sft.advantage, sft.loss, sft.needs) == (None, "nll", {"tokens", "mask", "temperature"})


def test_a_kl_term_needs_the_reference() -> None:
    assert "ref_logprobs" not in configure("grpo").needs
    assert "ref_logprobs" in configure("grpo", {"kl_coef": 0.04}).needs
    assert "kl_coef" not in configure("grpo", {"kl_coef": 0.04}).needs
    assert {"ref_logprobs", "kl_coef"} <= configure("grpo", {"kl_coef": 0.04, "kl_target": 0.1}).needs


def test_dynamic_sampling_is_a_parameter() -> None:
    assert configure("grpo", {"keep": "varied_rewards"}).keep == "varied_rewards"
    assert configure("dapo", {"keep": None}).keep is None
    assert keep_function("varied_rewards") is varied_rewards


def test_parameters_reach_their_functions() -> None:
    algorithm = configure("grpo", {"clip_high": 0.5, "scale": "none", "aggregation": "token-sum"})
    assert loss_ref(algorithm).name == "ppo_clip+kl"
    assert loss_ref(algorithm).params.keys() == {
        *("clip_low", "clip_high", "dual_clip", "ratio_cap", "log_ratio_clamp"),
        *("kl_coef", "kl_estimator", "kl_gradient", "kl_target", "kl_horizon"),
    }
    assert loss_ref(algorithm).params["clip_high"] == 0.5
    assert advantages(algorithm, torch.tensor([1.0, 0.0]), torch.tensor([4, 4])).tolist() == [0.5, -0.5]
    rows = {"mask": torch.tensor([False, True]), "lengths": torch.tensor([2])}
    assert step_columns(algorithm, rows)["loss_weights"].tolist() == [0, 1]


def test_all_wrong_parameters_are_named_at_once_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        configure("grpo", {"clip_hihg": 0.3, "clip_low": "a lot", "ddof": 2, "kl_coef": True, "gamma": 1})
    message = str(caught.value)
    assert "no parameter 'clip_hihg'; did you mean clip_high?" in message
    for name in ("clip_low='a lot'", "ddof=2", "kl_coef=True", "'gamma'; it has aggregation"):
        assert name in message


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("dr_grpo", {}, "needs length_constant"),
        ("grpo", {"length_constant": 5.0}, "does not use length_constant"),
        ("grpo", {"kl_coef": 0.1, "kl_estimator": "k1"}, "does not work inside a loss"),
        ("grpo", {"dual_clip": 0.5}, "above 1"),
        ("grpo", {"scale": "batch", "leave_one_out": True}, "choose one"),
        ("sft", {"keep": "varied_rewards"}, "only if it has groups"),
        ("sft", {"clip_low": 0.1}, "no parameter 'clip_low'"),
    ],
)
def test_nonsense_is_refused_with_the_reason(name: str, params: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        configure(name, params)  # type: ignore[arg-type]


INF, NAN = float("inf"), float("nan")
THRESHOLDS = ("0", "-1", "nan", "inf", "abc", "", "0.5_", "_2", "1_2_3", "2_0.5")
REFUSED: list[tuple[str, str, tuple[object, ...]]] = [
    *(
        (name, "log_ratio_clamp", (-1.0, 0.0, NAN, INF))
        for name in ("grpo", "gmpo", "gspo", "kl_cov", "clip_cov", "sapo", "cispo", "importance_sampling", "dppo_tv", "dppo_kl")
    ),
    *((name, "log_ratio_clamp", (-1.0, 0.0)) for name in ("reinforce_tis", "topr", "prime_rl")),
    ("grpo", "ddof", (True, False, 2, 1.0)),
    ("grpo", "resampling_pow", (-1.0, 0.0, NAN, INF)),
    ("ppo", "reward_kl_coef", (-0.1, NAN, INF)),
    ("mopd", "distillation_coef", (-0.1, NAN, INF)),
    ("opd", "advantage_clamp", (-1.0, 0.0, NAN, INF)),
    *((name, "loss_clamp", (-1.0, 0.0, NAN, INF)) for name in ("kd", "opd_topk", "opd_loss", "grpo_opd")),
    ("maxrl", "mean_eps", (-1e-6, NAN, INF)),
    ("passk", "std_eps", (-1e-6, NAN, INF)),
    ("gdpo", "std_eps", (-1e-6, NAN)),
    ("gdpo", "reward_weights", ([], [NAN], [INF], [NAN, 1.0])),
    ("otb", "baseline_eps", (-1e-8, NAN, INF)),
    ("reinforce_pp", "whiten_eps", (-1e-8, NAN, INF)),
    ("prime", "process_coef", (-1.0, NAN, INF)),
    ("prime", "outcome_coef", (-1.0, NAN, INF)),
    ("prime", "implicit_beta", (-1.0, 0.0, NAN, INF)),
    ("implicit_prm", "implicit_beta", (-1.0, 0.0, NAN, INF)),
    ("sppo", "soft_mean_beta", (-1.0, 0.0, NAN, INF)),
    ("value", "value_scale", (-0.5, 0.0, NAN, INF)),
    ("value", "huber_delta", (-1.0, 0.0, NAN, INF)),
    ("grpo", "kl_estimator", ("k1", "abs")),
    *((name, "kl_coef", (-0.1, NAN, INF, 1e300)) for name in ("grpo", "gspo")),
    ("grpo", "clip_high", (-0.1, NAN, INF, 1e300)),
    ("grpo", "kl_target", (-1.0, 0.0, 0.1, NAN)),
    ("grpo", "kl_horizon", (0, -1)),
    ("ppo", "reward_kl_target", (-1.0, 0.0, 0.1, NAN)),
    ("ppo", "reward_kl_horizon", (0, -1)),
]
REFUSED_IN_CORRECTIONS: list[tuple[str, str, tuple[object, ...]]] = [
    *(
        (name, "log_ratio_clamp", (-1.0, 0.0, NAN, INF))
        for name in ("token_tis", "icepop", "kpop", "token_trust_region", "sequence_mask", "seq_mask_tis", "sequence_trust_region")
    ),
    *((name, "high", (-1.0, 0.0, NAN, INF)) for name in ("token_tis", "seq_tis", "icepop", "kpop", "sequence_trust_region")),
    ("icepop", "low", (None, -1.0, 9.0, NAN)),
    ("kpop", "probability_floor", (-0.1, 0.0, 0.5, 1.0, NAN)),
    ("m2po", "m2_threshold", (0.0, NAN)),
    ("off_policy_sequence_mask", "delta", (NAN, INF)),
    ("rejection_sampling", "mode", ("token_k4", "seq_max_k1", "")),
    ("rejection_sampling", "threshold", THRESHOLDS),
]


@pytest.mark.parametrize(("row", "parameter", "value"), [(row, name, each) for row, name, values in REFUSED for each in values])
def test_a_parameter_out_of_range_is_refused_by_its_name(row: str, parameter: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"\b{parameter}\b"):
        configure(row, {parameter: value})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("correction", "parameter", "value"), [(one, name, each) for one, name, values in REFUSED_IN_CORRECTIONS for each in values]
)
def test_so_is_one_of_a_correction_by_its_whole_name(correction: str, parameter: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"correction\.{correction}\.{parameter}\b"):
        configure("grpo", {"correction": {correction: {parameter: value}}})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", [None, 3, "high"])
def test_a_correction_has_a_mapping_of_parameters(value: object) -> None:
    with pytest.raises(ConfigError, match=r"correction\.icepop=.*a mapping of its parameters"):
        configure("grpo", {"correction": {"icepop": value}})  # type: ignore[dict-item]


def test_every_correction_is_looked_at() -> None:
    with pytest.raises(ConfigError) as caught:
        configure(
            "grpo", {"correction": {"icepop": 3, "kpop": {"low": 0.1, "hihg": 1.0}, "off_policy_sequence_mask": {"low": 0.1}}}
        )
    problems = str(caught.value).splitlines()
    assert [each for each in problems if "a mapping of its parameters" in each and "icepop" in each]
    assert [each for each in problems if "kpop is a bound on a divergence" in each]
    assert [each for each in problems if "kpop has no parameter 'hihg'; did you mean high?" in each]
    assert [each for each in problems if "off_policy_sequence_mask has no parameter 'low'" in each]
    assert len(problems) == 4


def test_the_largest_float32_is_a_number_and_what_is_above_is_none() -> None:
    largest = torch.finfo(torch.float32).max
    assert configure("cispo", {"clip_high": largest}).params["clip_high"] == largest
    with pytest.raises(ConfigError, match="it must be finite, in float32"):
        configure("cispo", {"clip_high": 2 * largest})


def test_what_every_policy_row_takes() -> None:
    chosen = configure("grpo").params
    assert {name: chosen[name] for name in ("correction", "denominator", "bypass", "resampling", "resampling_pow")} == {
        "correction": None,
        "denominator": "all",
        "bypass": False,
        "resampling": None,
        "resampling_pow": 2.0,
    }


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("threshold", [*THRESHOLDS[1:], "0.5_2.0"])
def test_a_threshold_of_a_divergence_is_one_number(estimator: str, threshold: str) -> None:
    mode = f"seq_mean_{estimator}"
    with pytest.raises(ConfigError, match=rf"correction\.rejection_sampling\.threshold='{threshold}' of mode {mode}"):
        configure("grpo", {"correction": {"rejection_sampling": {"mode": mode, "threshold": threshold}}})


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(RegistryError, match=r"algorithm 'gprpo'.*did you mean 'grpo'"):
        configure("gprpo")
    with pytest.raises(RegistryError, match=r"group filter 'varied_reward'.*did you mean 'varied_rewards'"):
        configure("grpo", {"keep": "varied_reward"})


def test_an_algorithm_of_ones_own_by_path() -> None:
    with pytest.raises(ConfigError, match="needs a value for factor"):
        configure(f"{HERE}:MINE")
    algorithm = configure(f"{HERE}:MINE", {"factor": 2.0})
    assert loss_ref(algorithm).params == {"factor": 2.0}
    with pytest.raises(ConfigError, match="must be a tandem"):
        configure(f"{HERE}:scaled_loss")
    assert configure(f"{HERE}:GREEDY").needs == {"tokens", "mask", "temperature", "values"}
    with pytest.raises(ConfigError, match="cannot be called"):
        functions.loss_function(f"{HERE}:MINE")


@pytest.mark.parametrize(
    ("rewards", "keeps"), [([1, 1, 1], False), ([0.1] * 7, False), ([1, 0, 1], True), ([1], False), ([], False)]
)
def test_varied_rewards(rewards: list[float], keeps: bool) -> None:
    given: Tensor = torch.tensor(rewards, dtype=torch.float32)
    assert varied_rewards(given) is keeps
