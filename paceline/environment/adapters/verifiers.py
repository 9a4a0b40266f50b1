"""Environments of the library verifiers, by the name of an installed package.

`rollout.environment = "verifiers:NAME"`; the arguments are those of its `load_environment`. Its
dataset is the data, its rubric the reward. verifiers drives the episode and asks a client for
completions. The client here calls the engines in this process: the tokens of a conversation are
kept, and only what is new between two completions is tokenized.
"""

import json
import signal
import time
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from paceline.data.chat import has_template
from paceline.environment.chat import Chat
from paceline.environment.conversation import Generate, Limits
from paceline.errors import ConfigError, RolloutError
from paceline.types import Finish, Prompt, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Verifiers:
    """Agent loop in which verifiers runs the conversation."""

    gives_rewards = True

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", limits: Limits, name: str, **arguments: Any
    ) -> None:
        if not has_template(tokenizer):
            raise ConfigError(
                f"rollout.environment = 'verifiers:{name}': the tokenizer has no chat template; "
                "use an instruction-tuned model"
            )
        self._tokenizer, self._limits = tokenizer, limits
        self._environment = _load(name, json.dumps(arguments))

    @staticmethod
    def rows(name: str, held_out: bool, **arguments: Any) -> list[dict[str, Any]]:
        """Return the rows of the environment's dataset, or of its dataset for evaluation."""
        environment = _load(name, json.dumps(arguments))
        found = environment.get_eval_dataset() if held_out else environment.get_dataset()
        return [dict(row) for row in found]

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        chat = Chat(self._tokenizer, self._limits, generate)
        row = {"example_id": 0, **prompt.row}
        state = await self._environment.rollout(row, _client(chat), "policy", {})
        if (error := state.get("error")) is not None:
            raise RolloutError(f"verifiers, prompt {prompt.uid!r}: {error!r}") from error
        if not chat.turns:
            raise RolloutError(f"verifiers, prompt {prompt.uid!r}: the model was never asked")
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        last = replace(chat.turns[-1], reward=float(state["reward"]))
        turns = (*chat.turns[:-1], last)
        return Trajectory(turns, chat.text)


@cache
def _load(name: str, arguments: str) -> Any:
    import verifiers

    setting = f"rollout.environment = 'verifiers:{name}'"
    try:
        load = verifiers.load_environment
    except AttributeError:
        raise ConfigError(
            f"{setting}: verifiers {verifiers.__version__} has no load_environment; "
            "run pip install 'verifiers<0.4'"
        ) from None
    from verifiers.envs import environment

    # It sets handlers of SIGINT and SIGTERM, but these end a run, and only the main thread may.
    environment.signal = SimpleNamespace(**vars(signal) | {"signal": lambda *_: None})
    try:
        found = load(name, **json.loads(arguments))
    except Exception as error:
        raise ConfigError(f"{setting}: {error.__cause__ or error}") from error
    if found.requires_group_rollouts:
        raise ConfigError(f"{setting}: it scores whole groups; expected a score per rollout")
    return found


def _client(chat: Chat) -> Any:
    """Return a client of verifiers that asks the engines."""
    from verifiers.clients.openai_chat_completions_client import OpenAIChatCompletionsClient
    from verifiers.errors import OverlongPromptError
    from verifiers.types import Response, ResponseMessage, ToolCall

    class EngineClient(OpenAIChatCompletionsClient):  # type: ignore[misc]
        async def get_response(self, prompt: Any, model: str, *_: Any, **given: Any) -> Response:
            messages, _ = await self.to_native_prompt(prompt)
            tools = await self.to_native_tools(given.get("tools")) or []
            completion = await chat.complete(messages, tools)
            if completion is None:
                raise OverlongPromptError
            calls = [
                ToolCall(id=f"call_{len(chat.turns)}_{number}", name=name, arguments=arguments)
                for number, (name, arguments) in enumerate(chat.calls(tools))
            ]
            truncated = completion.finish is Finish.LENGTH
            reason = "length" if truncated else "tool_calls" if calls else "stop"
            message = ResponseMessage(
                content=chat.text,
                tool_calls=calls or None,
                finish_reason=reason,
                is_truncated=truncated,
            )
            return Response(
                id=f"turn_{len(chat.turns)}", created=int(time.time()), model=model, message=message
            )

    return EngineClient(None)
