"""What a run measures: opens recorder, timeline, device meter, trace and profile together."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from paceline.config import RunConfig
from paceline.generation import Generation
from paceline.inputs import Inputs
from paceline.loop import Observer
from paceline.model.loading import load_config as load_model_config
from paceline.model.shape import model_shape
from paceline.observe.device_meter import DeviceMeter, metered_workers, refresh
from paceline.observe.flops import TrainUtilization, peak_flops
from paceline.observe.profile import StepProfile
from paceline.observe.recorder import Recorder, StepWatcher
from paceline.observe.samples import Samples
from paceline.observe.sinks import open_sinks
from paceline.observe.trace import TraceWriter
from paceline.run_dir import Start
from paceline.timeline import Timeline
from paceline.types import FloatArray, Role


class Recording:
    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        generation: Generation,
        start: Start,
        display: Observer | None,
        advantages: Callable[[], FloatArray | None],
        watcher: StepWatcher | None,
    ) -> None:
        """`advantages` returns those of the last batch; `watcher` sees the metrics of each step."""
        run_dir, rollouter = Path(config.run_dir), generation.rollouter
        decode = partial(inputs.tokenizer.decode, skip_special_tokens=True)
        samples = Samples(run_dir, config.save_samples, start.step, decode, advantages)
        identity = inputs.identity["config"]
        sinks = open_sinks(config.track, run_dir, identity, start.abandons_later)
        self._metered = partial(metered_workers, config, generation)
        self._trace: TraceWriter | None = None
        if config.trace:
            self._trace = TraceWriter(
                run_dir, lambda: ((each.name, each.worker) for each in self._metered())
            )
        self._profile: StepProfile | None = None
        if config.profile_steps:
            self._profile = StepProfile(
                config.profiled,
                run_dir,
                lambda: (each.worker for each in self._metered()),
                start.step,
            )
        self.timeline = Timeline(self._trace)
        self._meter = DeviceMeter(
            self._metered,
            self.timeline,
            lambda: (rollouter.lost_tokens, rollouter.evaluation_tokens),
        )
        self.recorder = Recorder(
            run_dir,
            start.metrics_length,
            samples,
            display,
            sinks,
            start.step,
            self._meter,
            self._trace,
            self._utilization(config, inputs, generation),
            [each for each in (watcher, self._profile) if each],
        )

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        """Measure device time until the loop ends; nothing is summed up for one that fails."""
        await refresh(self._metered())
        self._meter.start()
        yield
        if self._profile:
            await self._profile.close()
        await refresh(self._metered())
        self._meter.end()
        self.timeline.end()
        if self._trace:
            self._trace.collect()

    def _utilization(
        self, config: RunConfig, inputs: Inputs, generation: Generation
    ) -> TrainUtilization | None:
        """Return what measures the FLOP utilization, if the peak of the GPUs is known."""
        peak = peak_flops(generation.gpu_name, config.train.dtype)
        if peak is None:
            return None
        shape = model_shape(load_model_config(inputs.model_path))
        devices = sum(Role.ACTOR in each.roles for each in self._metered())
        return TrainUtilization(shape, peak, devices, config.algorithm.epochs)
