"""Algorithm presets: the settings behind each algorithm name. Explicit settings override them.

Every loss is a minimized mean, so a factor common to all tokens (rows, a constant length) only
scales the gradient. All presets deviate from the papers in three ways: there is no KL term unless
kl_coef is set (it needs a reference model; only distill sets it), there is one update per batch
unless epochs or mini_batches is set, and the sampling engine's log-probs stand for the old policy
unless `proximal` or `correction` is set.
"""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models. Shao et
    # al., 2024, arXiv:2402.03300.
    # Deviations: KL weight 0 instead of 0.04; sample standard deviation (n - 1) over the group.
    "grpo": {"advantage": "group", "normalize": "group", "loss": "clip", "aggregation": "sequence"},
    # Understanding R1-Zero-Like Training: A Critical Perspective. Liu et al., 2025,
    # arXiv:2503.20783.
    # Deviations: none known; the constant is the maximum completion length.
    "dr_grpo": {
        "advantage": "group",
        "normalize": "none",
        "loss": "clip",
        "aggregation": "constant",
    },
    # DAPO: An Open-Source LLM Reinforcement Learning System at Scale. Yu et al., 2025,
    # arXiv:2503.14476.
    # Deviations: the soft penalty covers the last fifth of the maximum completion length, which is
    # the paper's 4096 of 20480.
    "dapo": {
        "advantage": "group",
        "normalize": "group",
        "loss": "clip",
        "aggregation": "token",
        "clip_high": 0.28,
        "dynamic_sampling": True,
        "overlong": "penalty",
    },
    # Group Sequence Policy Optimization. Zheng et al., 2025, arXiv:2507.18071.
    # Deviations: the token form (GSPO-token), equal to the sequence form if all tokens of a
    # completion have the same advantage and weight. The clips are those of the paper's
    # experiments, for several updates per batch.
    "gspo": {
        "advantage": "group",
        "normalize": "group",
        "loss": "sequence_clip",
        "aggregation": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
    },
    # MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention. MiniMax, 2025,
    # arXiv:2506.13585.
    # Deviations: weights are bounded above by 5; the paper tunes this bound without giving it.
    # There is no lower bound, as in the paper.
    "cispo": {
        "advantage": "group",
        "normalize": "group",
        "loss": "cispo",
        "aggregation": "token",
        "clip_low": 1.0,
        "clip_high": 4.0,
    },
    # Soft Adaptive Policy Optimization. Gao et al., 2025, arXiv:2511.20347.
    # Deviations: none known.
    "sapo": {"advantage": "group", "normalize": "group", "loss": "sapo", "aggregation": "sequence"},
    # Proximal Policy Optimization Algorithms. Schulman et al., 2017, arXiv:1707.06347, with the
    # advantages of High-Dimensional Continuous Control Using Generalized Advantage Estimation.
    # Schulman et al., 2015, arXiv:1506.02438.
    # Deviations: advantages are whitened over the batch, the value loss is clipped, critic and
    # policy are separate models.
    "ppo": {"advantage": "gae", "normalize": "batch", "loss": "clip", "aggregation": "token"},
    # Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
    # LLMs. Ahmadian et al., 2024, arXiv:2402.14740.
    # Deviations: ratios are clipped, which has no effect on fresh data and bounds the step on
    # stale data.
    "rloo": {
        "advantage": "leave_one_out",
        "normalize": "none",
        "loss": "clip",
        "aggregation": "constant",
    },
    # REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization. Hu et
    # al., 2025, arXiv:2501.03262.
    # Deviations: normalization is over tokens, so long completions have more weight in the mean
    # and the standard deviation.
    "reinforce++": {
        "advantage": "return",
        "normalize": "batch",
        "loss": "clip",
        "aggregation": "token",
        "kl_placement": "reward",
        "kl_estimator": "k1",
    },
    # The same paper's variant for several completions per prompt: minus the group mean, KL in the
    # loss. Deviations: as for reinforce++.
    "reinforce++_baseline": {
        "advantage": "group",
        "normalize": "batch",
        "loss": "clip",
        "aggregation": "token",
        "kl_estimator": "k2",
    },
    # ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large
    # Language Models. Li et al., 2023, arXiv:2310.10505.
    # Deviations: ratios are clipped (see rloo); one advantage per completion even with the KL in
    # the reward.
    "remax": {
        "advantage": "greedy",
        "normalize": "none",
        "loss": "clip",
        "aggregation": "constant",
    },
    # On-Policy RL with Optimal Reward Baseline. Hao et al., 2025, arXiv:2505.23585.
    # Deviations: none known. OPO assumes fresh data: use max_staleness = 0 or set a correction.
    "opo": {
        "advantage": "length_weighted",
        "normalize": "none",
        "loss": "pg",
        "aggregation": "constant",
    },
    # Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning.
    # Williams, 1992.
    # Deviations: the baseline is the mean of the group.
    "pg": {"advantage": "group", "normalize": "none", "loss": "pg", "aggregation": "token"},
    # On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes. Agarwal et
    # al., 2023, arXiv:2306.13649, with reverse KL and only completions of the student.
    # Deviations: the KL of a token is estimated from the sampled token instead of summed over the
    # vocabulary, so its gradient is a policy gradient.
    "distill": {
        "advantage": "none",
        "normalize": "none",
        "loss": "clip",
        "aggregation": "token",
        "kl_coef": 1.0,
        "kl_placement": "advantage",
        "kl_estimator": "k1",
    },
}
