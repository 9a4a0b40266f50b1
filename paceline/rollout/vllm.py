"""vLLM as a rollout engine, with the same synchronous steps as the native one.

vLLM runs in this process and works only inside a step. Versions are therefore exact, weights change
between decode steps, and vLLM ends with the process. It starts without weights; the first weight
sync loads them through vLLM's weight loader, which fuses them.

`HashSampler` samples the tokens from (seed, position, token ID), as the native engine does. A
completion does not depend on batch composition, and a resumed one equals an uninterrupted one.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # version 2 supports no logits processors
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The worker is pinned to its cores already.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Compiling one small function would delay the first request by seconds.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from paceline.errors import RolloutError, SyncError
from paceline.model.loading import load_config
from paceline.model.weights import check_weights
from paceline.rollout.native.sampling import row_keys, sample
from paceline.rollout.native.slots import already_ended, check_request, ends_in_stop
from paceline.rollout.vllm_memory import expected_weights, kv_bytes, memory_fraction, weight_bytes
from paceline.rollout.vllm_settings import VllmSettings
from paceline.types import Completion, Finish, Request

Finished = list[tuple[str, Completion]]
EXTRA_ARGS_KEY = "paceline"  # key of Paceline's entry in the extra arguments of a request
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names for the two parts of its memory
SamplingSettings = tuple[int, float, int, float]  # seed, temperature, top_k, top_p


class HashSampler(LogitsProcessor):  # type: ignore[misc]
    """Logits processor that samples the token of every row before vLLM's greedy sampler does.

    It masks all other tokens and sets the logit of the sampled one to its log-prob, which vLLM
    reports unchanged in the mode "processed_logits".
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        # Sampling settings, prompt length and generated tokens of each row.
        self._rows: dict[int, tuple[SamplingSettings, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        if not 0 < len(logits) <= len(self._rows):
            return logits  # vLLM is warming up
        rows = [self._rows[row] for row in range(len(logits))]
        seeds, temperature, top_k, top_p = zip(*(settings for settings, _, _ in rows), strict=True)
        positions = np.array([length + len(made) for _, length, made in rows], np.int64)
        tokens, logprobs = sample(
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
) -> tuple[SamplingSettings, int, list[int]]:
    return params.extra_args[EXTRA_ARGS_KEY], len(prompt or ()), made


@dataclass(slots=True, eq=False)
class Running:
    """A request in flight, with its tokens so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request) -> "Running":
        made = request.partial
        if made is None:
            return cls(request)
        return cls(request, made.tokens.tolist(), made.logprobs.tolist(), made.versions.tolist())

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
        """Create an engine with the parameters of the native one.

        sleeps: on a GPU, `sleep` frees the memory of weights and KV cache.
        """
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
                gpu_memory_utilization=memory_fraction(sum(self._bytes.values())),
                enforce_eager=settings.eager or not torch.cuda.is_available(),
                enable_sleep_mode=self._sleeps,
                enable_prefix_caching=True,
                # A step returns the tokens it generated, so that their version is known.
                async_scheduling=False,
                logits_processors=[f"{__name__}:{HashSampler.__name__}"],
                logprobs_mode="processed_logits",
                skip_tokenizer_init=True,
                disable_log_stats=True,
            )
        )
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._ended: dict[str, Completion] = {}  # complete, to be returned by the next step
        self._asleep: list[str] = []  # parts of the memory that are freed
        self._loaded = False  # whether all weights belong to one version
        self._version = -1
        self._tokens_sampled = 0

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def kv_used(self) -> float:
        return self.running / self._slots  # the KV cache is sized for all slots

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._ended)

    @property
    def has_work(self) -> bool:
        return bool(self._ended or (self._loaded and (self._running or self._waiting)))

    @property
    def version(self) -> int:
        return self._version

    @property
    def tokens_sampled(self) -> int:
        return self._tokens_sampled

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests, or none: raise RolloutError if one of them cannot be served."""
        taken = self._running.keys() | self._waiting.keys() | self._ended.keys()
        limits = self._max_length, self._vocabulary, self._decode is not None
        for request in requests:
            check_request(request, request.id in taken, *limits)
            taken.add(request.id)
        for request in requests:
            running = Running.of(request)
            finish = already_ended(request, self._max_length, self._decode)
            if finish is None:
                self._waiting[request.id] = running
            else:
                self._ended[request.id] = running.completion(finish)

    def step(self) -> Finished:
        """Admit waiting sequences, generate a token for each and return those that ended."""
        self.wake()
        finished = list(self._ended.items())
        self._ended.clear()
        while self._waiting and len(self._running) < self._slots:
            self._admit(self._waiting.popitem(last=False)[1])
        for output in self._engine.step() if self._running else ():
            finish = self._record(output)
            if finish is not None:
                finished.append(
                    (output.request_id, self._running.pop(output.request_id).completion(finish))
                )
        return finished

    def abort(self, ids: Sequence[str]) -> Finished:
        """Abort these requests and return their partial completions; ignore unknown IDs."""
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
        """Remove all requests and return their partial completions, which can be resumed."""
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
        """Return at once: nothing is in flight between two steps."""

    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Load all weights; raise SyncError if a name or shape is wrong, or if loading fails.

        Running sequences continue on the KV cache they have.
        """
        incoming = tensors if isinstance(tensors, Mapping) else dict(tensors)
        check_weights({name: tuple(incoming[name].shape) for name in incoming}, self._expected)
        self._load(
            "reload_weights",
            version,
            weights_iterator=((name, incoming[name]) for name in incoming),
        )

    def set_version(self, version: int) -> None:
        """Raise SyncError: vLLM stores the weights in its own layout, so they cannot be shared."""
        raise SyncError(f"version {version}: vLLM needs a copy of the weights, but got none")

    def sleep(self) -> None:
        """Offload the weights to the host and free the KV cache.

        Running sequences wait and are prefilled again.
        """
        if self._asleep:
            return
        for running in reversed(self._stop(list(self._running))):
            self._waiting[running.request.id] = running
            self._waiting.move_to_end(running.request.id, last=False)
        if self._sleeps:
            self._engine.sleep(level=1)
            self._asleep = [WEIGHTS, CACHE]

    def wake(self, *parts: str) -> None:
        """Undo `sleep` for these parts, or for all; steps and weight loads do so implicitly."""
        for part in [part for part in self._asleep if part in (parts or (WEIGHTS, CACHE))]:
            self._engine.wake_up([part])
            self._asleep.remove(part)

    def release(self) -> None:
        self.sleep()

    def held_bytes(self) -> int:
        """Return the device memory of weights and KV cache."""
        return sum(size for part, size in self._bytes.items() if part not in self._asleep)

    def _load(self, method: str, version: int, **arguments: Any) -> None:
        self.wake(WEIGHTS)
        self._loaded = False  # until all weights are known to be loaded
        try:
            self._engine.collective_rpc(method, kwargs=arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # the sender may overwrite them when this returns
        except Exception as error:
            raise SyncError(
                f"vLLM could not load the weights of version {version}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._loaded, self._version = True, version

    def _admit(self, running: Running) -> None:
        request, sampling = running.request, running.request.sampling
        context = [*request.prompt, *running.tokens]
        params = SamplingParams(
            temperature=0.0,  # `HashSampler` has sampled already
            max_tokens=min(
                sampling.max_new_tokens - len(running.tokens), self._max_length - len(context)
            ),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={
                EXTRA_ARGS_KEY: (
                    request.seed % 2**64,
                    sampling.temperature,
                    sampling.top_k,
                    sampling.top_p,
                )
            },
        )
        # The salt keeps a new sequence from reusing the KV cache of other weights.
        self._engine.add_request(
            request.id, {"prompt_token_ids": context, "cache_salt": str(self._version)}, params
        )
        self._running[request.id] = running

    def _record(self, output: RequestOutput) -> Finish | None:
        """Store the new tokens of a sequence and return the finish reason if it has ended."""
        running, made = self._running[output.request_id], output.outputs[0]
        for token, entry in zip(made.token_ids, made.logprobs or (), strict=True):
            logprob = entry[token].logprob
            if not np.isfinite(logprob):
                raise RolloutError(
                    f"a log-prob is not finite: the weights of version {self._version} "
                    "contain inf or nan, or training has diverged"
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
        """Remove these requests from vLLM and return those that were running."""
        stopped = [self._running.pop(id) for id in ids if id in self._running]
        if stopped:
            self._engine.abort_request([running.request.id for running in stopped])
        return stopped
