"""vLLM as a rollout engine, with the same synchronous steps as the native one.

vLLM runs in this process and works only inside a step. Versions are therefore exact, weights change
between decode steps, and vLLM ends with the process. On several devices this is the leader, and
`tensor_parallel` brings every operation to the other ranks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from torch import Tensor

from paceline.errors import RolloutError, SyncError
from paceline.model.weights import check_weights
from paceline.remote.device_clock import PREFILL, SWITCHING, doing
from paceline.rollout.native.slots import already_ended, check_request, ends_in_stop
from paceline.rollout.tensor_parallel import AllRanks, Team
from paceline.rollout.vllm_rank import VllmRank, sampling_params
from paceline.rollout.vllm_settings import VllmSettings
from paceline.types import Completion, Finish, Request

Finished = list[tuple[str, Completion]]


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
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        sleeps: bool = False,
        team: Team | None = None,
        pipeline_parallel: int = 1,
    ) -> None:
        """Create an engine with the parameters of the native one.

        sleeps: on a GPU, `sleep` frees the memory of weights and KV cache. `team`: the ranks of the
        engine if it has several, divided into `pipeline_parallel` stages.
        """
        self._slots, self._max_length, self._decode = slots, max_length, decode
        self._rank = VllmRank(
            model_path,
            settings,
            dtype=dtype,
            slots=slots,
            max_length=max_length,
            kv_memory_fraction=kv_memory_fraction,
            kv_cache_dtype=kv_cache_dtype,
            sleeps=sleeps,
            team=team,
            pipeline_parallel=pipeline_parallel,
        )
        self._ranks = AllRanks(self._rank, team) if team else self._rank
        self._waiting: OrderedDict[str, Running] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._ended: dict[str, Completion] = {}  # complete, to be returned by the next step
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

    # Only vLLM's scheduler knows what its prefix cache saves.
    tokens_prefilled = tokens_reused = 0

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all requests, or none: raise RolloutError if one of them cannot be served."""
        taken = self._running.keys() | self._waiting.keys() | self._ended.keys()
        limits = self._max_length, self._rank.vocabulary, self._decode is not None
        for request in requests:
            check_request(request, request.id in taken, *limits)
            taken.add(request.id)
        for request in requests:
            running = Running.of(request)
            finish = already_ended(request, self._max_length, self._decode)
            if finish is None:
                self._waiting[request.id] = running
                # Forced tokens check the weights of one version, so they must not wait for long.
                self._waiting.move_to_end(request.id, last=not request.forced)
            else:
                self._ended[request.id] = running.completion(finish)

    def step(self) -> Finished:
        """Admit waiting sequences, generate a token for each and return those that ended."""
        finished = list(self._ended.items())
        self._ended.clear()
        admits = bool(self._waiting) and len(self._running) < self._slots
        while self._waiting and len(self._running) < self._slots:
            self._admit(self._waiting.popitem(last=False)[1])
        with doing(PREFILL if admits else None):  # vLLM also decodes in this step
            outputs = self._ranks.step() if self._running else ()
        for output in outputs:
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

    def partials(self) -> Finished:
        """Return the tokens so far of all requests, which continue."""
        running = [*self._waiting.values(), *self._running.values()]
        found = [(each.request.id, each.completion(Finish.INTERRUPT)) for each in running]
        return [*self._ended.items(), *(each for each in found if len(each[1]))]

    def wait_idle(self) -> None:
        """Return at once: nothing is in flight between two steps."""

    def load(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int
    ) -> None:
        """Load all weights; raise SyncError if a name or shape is wrong, or if loading fails.

        Of an iterator, one tensor is held at a time, and all ranks load their own. Running
        sequences continue on the KV cache they have.
        """
        if not isinstance(tensors, Iterator):
            tensors = tensors if isinstance(tensors, Mapping) else dict(tensors)
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            check_weights(shapes, self._rank.expected)
            tensors = tensors.items()
        self._loaded = False  # until all weights are known to be loaded
        try:
            self._ranks.load(tensors)
        except Exception as error:
            raise SyncError(
                f"vLLM could not load the weights of version {version}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._loaded, self._version = True, version

    def set_version(self, version: int) -> None:
        """Raise SyncError unless this version is loaded.

        vLLM stores the weights in its own layout, so they cannot be shared.
        """
        if version != self._version or not self._loaded:
            raise SyncError(f"version {version}: vLLM needs a copy of the weights, but got none")

    def sleep(self) -> None:
        """Offload the weights to the host and free the KV cache.

        Running sequences wait and are prefilled again.
        """
        for running in reversed(self._stop(list(self._running))):
            self._waiting[running.request.id] = running
            self._waiting.move_to_end(running.request.id, last=False)
        with doing(SWITCHING):
            self._ranks.sleep()

    def wake(self) -> None:
        """Undo `sleep`; steps and weight loads do so implicitly."""
        self._ranks.wake()

    def release(self) -> None:
        self.sleep()

    def held_bytes(self) -> int:
        """Return the device memory of weights and KV cache, on this rank."""
        return self._rank.held_bytes()

    def _admit(self, running: Running) -> None:
        request, sampling = running.request, running.request.sampling
        context = [*request.prompt, *running.tokens]
        left = sampling.max_new_tokens - len(running.tokens)
        left = min(left, self._max_length - len(context))
        forced = request.forced[len(running.tokens) :]
        params = sampling_params(sampling, request.seed, left, forced)
        # The salt keeps a new sequence from reusing the KV cache of other weights.
        self._ranks.add(request.id, context, str(self._version), params)
        self._running[request.id] = running

    def _record(self, output: Any) -> Finish | None:
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
                self._ranks.abort([output.request_id])
            return Finish.STOP
        if not output.finished:
            return None
        return Finish.STOP if made.finish_reason == "stop" else Finish.LENGTH

    def _stop(self, ids: Sequence[str]) -> list[Running]:
        """Remove these requests from vLLM and return those that were running."""
        stopped = [self._running.pop(id) for id in ids if id in self._running]
        if stopped:
            self._ranks.abort([running.request.id for running in stopped])
        return stopped
