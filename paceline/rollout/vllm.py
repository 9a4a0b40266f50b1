"""vLLM as a rollout engine: the same synchronous steps as the native one, so the same service drives both.

vLLM's engine runs in this process, so nothing is made, loaded or left behind between two steps: versions are exact, weights change
between decode steps, and whoever ends the process ends vLLM. It starts without weights; they come with the first hand-over, through
vLLM's own loader, which knows how to fuse them.

Tokens are drawn by `Draw`, from (seed, position, token id) like the native engine's: an answer does not depend on its company, and
a resumed one equals one that was never interrupted.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the other one knows no logits processors
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault(
    "VLLM_CPU_OMP_THREADS_BIND", "nobind"
)  # the worker is pinned to its cores already

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TORCHDYNAMO_DISABLE", "1"
    )  # compiling one small function would cost the first request seconds

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from paceline.errors import RolloutError, SyncError
from paceline.model.loading import load_config
from paceline.rollout.native.sampling import draw, row_keys
from paceline.rollout.native.slots import already_ended, ends_in_stop, refusal
from paceline.rollout.vllm_memory import expected_weights, kv_bytes, memory_share, weight_bytes
from paceline.rollout.vllm_settings import VllmSettings
from paceline.types import Completion, Finish, Request

Finished = list[tuple[str, Completion]]
HOW = "paceline"  # the key of our entry among a request's extra arguments
WEIGHTS, CACHE = "weights", "kv_cache"  # what vLLM calls the two parts of its memory


class HashSampler(LogitsProcessor):  # type: ignore[misc]
    """Draws the token of every row and leaves vLLM's greedy sampler no choice: of each row only that token is left, its logit set to
    its log-probability. The mode "processed_logits" reports that number as it is."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[
            int, tuple[tuple[int, float, int, float], int, list[int]]
        ] = {}  # how to draw, prompt length, tokens so far

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        rows = (
            [self._rows[row] for row in range(len(logits))]
            if len(self._rows) >= len(logits)
            else []
        )
        if not rows:
            return logits  # vLLM is warming up
        seeds, temperature, top_k, top_p = zip(*(how for how, _, _ in rows), strict=True)
        positions = np.array([length + len(made) for _, length, made in rows], np.int64)
        tokens, logprobs = draw(
            logits,
            row_keys(np.array(seeds, np.uint64), positions),
            np.array(temperature, np.float32),
            np.array(top_k, np.int64),
            np.array(top_p, np.float32),
        )
        chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device).unsqueeze(1)
        return logits.fill_(-torch.inf).scatter_(
            1, chosen, torch.from_numpy(logprobs).to(logits.device).unsqueeze(1)
        )


def _row(
    params: SamplingParams, prompt: list[int] | None, made: list[int]
) -> tuple[tuple[int, float, int, float], int, list[int]]:
    return params.extra_args[HOW], len(prompt or ()), made


@dataclass(slots=True, eq=False)
class Running:
    """A request on its way, with what it has so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> "Running":
        made = request.partial
        return (
            cls(request)
            if made is None
            else cls(request, made.tokens.tolist(), made.logprobs.tolist(), made.versions.tolist())
        )

    def completion(self, finish: Finish) -> Completion:
        return Completion(
            np.array(self.tokens, np.int32),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            finish,
        )


class VllmEngine:
    def __init__(
        self,
        model_path: str,
        settings: VllmSettings,
        *,
        dtype: str,
        slots: int,
        max_length: int,
        decode: Callable[[list[int]], str] | None = None,
        kv_memory_fraction: float = 0.5,
        sleeps: bool = False,
    ) -> None:
        """As for the native engine. `sleeps`: on a GPU, be able to give its memory to others for a while."""
        config = load_config(model_path)
        self._expected = expected_weights(config)
        self._slots, self._max_length, self._decode = slots, max_length, decode
        self._vocabulary = config.vocab_size
        self._sleeps = sleeps and torch.cuda.is_available()
        cache = kv_bytes(config, self._expected, dtype, slots, max_length, kv_memory_fraction)
        self._bytes = {WEIGHTS: weight_bytes(self._expected, dtype), CACHE: cache}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=model_path,
                load_format="dummy",
                dtype=dtype,
                max_model_len=max_length,
                max_num_seqs=slots,
                max_num_batched_tokens=max(
                    8192 if torch.cuda.is_available() else 2048, max_length, slots
                ),
                kv_cache_memory_bytes=cache,
                gpu_memory_utilization=memory_share(sum(self._bytes.values())),
                enforce_eager=settings.eager or not torch.cuda.is_available(),
                enable_sleep_mode=self._sleeps,
                enable_prefix_caching=True,
                async_scheduling=False,  # a step returns the tokens it made, so that we know of which version they are
                logits_processors=[f"{__name__}:{HashSampler.__name__}"],
                logprobs_mode="processed_logits",
                skip_tokenizer_init=True,
                disable_log_stats=True,
            )
        )
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._ended: dict[str, Completion] = {}  # complete, to be returned by the next step
        self._away: list[str] = []  # parts of the memory that are given away
        self._whole = False  # whether the weights are those of one version
        self._version = -1
        self._tokens_sampled = 0

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def kv_used(self) -> float:
        return self.running / self._slots  # its memory is made for that many

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ended)

    @property
    def has_work(self) -> bool:
        return bool(self._ended or (self._whole and (self._running or self._waiting)))

    @property
    def version(self) -> int:
        return self._version

    @property
    def tokens_sampled(self) -> int:
        return self._tokens_sampled

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue these; if one cannot be served, none is taken and RolloutError says why."""
        taken = self._running.keys() | self._waiting.keys() | self._ended.keys()
        for request in requests:
            self._check(request, taken)
            taken.add(request.id)
        for request in requests:
            running = Running.of(request)
            finish = already_ended(request, self._max_length, self._decode)
            if finish is None:
                self._waiting[request.id] = running
            else:
                self._ended[request.id] = running.completion(finish)

    def step(self) -> Finished:
        """Admit what waits, make a token for every running sequence, return those that ended."""
        self.wake()
        finished = list(self._ended.items())
        self._ended.clear()
        while self._waiting and len(self._running) < self._slots:
            self._admit(self._waiting.popitem(last=False)[1])
        for output in self._engine.step() if self._running else ():
            finish = self._take(output)
            if finish is not None:
                finished.append(
                    (output.request_id, self._running.pop(output.request_id).completion(finish))
                )
        return finished

    def abort(self, ids: Sequence[str]) -> Finished:
        """Give these up and return what they have; unknown ids are ignored."""
        finished = [
            (id, self._waiting.pop(id).completion(Finish.ABORT))
            for id in ids
            if id in self._waiting
        ]
        finished += [(id, self._ended.pop(id)) for id in ids if id in self._ended]
        return finished + [
            (running.request.id, running.completion(Finish.ABORT)) for running in self._stop(ids)
        ]

    def interrupt(self) -> Finished:
        """Empty the engine: everything comes back as it stands, to be resumed from there."""
        finished = list(self._ended.items())
        finished += [
            (id, running.completion(Finish.INTERRUPT)) for id, running in self._waiting.items()
        ]
        finished += [
            (running.request.id, running.completion(Finish.INTERRUPT))
            for running in self._stop(list(self._running))
        ]
        self._ended.clear()
        self._waiting.clear()
        return finished

    def wait_idle(self) -> None:
        """Nothing is under way between two steps."""

    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Take over new weights, all or none (SyncError). Running sequences go on with the keys and values they have."""
        incoming = tensors if isinstance(tensors, Mapping) else dict(tensors)
        self._check_weights({name: tuple(incoming[name].shape) for name in incoming})
        self._load(
            "reload_weights",
            version,
            weights_iterator=((name, incoming[name]) for name in incoming),
        )

    def set_version(self, version: int) -> None:
        """Nobody changes vLLM's weights in place: its layers have them in a form of their own."""
        raise SyncError(f"version {version}: vLLM needs a copy of the weights, and none was sent")

    def sleep(self) -> None:
        """Give memory back: weights go to the host, keys and values are dropped. Running sequences wait, and are prefilled again."""
        if self._away:
            return
        for running in reversed(self._stop(list(self._running))):
            self._waiting[running.request.id] = running
            self._waiting.move_to_end(running.request.id, last=False)
        if self._sleeps:
            self._engine.sleep(level=1)
            self._away = [WEIGHTS, CACHE]

    def wake(self, *parts: str) -> None:
        """Undo `sleep`, of these parts or altogether; a step does so by itself, and new weights need only their own part."""
        for part in [part for part in self._away if part in (parts or (WEIGHTS, CACHE))]:
            self._engine.wake_up([part])
            self._away.remove(part)

    def held_bytes(self) -> int:
        """On the device, by weights, keys and values."""
        return sum(size for part, size in self._bytes.items() if part not in self._away)

    def _load(self, method: str, version: int, **arguments: Any) -> None:
        self.wake(WEIGHTS)
        self._whole = False  # until it is known that all of them arrived
        try:
            self._engine.collective_rpc(method, kwargs=arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # whoever wrote them may write the next ones when this returns
        except Exception as error:
            raise SyncError(
                f"vLLM could not load the weights of version {version}: {type(error).__name__}: {error}"
            ) from error
        self._whole, self._version = True, version

    def _check_weights(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        missing, unknown = (
            sorted(self._expected.keys() - shapes.keys()),
            sorted(shapes.keys() - self._expected.keys()),
        )
        if missing or unknown:
            raise SyncError(
                f"new weights: {len(missing)} missing {missing[:4]}, {len(unknown)} unknown {unknown[:4]}; send all of the model's"
            )
        for name, shape in shapes.items():
            if shape != self._expected[name]:
                raise SyncError(
                    f"new weights: {name} has shape {shape}, the model has {self._expected[name]}"
                )

    def _check(self, request: Request, taken: set[str]) -> None:
        problem = refusal(
            request,
            request.id in taken,
            self._max_length,
            self._vocabulary,
            self._decode is not None,
        )
        if problem:
            raise RolloutError(f"request {request.id!r} cannot be generated: {problem}")

    def _admit(self, running: Running) -> None:
        request, sampling = running.request, running.request.sampling
        context = [*request.prompt, *running.tokens]
        params = SamplingParams(
            temperature=0.0,  # `Draw` has drawn already
            max_tokens=min(
                sampling.max_new_tokens - len(running.tokens), self._max_length - len(context)
            ),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={
                HOW: (request.seed % 2**64, sampling.temperature, sampling.top_k, sampling.top_p)
            },
        )
        # keys and values of other weights are not to be found by a new sequence
        self._engine.add_request(
            request.id, {"prompt_token_ids": context, "cache_salt": str(self._version)}, params
        )
        self._running[request.id] = running

    def _take(self, output: RequestOutput) -> Finish | None:
        """Note the new tokens of a sequence; why it has ended, if it has."""
        running, made = self._running[output.request_id], output.outputs[0]
        for token, entry in zip(made.token_ids, made.logprobs or (), strict=True):
            logprob = entry[token].logprob
            if not np.isfinite(logprob):
                raise RolloutError(
                    f"a log-probability is not finite: the weights of version {self._version} hold inf or nan, or have diverged"
                )
            running.tokens.append(token)
            running.logprobs.append(logprob)
            running.versions.append(self._version)
            self._tokens_sampled += 1
        stops = running.request.sampling.stop
        if (
            stops
            and self._decode
            and ends_in_stop(np.array(running.tokens, np.int32), stops, self._decode)
        ):
            if not output.finished:
                self._engine.abort_request([output.request_id])
            return Finish.STOP
        if not output.finished:
            return None
        return Finish.STOP if made.finish_reason == "stop" else Finish.LENGTH

    def _stop(self, ids: Sequence[str]) -> list[Running]:
        """Take those of these that run out of vLLM."""
        stopped = [self._running.pop(id) for id in ids if id in self._running]
        if stopped:
            self._engine.abort_request([running.request.id for running in stopped])
        return stopped
