"""`paceline serve`: the OpenAI-compatible endpoint for a model, without training.

Waits for: requests of clients, and the engines. Every request may choose how to sample.
"""

import asyncio
import hashlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from paceline.config import RunConfig, load_config
from paceline.data.chat import has_template, stop_token_ids
from paceline.data.tiny import resolve_model
from paceline.endpoint.request import ChatRequest
from paceline.endpoint.server import EndpointServer
from paceline.endpoint.session import Chat, Session
from paceline.environment.token_stream import Tokens
from paceline.errors import ConfigError
from paceline.evaluation import for_evaluation
from paceline.generation import Generation, open_generation
from paceline.inputs import load_inputs
from paceline.model.loading import load_config as load_model_config
from paceline.reward.reward import NoReward
from paceline.rollout.environment import SingleTurn
from paceline.suspend import ignore_suspended_time
from paceline.temporary import TemporaryFolder
from paceline.training.export import find_checkpoint
from paceline.types import Completion, Request, Role, Sampling
from paceline.workers.layout import choose_settings

MAX_LENGTH = 4096  # tokens of a conversation, if the settings do not say more
SLOTS = 16
GREEDY_BELOW = 1e-5  # temperature: with a lower one, logits divided by it can be infinite


class EngineModel:
    """The engines of a fleet, as sessions use them."""

    def __init__(self, generation: Generation, sampling: Sampling, max_length: int) -> None:
        self._fleet = generation.fleet
        self._sampling, self.max_length = sampling, max_length
        self._ids = itertools.count()

    def check(self, request: ChatRequest) -> None:
        """Accept everything that a request may have."""

    async def generate(self, context: Tokens, request: ChatRequest, choice: int) -> Completion:
        name, seed = f"serve.{next(self._ids)}", _seed(request.seed, choice)
        asked = Request(name, context, seed, self._chosen(request))
        while not (members := [member for member in self._fleet if member.in_rotation]):
            await self._fleet.changed.wait()
        member = min(members, key=lambda member: member.load)
        member.load += 1
        try:
            return await member.engine.generate(asked)
        finally:
            member.load -= 1

    def _chosen(self, request: ChatRequest) -> Sampling:
        usual = self._sampling
        length = min(request.max_new_tokens or usual.max_new_tokens, usual.max_new_tokens)
        temperature = usual.temperature if request.temperature is None else request.temperature
        return replace(
            usual,
            max_new_tokens=length,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=usual.top_p if request.top_p is None else request.top_p,
            stop=(*usual.stop, *request.stops),
        )


def serving_config(model: str, settings: Sequence[str] = ()) -> RunConfig:
    """Return the configuration for a model, or for the last checkpoint of a run directory."""
    if (Path(model) / "checkpoints").is_dir():
        model = str(find_checkpoint(Path(model)) / Role.ACTOR)
    text = load_model_config(resolve_model(model)).get_text_config()
    length = min(MAX_LENGTH, getattr(text, "max_position_embeddings", None) or MAX_LENGTH)
    chosen = [f"data.max_prompt_length={length - length // 2}", f"rollout.slots={SLOTS}"]
    chosen += [f"model={model}", f"rollout.max_response_length={length // 2}"]
    return for_evaluation(load_config(None, [*chosen, *settings]), samples=SLOTS)


async def serve(config: RunConfig, port: int, ready: Callable[[str, str], None]) -> None:
    """Serve until cancelled. `ready` is called with the address and the API key."""
    ignore_suspended_time(asyncio.get_running_loop())
    inputs = load_inputs(config, [{config.data.prompt_key: "Hello"}])
    if not has_template(inputs.tokenizer):
        raise ConfigError(
            f"model = {config.model!r}: its tokenizer has no chat template, which chat "
            "completions need; use an instruction-tuned model"
        )
    config = await choose_settings(config, inputs.model_path, [Role.ROLLOUT])
    async with AsyncExitStack() as stack:
        logs = stack.enter_context(TemporaryFolder("paceline-logs-"))
        single = SingleTurn(lambda tokens: str(inputs.tokenizer.decode(tokens)))
        generation = await open_generation(
            stack, config, [Role.ROLLOUT], inputs, single, NoReward(), logs
        )
        sampling = config.rollout.sampling(stop_token_ids(inputs.tokenizer, inputs.generation))
        length = config.rollout.limits(config.data.max_prompt_length).max_length
        model = EngineModel(generation, sampling, length)
        server = EndpointServer(config.model)
        try:
            await server.start(port)
        except OSError as error:
            raise ConfigError(
                f"--port {port}: cannot listen: {error.strerror}; expected a free port, or 0"
            ) from None
        stack.push_async_callback(server.close)
        ready(server.url, server.open(Session(Chat(inputs.tokenizer, length), model, keep=False)))
        # No engine is replaced here, so requests would wait forever after a death.
        deaths = [worker.died for worker in generation.living_workers()]
        dead, _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        dead.pop().result()


def _seed(given: int | None, choice: int) -> int:
    if given is None:
        return secrets.randbits(56)
    digest = hashlib.blake2b(repr((given, choice)).encode(), digest_size=7).digest()
    return int.from_bytes(digest)
