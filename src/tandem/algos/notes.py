"""What each row of the table is for, in words: one line, when to choose it, and which settings make a framework's variant.

Data for the `tandem algos` command; the formulas are the docstrings of the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Note:
    """line: what it does. choose: when. frameworks: what differs in each that ships it, as settings of this table."""

    line: str
    choose: str
    frameworks: Mapping[str, str] = field(default_factory=dict[str, str])


_GROUP_PEERS = {
    "verl": "aggregation=token-mean dual_clip=3.0 singleton=reward",
    "OpenRLHF": "std_eps=1e-9 aggregation=token-mean",
    "TRL": "std_eps=1e-4 aggregation=token-mean kl_gradient=weighted",
    "AReaL": "std_eps=1e-5 aggregation=token-mean",
    "NeMo-RL": "leave_one_out=true aggregation=token-mean kl_coef=0.01",
    "SkyRL": "aggregation=token-mean dual_clip=3.0 singleton=reward kl_coef=0.001",
    "slime": "aggregation=seq-mean-token-mean",
    "ROLL": "aggregation=seq-mean-token-mean",
}

NOTES: dict[str, Note] = {
    "grpo": Note(
        "Group-normalised advantages, clipped ratio, mean over responses.",
        "The place to start. kl_coef=0.04 gives the paper's KL term.",
        _GROUP_PEERS,
    ),
    "dr_grpo": Note(
        "GRPO without its divisions by deviation and by length.",
        "Where responses should not grow for the sake of the loss. length_constant is the longest response.",
        {
            "verl": "norm_adv_by_std_in_grpo=False with length_constant = padded width",
            "TRL": "scale_rewards=none loss_type=dr_grpo, length_constant = max_completion_length",
            "OpenRLHF": "dr_grpo",
        },
    ),
    "dapo": Note(
        "GRPO with a higher upper clip, token mean, and groups of equal rewards left out.",
        "Long reasoning, where GRPO's entropy falls too fast. For its penalty on overlong answers see rollout.shaping.",
        {"verl": "dual_clip=3.0 singleton=reward", "TRL": "std_eps=1e-4 (its default loss_type)"},
    ),
    "gspo": Note(
        "One importance ratio for a whole response: its geometric mean.",
        "Mixture-of-experts models and other cases where single-token ratios are noise.",
        {
            "verl": "gradient=token; 0.9.1 aggregates by token-mean unless told otherwise",
            "SkyRL": "gradient=token",
            "OpenRLHF": "gradient=sequence",
            "TRL": "gradient=sequence std_eps=1e-4",
            "slime": "gradient=sequence",
            "NeMo-RL": "gradient=sequence",
            "ROLL": "gradient=sequence",
            "AReaL": "gradient=sequence std_eps=1e-5",
        },
    ),
    "luspo": Note(
        "GSPO in which long responses count for their length.",
        "Where GSPO shortens responses that should be long.",
        {"TRL": "loss_type=luspo, std_eps=1e-4"},
    ),
    "gmpo": Note(
        "The geometric mean of one-sidedly clipped ratios, times the advantage.",
        "Like GSPO, less sensitive to single tokens with extreme ratios.",
        {"verl": "the defaults", "TRL": "the defaults"},
    ),
    "cispo": Note(
        "REINFORCE with a clipped and detached importance weight: no token loses its gradient.",
        "Several updates on one batch, where rare and decisive tokens would be clipped away.",
        {
            "SkyRL": "the defaults",
            "TRL": "clip_low=1.0; its epsilon_high is 1 + clip_high",
            "verl": "clip_low=0.2 clip_high=0.2",
            "slime": "clip_low=0.2 clip_high=0.2",
            "NeMo-RL": "clip_low=0.2 clip_high=0.2",
            "ROLL": "clip_low=0.1 clip_high=0.1",
        },
    ),
    "sapo": Note(
        "A sigmoid gate around ratio 1 in place of a clip.",
        "Where hard clipping makes updates jumpy.",
        {"verl": "the defaults", "TRL": "the defaults", "AReaL": "aggregation=token-mean", "ROLL": "the defaults"},
    ),
    "vespo": Note(
        "REINFORCE weighed by a smooth function of the whole response's ratio.",
        "Stale batches whose products of ratios explode under plain sequence weights.",
        {"TRL": "loss_type=vespo, std_eps=1e-4"},
    ),
    "kl_cov": Note(
        "A penalty on the few tokens that drive entropy down.",
        "When entropy collapses early.",
        {"verl": "cov_kl_coef=0.1 cov_frac=2e-4", "SkyRL": "cov_frac=0.2"},
    ),
    "clip_cov": Note(
        "No gradient for a few random tokens of those that drive entropy down.",
        "When entropy collapses early and a penalty is not wanted.",
        {"verl": "cov_frac=2e-4 cov_low=1 cov_high=5"},
    ),
    "dppo_tv": Note(
        "A trust region on probabilities, |p - q|, in place of one on ratios.",
        "Large vocabularies, where the ratio of a rare token says little about how far the policy moved.",
        {"verl": "ratio_cap = clip_ratio_c", "SkyRL": "surrogate=ratio ratio_cap=null", "prime-rl": "see prime_rl"},
    ),
    "dppo_kl": Note(
        "As dppo_tv, with the two-outcome KL divergence.",
        "As dppo_tv; stricter for tokens that were certain.",
        {"verl": "ratio_cap = clip_ratio_c"},
    ),
    "prime_rl": Note(
        "dppo_tv against the sampler's logprobs, plus a small pull back to them.",
        "Asynchronous runs as prime-rl does them.",
        {"prime-rl": "the defaults; its ipo loss is sides=both clip_low=0.1 clip_high=0.1"},
    ),
    "topr": Note(
        "Plain REINFORCE on what succeeded, a tapered weight on what failed.",
        "Old or mixed data, where failures may be far from the policy.",
        {"ROLL": "topr"},
    ),
    "dro": Note(
        "REINFORCE with a squared log-ratio as the trust region.",
        "Off-policy data without clipping.",
        {"verl": "the defaults", "ROLL": "the defaults"},
    ),
    "importance_sampling": Note(
        "Advantage times importance ratio, summed, with no clip at all.",
        "One step a batch, from a sampler that may be a little stale.",
        {"Tinker": "the defaults", "SkyRL": "the defaults"},
    ),
    "reinforce_tis": Note(
        "REINFORCE with an importance weight truncated at 1.",
        "Stale samples whose weights should never amplify.",
        {"ROLL": "the defaults"},
    ),
    "opo": Note(
        "The group's length-weighted mean as the baseline.",
        "Exactly on-policy training; the baseline of least variance under its assumptions.",
        {"verl": "adv_estimator=opo"},
    ),
    "gpg": Note(
        "REINFORCE on group-centred rewards, scaled up by the share of zero rewards.",
        "A simple on-policy baseline without any ratio.",
        {"verl": "adv_estimator=gpg loss_mode=gpg"},
    ),
    "maxrl": Note(
        "Centred rewards over the group's mean: rare successes weigh more.",
        "Hard tasks with rewards 0 and 1; approaches maximum likelihood of success.",
        {"SkyRL": "the defaults", "prime-rl": "mean_eps=0"},
    ),
    "passk": Note(
        "Only a group's best response learns, by its lead over the second.",
        "When pass@k counts and not pass@1.",
        {"verl": "adv_estimator=grpo_passk"},
    ),
    "gdpo": Note(
        "Each reward component normalised within its group before they are summed.",
        "Several rewards of different scale: RewardResult.components, named in order by reward.components.",
        {"verl": "the defaults", "TRL": "normalises once more over rows, not tokens", "NeMo-RL": "over rows, without epsilon"},
    ),
    "rloo": Note(
        "The mean of a response's companions as its baseline: unbiased.",
        "Small groups, and whenever an unbiased gradient matters.",
        {"verl": "singleton=reward", "TRL": "loss of sequence_clip with ratio=product", "SkyRL": "the defaults"},
    ),
    "reinforce_pp_baseline": Note(
        "Group-centred rewards, whitened over the whole batch.",
        "Groups whose deviations are too noisy to divide by.",
        {
            "verl": "singleton=reward whiten_ddof=1",
            "slime": "whiten_ddof=1",
            "OpenRLHF": "whiten_ddof=0",
            "NeMo-RL": "whiten_ddof=0",
        },
    ),
    "otb": Note(
        "A baseline for each position, weighed by the score's squared length.",
        "Long responses, where one baseline for all positions leaves much variance.",
        {"verl": "adv_estimator=optimal_token_baseline"},
    ),
    "reinforce": Note(
        "The policy gradient itself: reward times score, no baseline.",
        "As a reference, and for rewards that are centred already.",
        {"verl": "bypass mode with loss_type=reinforce: bypass=true, its weights a correction"},
    ),
    "reinforce_pp": Note(
        "Discounted token returns, whitened over the whole batch; no group, no critic.",
        "One response a prompt; KL in the reward by reward_kl_coef.",
        {
            "OpenRLHF": "whiten_ddof=0 reward_kl_coef=0.01",
            "verl": "whiten_ddof=1 dual_clip=3.0",
            "NeMo-RL": "whiten_ddof=0",
            "SkyRL": "whiten_ddof=1; its returns reset across tool tokens",
            "ROLL": "whiten_ddof=1; its discount counts masked tokens",
        },
    ),
    "flash_reinforce": Note(
        "Rewards less the batch's mean, with rows dropped that the sampler and the trainer disagree on.",
        "One response a prompt, one update a batch, a fast engine with its own numerics.",
        {"OpenRLHF": "is_correction level=seq gating=binary_kl mode=mask, high = delta"},
    ),
    "remax": Note(
        "The greedy answer's reward as the baseline: unbiased.",
        "Few responses a prompt: each group costs a greedy rollout more, whose reward is column reward_baselines.",
        {"verl": "adv_estimator=remax with the PPO loss"},
    ),
    "sppo": Note(
        "Log-ratios regressed on soft-centred rewards.",
        "Preferences as win rates rather than rewards.",
        {"verl-recipe": "the defaults"},
    ),
    "ppo": Note(
        "A critic's advantages, whitened, and the clipped ratio.",
        "Dense or token rewards, and when a critic is affordable.",
        {"verl": "dual_clip=3.0", "OpenRLHF": "whiten_ddof=0 reward_kl_coef=0.01", "ROLL": "lam=0.95", "NeMo-RL": "kl_coef=0.01"},
    ),
    "turn_ppo": Note(
        "PPO in which each turn of a conversation is one action: its tokens share an advantage.",
        "Agents with tools or environments, where what a turn led to counts and not each of its tokens; needs column values.",
    ),
    "pf_ppo": Note(
        "PPO on episodes that are drawn anew, the ones with extreme rewards more often.",
        "Noisy reward models, whose extreme scores are the reliable ones; needs column values. Any row takes resampling=pow.",
        {"verl": "use_pf_ppo with reweight_method=pow weight_pow=2.0 and dual_clip=3.0"},
    ),
    "vapo": Note(
        "PPO with a length-adaptive lambda and imitation of correct responses.",
        "Long reasoning, with a critic that is trained first: critic.warmup_steps.",
        {"NeMo-RL": "its NLL is normalised a micro-batch at a time", "AReaL": "one adaptive lambda for critic and policy"},
    ),
    "prime": Note(
        "Dense rewards of an implicit process model beside the outcome.",
        "Outcome labels, and room for a process model that learns with the policy.",
        {"verl-recipe": "the defaults"},
    ),
    "opd": Note(
        "The teacher's logprob less the student's as each token's advantage.",
        "A stronger teacher with the same tokenizer: teacher.path.",
        {"NeMo-RL": "the defaults", "verl": "dual_clip=3.0 advantage_clamp=10.0"},
    ),
    "prime_rl_opd": Note(
        "The policy gradient of the reverse KL to the teacher, by the ratio to the sampler, inside a one-sided trust region.",
        "opd in asynchronous runs as prime-rl does them: teacher.path. Its credit is that of the current policy, each step anew.",
        {"prime-rl": "the defaults"},
    ),
    "mopd": Note(
        "A group's reward advantage plus the teacher's pull.",
        "A reward and a teacher at once: teacher.path.",
        {"slime": "distillation_coef=1.0", "ROLL": "distillation_coef=1.0"},
    ),
    "value": Note(
        "The objective of a critic, not of a policy: regression on returns, clipped around what it said before the update.",
        "A policy uses ppo or vapo, whose critic it trains; critic.* are its parameters.",
        {
            "verl": "the defaults",
            "OpenRLHF": "the defaults",
            "SkyRL": "value_clip=0.2 aggregation=seq-mean-token-mean",
            "slime": "value_clip=0.2 value_scale=1.0",
            "AReaL": "the defaults, or huber_delta=10.0",
        },
    ),
    "implicit_prm": Note(
        "The objective of a process model, not of a policy: it learns from outcomes alone.",
        "A policy uses prime, whose process_model it trains; process_model.* are its parameters.",
        {"verl-recipe": "the defaults (beta_train is implicit_beta)"},
    ),
    "sft": Note(
        "Maximum likelihood of demonstrations.",
        "Before RL, or instead of it.",
        {
            "verl": "aggregation=token-mean; so do OpenRLHF, NeMo-RL and prime-rl",
            "slime": "aggregation=seq-mean-token-mean",
        },
    ),
    "kd": Note(
        "The student matches the teacher's likeliest tokens on given responses.",
        "A teacher with the same tokenizer and good responses; one pass of it a response, and no sampling.",
        {
            "verl": "direction=forward logprob_floor=-10.0 loss_clamp=10.0, on its samples: opd_topk",
            "NeMo-RL": "direction, mixed_weight; floor=false",
        },
    ),
    "gkd": Note(
        "A divergence between KL(T, S) and KL(S, T), on given responses.",
        "Where forward KL spreads the student over more than it can hold; jsd_beta=0.1 to 0.9 leans either way.",
        {"TRL": "GKDTrainer lmbda=0; topk is the vocabulary there"},
    ),
    "opd_loss": Note(
        "An estimate of KL(student, teacher) on the student's samples, with the KL's own gradient.",
        "On-policy distillation without a ratio or a clip. Needs no reward.",
        {
            "verl": "distillation_gradient=direct loss_clamp=10.0, with k2 or k3 as its loss_mode",
            "AReaL": "distillation_coef=0.005 beside its policy loss: grpo_opd",
        },
    ),
    "opd_topk": Note(
        "The student matches the teacher's likeliest tokens on its own samples.",
        "More signal a token than opd, for K numbers a token. Needs no reward.",
        {"verl": "direction=forward logprob_floor=-10.0 loss_clamp=10.0", "NeMo-RL": "direction=mixed floor=false"},
    ),
    "opd_jsd": Note(
        "GKD on the student's own samples.",
        "As opd_topk, with a divergence that is bounded.",
        {"TRL": "GKDTrainer lmbda=1"},
    ),
    "grpo_opd": Note(
        "GRPO with a pull towards the teacher in the loss.",
        "A reward and a teacher at once, where mopd adds the teacher to the advantage.",
        {"AReaL": "distillation_coef=0.005", "verl": "distillation_coef=1.0"},
    ),
    "dpo": Note(
        "The chosen response is made likelier than the rejected one, measured against the reference.",
        "Pairs with a preference, and nothing to score samples with. beta is how close to stay; nll_coef keeps the chosen likely.",
        {
            "TRL": "the defaults (loss_type=sigmoid); it ignores label_smoothing there; rpo_alpha is nll_coef",
            "OpenRLHF": "the defaults",
            "ROLL": "the defaults",
            "NeMo-RL": "beta=0.05; its SFT term is nll_coef",
        },
    ),
    "cdpo": Note(
        "DPO that takes a share label_smoothing of the labels to be wrong.",
        "Noisy labels: the margin stops growing where the odds are those of the noise.",
        {"OpenRLHF": "label_smoothing as given", "ROLL": "label_smoothing as given"},
    ),
    "robust_dpo": Note(
        "DPO whose expected loss is that of the clean labels, when a share label_smoothing of them is flipped.",
        "Noisy labels whose rate is known. Its loss may be negative.",
        {"TRL": "loss_type=robust with its label_smoothing"},
    ),
    "ipo": Note(
        "The margin is regressed on 1 / (2 beta), and not driven up for ever.",
        "Labels that are nearly deterministic, which DPO overfits.",
        {
            "TRL": "loss_type=ipo; per_token=true",
            "AReaL": "per_token=true",
            "OpenRLHF": "the defaults",
            "ROLL": "the defaults",
        },
    ),
    "hinge": Note(
        "A pair whose margin is wide enough has no gradient.",
        "Where the model should change no more than the ranking asks for.",
        {"TRL": "loss_type=hinge"},
    ),
    "sppo_hard": Note(
        "The chosen response's log-ratio is regressed on 1 / (2 beta), the rejected one's on its negative.",
        "Pairs with hard labels from a judge, one round of self-play after the other.",
        {"TRL": "loss_type=sppo_hard"},
    ),
    "reward_model": Note(
        "A model with a scalar head learns to score the chosen response above the rejected one.",
        "Pairs, and the wish for a score of any response. Trains a model of values, not a policy.",
        {"TRL": "RewardTrainer; center_rewards_coefficient is centre_coef, and the score is the value after the last token"},
    ),
}
