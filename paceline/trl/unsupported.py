"""What TRL has and Paceline has not, with what to use instead."""

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError

_AGENT = (
    "write the agent loop as a class and pass "
    "GRPOConfig(paceline={'rollout.environment': 'file.py:Class'})"
)
_LOSS = "write the loss as a function and pass GRPOConfig(paceline={'algorithm.loss': function})"
_REWARDS = (
    "pass reward_funcs, and for other advantages GRPOConfig(paceline={'algorithm.advantage': "
    "function})"
)
_ORDER = "pass the rows in the order that you need, with shuffle_dataset=False"
_OPTIMIZER = "the optimizer is AdamW; set learning_rate, lr_scheduler_type and adam_* in args"
_CALLBACK = "pass a callback with on_log, or GRPOConfig(paceline={'track': function})"

ARGUMENTS = {
    "optimizers": _OPTIMIZER,
    "quantization_config": "quantized models cannot be trained; pass peft_config alone",
    "reward_processing_classes": "a reward model uses the tokenizer of its own directory",
    "tools": _AGENT,
    "rollout_func": _AGENT,
    "environment_factory": _AGENT,
}
# Methods that subclasses of TRL's trainer override, and that Paceline does not call.
METHODS = {
    **dict.fromkeys(("compute_loss", "_compute_loss", "training_step"), _LOSS),
    "_get_per_token_logps_and_entropies": _LOSS,
    **dict.fromkeys(("_generate", "_generate_single_turn", "_tool_call_loop"), _AGENT),
    **dict.fromkeys(("_calculate_rewards", "_generate_and_score_completions"), _REWARDS),
    "_prepare_inputs": _REWARDS,
    **dict.fromkeys(("get_train_dataloader", "_get_train_sampler"), _ORDER),
    **dict.fromkeys(("create_optimizer", "create_scheduler"), _OPTIMIZER),
    "create_optimizer_and_scheduler": _OPTIMIZER,
    "log": _CALLBACK,
    **dict.fromkeys(("prediction_step", "evaluation_loop"), "pass eval_dataset and reward_funcs"),
    **dict.fromkeys(("_save_checkpoint", "_save"), "set save_steps and save_total_limit"),
}
_SFT = "fine-tune with paceline.sft (docs/sft.md)"
_RLOO = "use GRPOTrainer with GRPOConfig(scale_rewards='none', paceline={'algorithm.name': 'rloo'})"
_TRL = "import it from trl"
NAMES = {
    **dict.fromkeys(("SFTTrainer", "SFTConfig"), _SFT),
    **dict.fromkeys(("RLOOTrainer", "RLOOConfig"), _RLOO),
    **dict.fromkeys(("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config"), _TRL),
}


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for an argument of TRL's trainer that cannot be honored."""
    for name, action in ARGUMENTS.items():
        parts = given[name] if isinstance(given[name], tuple | list) else [given[name]]
        if any(part is not None for part in parts):
            raise ConfigError(f"GRPOTrainer: {name} cannot be honored; {action}")


def check_subclass(kind: type, base: type) -> None:
    """Raise ConfigError if a class overrides a method of TRL's trainer that is never called."""
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name, action in METHODS.items():
            if name in vars(each):
                raise ConfigError(
                    f"{each.__name__} overrides {name}, which Paceline does not call; {action}"
                )
