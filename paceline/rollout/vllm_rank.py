"""vLLM in this process: the whole engine, or one rank of it.

vLLM works only inside a step, and starts without weights: the first weight sync loads them through
vLLM's weight loader, which fuses them and takes this rank's shard.

`HashSampler` samples the tokens from (seed, position, token ID), as the native engine does. A
completion does not depend on batch composition, and a resumed one equals an uninterrupted one.
"""

import atexit
import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # run the engine in this process
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # version 2 supports no logits processors
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The worker is pinned to its cores already.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

if not torch.cuda.is_available():
    # Compiling one small function would delay the first request by seconds.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from paceline.model.loading import load_config
from paceline.model.weights import check_weights
from paceline.rollout.native.sampling import row_keys, sample
from paceline.rollout.tensor_parallel import Team
from paceline.rollout.vllm_memory import (
    Split,
    expected_weights,
    kv_bytes,
    memory_fraction,
    weight_bytes,
)
from paceline.rollout.vllm_settings import VllmSettings, check_kv_cache
from paceline.types import Sampling

EXTRA_ARGS_KEY = "paceline"  # key of Paceline's entry in the extra arguments of a request
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names for the two parts of its memory
# Seed, temperature, top_k, top_p, forced tokens.
SamplingSettings = tuple[int, float, int, float, tuple[int, ...]]


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
        seeds, temperature, top_k, top_p, _ = zip(
            *(settings for settings, _, _ in rows), strict=True
        )
        forced = {
            row: _forced(logits[row], settings, len(made))
            for row, (settings, _, made) in enumerate(rows)
            if len(made) < len(settings[4])
        }
        positions = np.array([length + len(made) for _, length, made in rows], np.int64)
        tokens, logprobs = sample(
            logits,
            row_keys(np.array(seeds, np.uint64), positions),
            np.array(temperature, np.float32),
            np.array(top_k, np.int64),
            np.array(top_p, np.float32),
        )
        for row, choice in forced.items():
            tokens[row], logprobs[row] = choice
        chosen = torch.from_numpy(tokens.astype(np.int64)).to(logits.device).unsqueeze(1)
        return logits.fill_(-torch.inf).scatter_(
            1, chosen, torch.from_numpy(logprobs).to(logits.device).unsqueeze(1)
        )


def _forced(logits: Tensor, settings: SamplingSettings, made: int) -> tuple[int, float]:
    """Return the next forced token of a row and its log-prob without top_k and top_p."""
    temperature, token = settings[1] or 1.0, settings[4][made]
    return token, float(torch.log_softmax(logits.float() / temperature, -1)[token])


def _row(
    params: SamplingParams, prompt: list[int] | None, made: list[int]
) -> tuple[SamplingSettings, int, list[int]]:
    return params.extra_args[EXTRA_ARGS_KEY], len(prompt or ()), made


def sampling_params(
    sampling: Sampling, seed: int, max_tokens: int, forced: Sequence[int] = ()
) -> SamplingParams:
    settings = sampling.temperature, sampling.top_k, sampling.top_p
    return SamplingParams(
        temperature=0.0,  # `HashSampler` has sampled already
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={EXTRA_ARGS_KEY: (seed % 2**64, *settings, tuple(forced))},
    )


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """vLLM's worker in a rank of a process group that exists already."""

    supports_pp = True

    def _init_executor(self) -> None:
        if self.parallel_config.pipeline_parallel_size > 1:
            # By this name vLLM's workers send the logits of the last stage to all others.
            self.parallel_config.distributed_executor_backend = "external_launcher"
        super()._init_executor()
        if not get_pp_group().is_first_rank:
            # vLLM makes this buffer when it warms up, which it does not do on CPUs.
            runner = self.driver_worker.worker.model_runner
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                runner.max_num_tokens, runner.model_config.dtype, runner.device
            )

    def _distributed_args(self) -> tuple[str, int, int]:
        # On CPUs vLLM names its shared memory after this address. Names that differ have it use
        # gloo instead: two engines do not collide, and a killed rank leaves nothing behind.
        rank = dist.get_rank()
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        return f"file://rank{rank}", rank, device


class VllmRank:
    def __init__(
        self,
        model_path: str,
        settings: VllmSettings,
        *,
        dtype: str,
        slots: int,
        max_length: int,
        kv_memory_fraction: float,
        kv_cache_dtype: Literal["auto", "fp8"] = "auto",
        sleeps: bool = False,
        team: Team | None = None,
        pipeline_parallel: int = 1,
    ) -> None:
        """Create vLLM without weights.

        sleeps: on a GPU, `sleep` frees the memory of weights and KV cache. `team`: the ranks of the
        engine if it has several, divided into `pipeline_parallel` stages.
        """
        check_kv_cache(kv_cache_dtype, torch.cuda.is_available())
        config = load_config(model_path)
        split = Split(team.size // pipeline_parallel if team else 1, pipeline_parallel)
        split.check(config)
        self.vocabulary: int = config.vocab_size
        self.expected = expected_weights(config)
        self._sleeps = sleeps and torch.cuda.is_available()
        weights = weight_bytes(self.expected, dtype, split)
        kept = "float8_e4m3fn" if kv_cache_dtype == "fp8" else dtype
        cache = kv_bytes(config, weights, kept, slots, max_length, kv_memory_fraction, split)
        cache = team.smallest(cache) if team else cache  # all ranks schedule alike
        self._bytes = {WEIGHTS: weights, CACHE: cache}
        self._asleep: list[str] = []  # parts of the memory that are freed
        in_group = dist.is_available() and dist.is_initialized()
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
                kv_cache_dtype=kv_cache_dtype,
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
                tensor_parallel_size=split.tensor,
                pipeline_parallel_size=split.pipeline,
                distributed_executor_backend=RankExecutor if in_group else None,
                # It looks for the other ranks among the visible GPUs; a rank sees its own only.
                disable_custom_all_reduce=in_group,
            )
        )

        if in_group:
            # Before the process leaves the group; vLLM's own finalizer would come too late.
            atexit.register(self._engine.engine_core.shutdown)
        if split.pipeline > 1:
            # A step returns its own tokens. vLLM would keep a batch in flight for each stage, but
            # its stages do not overlap in a process group that exists already.
            core = self._engine.engine_core.engine_core
            core.batch_queue, core.step_fn = None, core.step
        if team:
            # This queue is not used, and a killed rank may leave its shared memory behind.
            get_tp_group().mq_broadcaster = None

    def add(
        self, request_id: str, prompt: Sequence[int], salt: str, params: SamplingParams
    ) -> None:
        """Add a sequence. It shares prefixes only with sequences of the same salt."""
        self._engine.add_request(
            request_id, {"prompt_token_ids": list(prompt), "cache_salt": salt}, params
        )

    def step(self) -> list[RequestOutput]:
        self.wake()
        return list(self._engine.step())

    def abort(self, request_ids: Sequence[str]) -> None:
        self._engine.abort_request(list(request_ids))

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load all weights; raise SyncError if a name or shape is wrong."""
        self.wake(WEIGHTS)
        try:
            self._reload(self._checked(tensors))
        except Exception:
            # vLLM keeps what has arrived of a layer and would add it to that of the next load.
            with contextlib.suppress(Exception):
                self._engine.collective_rpc(_forget_arrived)
                self._reload(iter(()))
            raise
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the sender may overwrite them when this returns

    def _reload(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    def _checked(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        arrived: dict[str, tuple[int, ...]] = {}
        for name, tensor in tensors:
            arrived[name] = tuple(tensor.shape)
            if arrived[name] == self.expected.get(name):
                yield name, tensor
        check_weights(arrived, self.expected)

    def sleep(self) -> None:
        """Offload the weights to the host and free the KV cache. Nothing may be running."""
        if self._sleeps and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = [WEIGHTS, CACHE]

    def wake(self, *parts: str) -> None:
        """Undo `sleep` for these parts, or for all; steps and weight loads do so implicitly."""
        for part in [part for part in self._asleep if part in (parts or (WEIGHTS, CACHE))]:
            self._engine.wake_up([part])
            self._asleep.remove(part)

    def held_bytes(self) -> int:
        """Return the device memory of weights and KV cache."""
        return sum(size for part, size in self._bytes.items() if part not in self._asleep)


def _forget_arrived(worker: Any) -> None:
    """Have the next reload restore layers that are incomplete, instead of loading their tensors.

    A tensor whose load has failed would fail again, and vLLM would not come to the other layers.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in worker.get_model().modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
