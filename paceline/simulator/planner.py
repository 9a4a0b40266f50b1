"""Planner: the fastest mode that fits the devices, and the settings with which a run gets it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.simulator.modes import HYBRID, Comparison, ModeResult
from paceline.simulator.prediction import Prediction
from paceline.workers.cluster import Node
from paceline.workers.fit import GB, phases_of
from paceline.workers.layout import Layout, plan_on
from paceline.workers.phase_memory import total

STALENESS = (1, 2, 4)  # bounds that are tried if the recipe sets none
PINNED = ("rollout.slots", "train.micro_batch_tokens")  # chosen settings that are predicted with

Configure = Callable[[Sequence[str]], RunConfig]  # the recipe with further settings


@dataclass(frozen=True, slots=True)
class Proposal:
    comparison: Comparison
    result: ModeResult
    layout: Layout
    rejected: tuple[str, ...]  # modes that are preferred, and why they are not possible

    @property
    def settings(self) -> tuple[str, ...]:
        """The mode, and the automatic settings that the prediction depends on."""
        chosen = [f"{c.name}={c.text}" for c in self.layout.choices if c.name in PINNED]
        return (*self.result.settings, *chosen)

    def lines(self) -> list[str]:
        """Describe the proposal and its prediction."""
        result, outcome, config = self.result, self.result.outcome, self.layout.config
        scenario, limit = result.scenario, result.limit_steps_per_s
        pools = "for all roles" if result.shared else "for generation + training"
        if scenario.critic_devices:
            pools = "for actor and engines + critic"
        return [
            *self.rejected,
            self._verdict(),
            f"predicted: {outcome.steps_per_s:.3g} steps/s, {outcome.tokens_per_s:,.0f} tokens/s, "
            f"{outcome.steps_per_s / limit:.0%} of the limit of {limit:.3g} steps/s; staleness "
            f"{outcome.staleness_mean:.1f} (max {scenario.schedule.max_staleness})",
            f"devices: {result.devices} {pools}; {scenario.engines} engine(s) with "
            f"{scenario.slots} slots",
            f"batch: {config.groups_per_step} prompts x {config.group_size} completions, about "
            f"{self._micro_batches()} micro-batches of at most {config.train.micro_batch_tokens:,} "
            "tokens per device",
            f"memory of a device: {self._memory()}",
        ]

    def prediction(self) -> Prediction:
        outcome, scenario = self.result.outcome, self.result.scenario
        return Prediction(
            mode=self.result.mode,
            settings=self.settings,
            lengths=self.comparison.lengths,
            max_staleness=scenario.schedule.max_staleness,
            steps_per_s=outcome.steps_per_s,
            limit_steps_per_s=self.result.limit_steps_per_s,
            staleness_mean=outcome.staleness_mean,
            completions=scenario.groups_per_step * scenario.group_size,
            completion_tokens=outcome.completion_tokens,
            prompt_tokens=scenario.prompt_tokens,
            generate_s=outcome.generate_s,
            train_s=outcome.train_s,
            sync_s=outcome.sync_s,
        )

    def _verdict(self) -> str:
        others = [each for each in self.comparison.preferred if each.mode != self.result.mode]
        if self.result.mode != HYBRID or not others:
            ratio = self.comparison.ratio(self.result)
            return f"proposal: {self.result.mode}, {ratio:.2f}x {HYBRID}"
        second = max(others, key=lambda each: each.outcome.steps_per_s)
        return (
            f"proposal: {HYBRID}. Synchronous wins: the best other mode, {second.mode}, reaches "
            f"{self.comparison.ratio(second):.2f}x"
        )

    def _micro_batches(self) -> int:
        scenario, size = self.result.scenario, self.layout.config.train.micro_batch_tokens
        rows = scenario.groups_per_step * scenario.group_size
        tokens = rows * (scenario.prompt_tokens + self.result.outcome.completion_tokens)
        return max(1, -(-round(tokens) // scenario.train_devices // size))

    def _memory(self) -> str:
        """Return the peak of each kind of worker: the least and the most that it needs."""
        layout, found = self.layout, {}
        for plan in layout.plans:
            phases = phases_of(plan, layout.nodes, layout.config, layout.models)
            needs = [total(parts) for parts in phases.values()]
            low, high = max(need.fixed for need in needs), max(need.at_most for need in needs)
            found[", ".join(plan.roles)] = f"{low / GB:.2f} to {high / GB:.2f} GB"
        has = min((node.gpu_memory for node in layout.nodes), default=0)
        of = f", of {has / GB:.0f} GB" if has else ""
        return "; ".join(f"{roles} {size}" for roles, size in found.items()) + of


def propose(
    comparison: Comparison, configure: Configure, model: PretrainedConfig, nodes: Sequence[Node]
) -> Proposal:
    """Return the fastest mode whose settings are valid and whose memory fits."""
    rejected: list[str] = []
    for result in comparison.preferred:
        try:
            layout = plan_on(configure(result.settings), model, nodes)
        except ConfigError as error:
            rejected.append(f"{result.mode} is not possible: {error}")
            continue
        result = result.with_slots(layout.config.slots)
        return Proposal(comparison, result, layout, tuple(rejected))
    raise ConfigError("no mode fits these devices; " + "; ".join(rejected))
