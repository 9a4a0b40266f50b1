"""All metrics of a train step, as `metrics.jsonl` and every sink have them: name, unit, meaning.

`paceline metrics --markdown` writes docs/metrics.md from this table. tests/e2e/test_metrics.py
compares it with what real runs write.
"""

from typing import NamedTuple


class MetricName(NamedTuple):
    """A metric, or several whose names differ in the parts in braces."""

    name: str
    unit: str
    meaning: str


def _rows(*rows: tuple[str, str, str]) -> tuple[MetricName, ...]:
    return tuple(MetricName(*row) for row in rows)


METRICS = _rows(
    ("wall_time_s", "s", "end of the step, in seconds since 1970"),
    ("sample_age_s", "s", "mean time from the start of a group to its train step"),
    ("reward/mean", "reward", "mean reward of the completions"),
    ("reward/std", "reward", "standard deviation of the rewards"),
    ("reward/uniform_group_fraction", "0–1", "groups whose completions all have the same reward"),
    ("reward_component/{name}", "reward", "mean of a component that the reward function returns"),
    ("reward_agent/{name}", "reward", "mean reward of one of several agents of an episode"),
    ("rollout/trajectories", "trajectories", "trained trajectories"),
    ("rollout/samples", "rows", "trained rows; a trajectory that is split has several"),
    ("rollout/tokens", "tokens", "trained tokens"),
    ("rollout/length_mean", "tokens", "mean trained tokens of a trajectory"),
    ("rollout/truncated_fraction", "0–1", "completions cut at rollout.max_response_length"),
    ("rollout/failed_groups", "groups", "groups that failed since the start of the run"),
    ("staleness/mean", "versions", "mean staleness of the groups"),
    ("staleness/max", "versions", "highest staleness of a group"),
    ("queue/utilization", "0–1", "used fraction of the message queue"),
    ("queue/dropped", "groups", "groups that the queue dropped since the start"),
    ("fleet/engines", "engines", "engines that get prompts"),
    ("fleet/completions_min", "completions", "completions of the engine that finished the fewest"),
    ("fleet/replaced", "workers", "rollout workers replaced since the start"),
    ("fleet/fenced_messages", "messages", "messages of replaced workers since the start"),
    ("fleet/tokens_prefilled", "tokens", "tokens that the native engines have prefilled"),
    ("fleet/tokens_reused", "tokens", "tokens that earlier turns left in their KV caches"),
    ("episode/turns_mean", "turns", "mean completions of a conversation with an environment"),
    ("episode/splits_mean", "splits", "mean context rewrites of a trajectory, each a new row"),
    ("episode/end_{reason}", "0–1", "conversations that ended for this reason"),
    ("device/total_s", "s", "time of all devices since the last step"),
    ("device/speed_of_light", "0–1", "fraction of the limit of lengths, placement and hardware"),
    ("device/{part}_s", "s", "seconds of devices by what they did, see device_time.md"),
    ("time/wait_s", "s", "waiting for a batch"),
    ("time/train_s", "s", "train step"),
    ("time/sync_s", "s", "weight sync"),
    ("time/evaluate_s", "s", "waiting for an evaluation"),
    ("time/validation_s", "s", "validation of a supervised run"),
    ("time/save_s", "s", "waiting for a checkpoint: its copy, and time/save_wait_s"),
    ("time/save_wait_s", "s", "waiting until the previous checkpoint is written"),
    ("train/loss", "loss", "loss, mean over the updates of the step"),
    ("train/grad_norm", "norm", "gradient norm before clipping, mean over the updates"),
    ("train/lr", "rate", "learning rate"),
    ("train/tokens", "tokens", "trained tokens"),
    ("train/updates", "updates", "optimizer steps"),
    ("train/updates_skipped", "updates", "optimizer steps skipped because a value was not finite"),
    ("train/skipped_groups", "groups", "groups of skipped updates since the start"),
    ("train/weights_changed", "0 or 1", "whether the step changed the weights"),
    ("train/busy_s", "s", "computing time of the actor"),
    ("train/flop_utilization", "0–1", "model FLOPs of training by the peak of the GPUs"),
    ("train/entropy", "nats", "entropy of the policy, mean over the tokens"),
    ("train/perplexity", "perplexity", "exp(loss) of a supervised step"),
    ("train/advantage_mean", "advantage", "mean advantage of the tokens"),
    ("train/advantage_std", "advantage", "standard deviation of the advantages"),
    ("train/advantage_zero_fraction", "0–1", "tokens with advantage 0"),
    ("train/ratio_mean", "ratio", "current / proximal policy, mean over the tokens"),
    ("train/ratio_max", "ratio", "current / proximal policy, highest value"),
    ("train/clip_fraction", "0–1", "tokens whose ratio the loss clips"),
    ("train/kl", "nats", "KL of the proximal policy to the current one"),
    ("train/kl_reference", "nats", "KL to the reference or teacher"),
    ("train/kl_coef", "factor", "coefficient of that KL"),
    ("train/logprob_diff_mean", "nats", "fresh tokens: mean |trainer − engine|, near 0"),
    ("train/logprob_diff_max", "nats", "fresh tokens: highest |trainer − engine|"),
    ("train/mismatch_kl", "nats", "fresh tokens: KL of engine and trainer"),
    ("train/mismatch_ratio_mean", "ratio", "fresh tokens: mean trainer / engine, near 1"),
    ("train/mismatch_ratio_max", "ratio", "fresh tokens: trainer / engine, highest value"),
    ("train/mismatch_outlier_fraction", "0–1", "fresh tokens whose log-probs differ by over 0.2"),
    ("train/stale_fraction", "0–1", "tokens of completions that are not fresh"),
    ("train/staleness_diff_mean", "nats", "stale tokens: mean |current − sampler|"),
    ("train/staleness_kl", "nats", "stale tokens: KL of sampler and current policy"),
    ("train/staleness_ratio_mean", "ratio", "stale tokens: current / sampler, mean"),
    ("train/staleness_ratio_max", "ratio", "stale tokens: current / sampler, highest value"),
    ("train/masked_fraction", "0–1", "tokens that the off-policy correction masks"),
    ("train/truncated_fraction", "0–1", "tokens whose weight the correction truncates"),
    ("train/offload_bytes", "bytes", "state moved between device and host memory"),
    ("train/offload_s", "s", "time of these moves"),
    ("critic/{name}", "as train/", "the same for the critic, for example critic/loss"),
    ("distill/kl", "nats", "log sampler − log teacher, mean over the tokens"),
    ("memory/rank_{n}_{phase}_bytes", "bytes", "peak of a phase on a rank, with several ranks"),
    ("memory/{phase}_bytes", "bytes", "highest peak of start, generate, train or sync"),
    ("evaluation/step", "step", "step whose weights the evaluation used"),
    ("evaluation/reward", "reward", "mean reward on held-out prompts"),
    ("evaluation/reward_max", "reward", "mean of the best completion of each prompt"),
    ("evaluation/reward_component/{name}", "reward", "mean of a component of the reward"),
    ("evaluation/pass@{n}", "0–1", "prompts solved within n completions"),
    ("evaluation/prompts", "prompts", "held-out prompts that were scored"),
    ("evaluation/failed", "prompts", "held-out prompts that failed and were left out"),
    ("evaluation/samples", "completions", "completions per prompt"),
    ("evaluation/tokens_mean", "tokens", "mean length of a completion"),
    ("evaluation/truncated_fraction", "0–1", "completions cut at the maximum length"),
    ("evaluation/seconds", "s", "duration of the evaluation"),
    ("validation/loss", "nats", "supervised runs: mean loss of a held-out token"),
    ("validation/perplexity", "perplexity", "exp(validation/loss)"),
    ("data/rows", "rows", "supervised runs: rows of the step"),
    ("data/tokens", "tokens", "supervised runs: tokens of the step, prompts included"),
)


INTRODUCTION = """\
# Metrics

Every train step writes these metrics to `metrics.jsonl` and to all sinks and trackers, under the
same names. Only MLflow has no `@` in names: `evaluation/pass@4` is `evaluation/pass_at_4` there. A
metric is left out where it has no value: without stale tokens there is no `train/staleness_kl`.
*Fresh* tokens belong to completions that the current version sampled.
[Trackers](customization.md#trackers) describes how to see the metrics.

`paceline metrics --markdown` writes this page from `paceline/observe/metric_names.py`.
"""


def markdown() -> str:
    """Return docs/metrics.md."""
    lines = [INTRODUCTION, "| Name | Unit | Meaning |", "|---|---|---|"]
    lines += [f"| `{m.name}` | {m.unit} | {m.meaning.replace('|', '&#124;')} |" for m in METRICS]
    return "\n".join(lines) + "\n"
