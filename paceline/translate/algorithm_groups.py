"""Settings of verl about the algorithm that are translated together."""

from typing import Any

from paceline.translate.source import ACTOR, MODEL, Source

CORRECTION = "algorithm.rollout_correction."
OVERLONG = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "custom_reward_function.overlong_buffer.",
)
ESTIMATORS = {
    "gae": "ppo",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce++",
    "reinforce_plus_plus_baseline": "reinforce++_baseline",
    "opo": "opo",
    "gpg": "pg",
}
LOSSES = {
    "vanilla": "clip",
    "gspo": "sequence_clip",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": "pg",
}
AGGREGATIONS: dict[str, dict[str, Any]] = {
    "token-mean": {"algorithm.aggregation": "token"},
    "seq-mean-token-mean": {"algorithm.aggregation": "sequence"},
    "seq-mean-token-sum": {"algorithm.aggregation": "constant", "algorithm.constant_length": 1},
    "seq-mean-token-sum-norm": {"algorithm.aggregation": "constant"},
}
KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def algorithm(source: Source) -> dict[str, Any]:
    """Translate estimator, loss and aggregation."""
    found: dict[str, Any] = {}
    for name, setting, known in (
        ("algorithm.adv_estimator", "algorithm.name", ESTIMATORS),
        (f"{ACTOR}policy_loss.loss_mode", "algorithm.loss", LOSSES),
    ):
        value = source.get(name)
        if value is not None and str(value) not in known:
            source.reject(name, f"expected one of {', '.join(known)}")
        elif value is not None:
            found[setting] = known[str(value)]
    preset = found.get("algorithm.name", source.base("algorithm.name", "grpo"))
    if source.get("algorithm.norm_adv_by_std_in_grpo") is False and preset == "grpo":
        found["algorithm.normalize"] = "none"
    mode = str(source.get(f"{ACTOR}loss_agg_mode", default=""))
    if mode and mode not in AGGREGATIONS:
        source.reject(f"{ACTOR}loss_agg_mode", f"expected one of {', '.join(AGGREGATIONS)}")
    found |= AGGREGATIONS.get(mode, {})
    scale = source.get(f"{ACTOR}loss_scale_factor")
    if scale is not None and found.get("algorithm.aggregation") == "constant":
        found["algorithm.constant_length"] = scale
    return found


def clip(source: Source) -> dict[str, Any]:
    ratio = source.get(f"{ACTOR}clip_ratio")
    low, high = source.get(f"{ACTOR}clip_ratio_low"), source.get(f"{ACTOR}clip_ratio_high")
    found = {"algorithm.clip_low": ratio if low is None else low}
    found["algorithm.clip_high"] = ratio if high is None else high
    return {name: value for name, value in found.items() if value is not None}


def kl(source: Source) -> dict[str, Any]:
    """Translate the KL to the reference model: in the loss or in the reward."""
    in_loss, in_reward = f"{ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"
    if source.get(in_loss) and source.get(in_reward):
        source.reject(in_reward, "Paceline has the KL in the loss or in the reward, not in both")
    if source.get(in_loss):
        kind, default = f"{ACTOR}kl_loss_type", "low_var_kl"
        coefficient, place = source.get(f"{ACTOR}kl_loss_coef", default=0.001), "loss"
    elif source.get(in_reward):
        kind, default = "algorithm.kl_penalty", "kl"
        coefficient, place = source.get("algorithm.kl_ctrl.kl_coef", default=0.001), "reward"
    else:
        for name in (f"{ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef"):
            source.note(name, f"no effect in verl without {in_loss} or {in_reward} = true")
        given = source.get(in_loss, in_reward) is not None
        return {"algorithm.kl_coef": 0.0} if given and source.base("algorithm.kl_coef") else {}
    given_kind = str(source.get(kind, default=default))
    estimator = KL_ESTIMATORS.get(given_kind.rstrip("+"))
    if estimator and place == "loss" and given_kind.endswith("+"):
        estimator = "k2"
        source.note(kind, "verl shows this estimate, but trains with the gradient of k2")
    if estimator is None:
        source.reject(kind, f"expected one of {', '.join(KL_ESTIMATORS)}")
    found = {
        "algorithm.kl_coef": coefficient,
        "algorithm.kl_placement": place,
        "algorithm.kl_estimator": estimator or "k3",
    }
    if place == "reward" and source.get("algorithm.kl_ctrl.type") == "adaptive":
        found["algorithm.kl_target"] = source.get("algorithm.kl_ctrl.target_kl", default=0.1)
    return found


def correction(source: Source) -> dict[str, Any]:
    """Translate the off-policy correction, also in the form of older versions of verl."""
    level = source.get(f"{CORRECTION}rollout_is", "algorithm.rollout_is")
    if level is True:
        level = source.get("algorithm.rollout_is_level", default="token")
    cap = source.number(f"{ACTOR}tis_imp_ratio_cap", default=-1)
    high = source.get(f"{CORRECTION}rollout_is_threshold", "algorithm.rollout_is_threshold")
    if cap > 0 and not level:
        level, high = "token", cap
    bypass = source.get(f"{CORRECTION}bypass_mode")
    found: dict[str, Any] = {}
    if level in ("token", "sequence") and not bypass:
        masks = source.get("algorithm.rollout_is_mode") == "mask"
        found["algorithm.correction"] = "mask" if masks else "truncate"
        found["algorithm.correction_level"] = level
        low = source.number("algorithm.rollout_is_threshold_lower")
        if isinstance(high, str):
            try:
                low, high = map(float, high.split("_"))
                found["algorithm.correction"] = "icepop"
            except ValueError:
                high = None
                source.reject(
                    f"{CORRECTION}rollout_is_threshold", "expected a number, or two as 0.5_5.0"
                )
        found["algorithm.correction_range"] = [low, 2.0 if high is None else high]
    elif level and not bypass:
        source.reject(f"{CORRECTION}rollout_is", "algorithm.correction_level: token or sequence")
    elif level:
        source.note(f"{CORRECTION}rollout_is", "no effect in verl with bypass_mode = true")
    recomputes = bypass is False or source.get("async_training.compute_prox_log_prob")
    if recomputes and not found:
        found = {"algorithm.proximal": "recomputed", "algorithm.correction": "none"}
    if source.get(f"{CORRECTION}rollout_rs"):
        source.reject(f"{CORRECTION}rollout_rs", "nearest: algorithm.reject_range = [low, high]")
    return found


def overlong(source: Source) -> dict[str, Any]:
    """Translate DAPO's penalty of long completions."""
    for prefix in OVERLONG:
        if source.get(f"{prefix}enable"):
            if source.number(f"{prefix}penalty_factor", default=1) != 1:
                source.reject(f"{prefix}penalty_factor", "Paceline's penalty grows to 1")
            found = {"algorithm.overlong": "penalty"}
            length = source.get(f"{prefix}len")
            return found | ({} if length is None else {"algorithm.overlong_buffer": length})
    return {}


def critic(source: Source) -> dict[str, Any]:
    estimator = ESTIMATORS.get(str(source.get("algorithm.adv_estimator")))
    if (estimator or source.base("algorithm.name")) != "ppo":
        return {}
    rate = source.get("critic.optim.lr")
    actor = source.get(f"{ACTOR}optim.lr", default=source.base("train.learning_rate", 1e-6))
    if rate is not None and rate != actor:
        source.reject("critic.optim.lr", f"train.learning_rate = {actor} is also the critic's")
    path = source.get("critic.model.path")
    model = source.get(f"{MODEL}path", default=source.base("model", "tiny"))
    if path is not None and path != model:
        source.reject("critic.model.path", f"the critic starts from model = {model}")
    value = source.get("critic.cliprange_value")
    return {} if value is None else {"algorithm.value_clip": value}
