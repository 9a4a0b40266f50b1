"""Settings of generation: engine, lengths, sampling, environment, time limits."""

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from paceline.environment.conversation import Limits
from paceline.plugins import Plugin
from paceline.rollout.vllm_settings import VllmSettings
from paceline.settings import Settings, automatic
from paceline.types import Sampling

EPISODE_GENERATIONS = 10  # default of rollout.episode_timeout_s, in generation timeouts


class RolloutSettings(Settings):
    engine: Literal["native", "vllm"] = "native"
    """Rollout engine: the built-in one, or vLLM (requires the extra "vllm")."""
    vllm: VllmSettings = VllmSettings()
    tensor_parallel: int = Field(1, ge=1)
    """Number of devices that an engine splits every layer across. More than 1 requires vLLM."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of stages that an engine divides the layers into, with tensor_parallel devices each.
    More than 1 requires vLLM."""
    max_response_length: int = Field(
        64, ge=1, validation_alias=AliasChoices("max_response_length", "max_new_tokens")
    )
    """Maximum length of a completion in tokens."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature. 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: cumulative probability of the tokens to sample from. 1: off."""
    top_k: int = Field(0, ge=0)
    """Number of most probable tokens to sample from. 0: off."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a completion, in addition to the tokenizer's end tokens."""
    slots: int = automatic(64, ge=1)
    """Maximum number of sequences an engine decodes concurrently. auto: the completions in flight,
    limited by the KV cache."""
    kv_memory_fraction: float = automatic(0.5, gt=0, le=1)
    """Maximum fraction of a GPU's free memory for the KV cache. The engine never takes more than
    `slots` sequences need. auto: what training leaves."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the KV cache. auto: train.dtype; fp8: float8 (e4m3), half the memory of bfloat16.
    Sets algorithm.correction = "truncate", unless correction or proximal is set."""
    weight_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the linear layers' weights in the native engine. auto: train.dtype; fp8: float8
    (e4m3) with a factor per output, quantized at every weight sync. Also sets the correction."""
    generation_timeout: float = Field(120.0, gt=0)
    """Maximum seconds per completion, from when an engine accepts its prompt to its last token.
    Time spent paused does not count."""
    episode_timeout_s: float | None = Field(None, gt=0)
    """Maximum seconds per trajectory with all its turns and tools. Time spent paused does not
    count. Default: 10 times generation_timeout."""
    min_group_size: int | None = Field(None, ge=1)
    """Minimum number of trajectories that must finish in time; the group is trained without the
    late ones. Default: group_size."""
    environment: str | None = None
    """Environment of a conversation (several turns, tools), or custom agent loop: a name that
    `paceline environments` lists, or a class as "file.py:Class" or "module:Class". All turns and
    the text between them have at most data.max_prompt_length + max_response_length tokens.
    Default: one prompt, one completion."""
    environment_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, for example {numbers = 4}."""
    tools: tuple[str, ...] = ()
    """Tools that the model may call: "calculator", "python" (in the sandbox), "search:DIRECTORY"
    (text files), or a function as "file.py:function", whose type hints and docstring describe it. A
    completion without a call ends the conversation."""
    agent: Plugin | None = None
    """Program that talks to the model with an OpenAI client: a function play(client, row), async or
    not, as "file.py:function" or "module:function". It returns the reward, or None for that of
    [reward]. Requires the extra "agents"."""
    environment_timeout_s: float = Field(60.0, gt=0)
    """Maximum seconds per call of the environment. On timeout the trajectory fails."""
    environment_workers: int = Field(0, ge=0)
    """Number of processes that run the environment or the tools. A process that crashes or is
    blocked longer than environment_timeout_s is killed and replaced; its episodes fail. With
    cluster=ray, they run on all its nodes. 0: they run in the controller, where a crash ends the
    run."""
    environment_pass_env: tuple[str, ...] = ()
    """Environment variables that environment workers get although they look like secrets. Names or
    patterns, for example "OPENAI_*"."""
    max_turns: int = Field(16, ge=1)
    """Maximum number of completions in a conversation with an environment."""
    max_failed_groups: int = Field(0, ge=0)
    """Number of groups that may fail before the run ends. A failed group is not trained on. As many
    held-out prompts may fail in all evaluations together, which leave them out."""

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return how to sample completions that end at one of these tokens."""
        return Sampling(
            max_new_tokens=self.max_response_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=stop_token_ids,
            stop=self.stop,
        )

    @model_validator(mode="after")
    def _native_is_one_device(self) -> "RolloutSettings":
        for name in ("tensor_parallel", "pipeline_parallel"):
            if self.engine == "native" and getattr(self, name) > 1:
                raise ValueError(
                    f"rollout.{name} = {getattr(self, name)} contradicts rollout.engine = "
                    "'native', which is for models that fit one device; set rollout.engine = 'vllm'"
                )
        return self

    @model_validator(mode="after")
    def _one_agent(self) -> "RolloutSettings":
        for name in ("environment", "tools"):
            if self.agent is not None and getattr(self, name):
                raise ValueError(
                    f"rollout.agent = {self.agent!r} contradicts rollout.{name} = "
                    f"{getattr(self, name)!r}: both decide what the model is asked; remove one"
                )
        return self

    @model_validator(mode="after")
    def _native_quantizes(self) -> "RolloutSettings":
        if self.engine == "vllm" and self.weight_dtype == "fp8":
            raise ValueError(
                "rollout.weight_dtype = 'fp8' contradicts rollout.engine = 'vllm', which cannot "
                "load new weights into a quantized model; remove weight_dtype, or set "
                "rollout.engine = 'native'"
            )
        return self

    @model_validator(mode="after")
    def _arguments_belong_to_environment(self) -> "RolloutSettings":
        if self.environment_args and self.environment is None:
            raise ValueError("rollout.environment_args has no effect without rollout.environment")
        return self

    @property
    def has_fp8(self) -> bool:
        """Whether the engine's log-probs have the precision of FP8."""
        return "fp8" in (self.kv_cache_dtype, self.weight_dtype)

    def limits(self, max_prompt_length: int) -> Limits:
        """Return the limits of a conversation."""
        length = max_prompt_length + self.max_response_length
        return Limits(self.max_turns, length, self.environment_timeout_s)

    @property
    def episode_limit_s(self) -> float:
        return self.episode_timeout_s or EPISODE_GENERATIONS * self.generation_timeout

    @property
    def ranks(self) -> int:
        """Devices of an engine."""
        return self.tensor_parallel * self.pipeline_parallel
