"""Device-time ledger: what every second of every device was spent on. Pure functions of counters.

The parts of a device add up to its elapsed time. What a device did comes from its worker's clock
(remote/device_clock.py), for whom it waited from the controller (timeline.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline import timeline
from paceline.remote import device_clock

DIRECT = (
    device_clock.PREFILL,
    device_clock.TRAINING,
    device_clock.SYNC,
    device_clock.SWITCHING,
    device_clock.REWARD,
    device_clock.CHECKPOINT,
)
WAITS = ("groups", "tickets", "reward", "sync", "evaluation", "checkpoint", "restart", "other")
PARTS = (
    *("generation", "underfilled", *DIRECT, "evaluation", "wasted"),
    *(f"wait_{cause}" for cause in WAITS),
)
# What the fastest possible run would also have to do.
NEEDED = ("generation", device_clock.PREFILL, device_clock.TRAINING, device_clock.REWARD)
MIN_LEVEL_FRACTION = 0.02  # of the decode time, for a fill level to be the saturated one

Controller = Mapping[tuple[str, str], float]  # seconds by phase and stage, see Timeline


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What one device did in an interval."""

    pool: str
    generates: bool
    trains: bool
    elapsed: float
    seconds: Mapping[str, float]  # by activity
    tokens: Mapping[str, float] = field(default_factory=dict)  # sampled, by decode activity
    absent: float = 0.0  # seconds without a worker, which was being replaced

    @property
    def decode_s(self) -> float:
        return sum(s for name, s in self.seconds.items() if name.startswith("decode/"))


@dataclass(frozen=True, slots=True)
class DeviceTime:
    total_s: float  # of all devices
    parts: dict[str, float]  # seconds, by PARTS
    speed_of_light: float  # the fraction of the limit, see `account`

    def metrics(self) -> dict[str, float]:
        return {
            "device/total_s": self.total_s,
            **{f"device/{name}_s": seconds for name, seconds in self.parts.items()},
            "device/speed_of_light": self.speed_of_light,
        }


def describe(seconds: Mapping[str, float], total_s: float) -> str:
    """Return the largest parts in words: "training 41%, generation 30%, waiting for groups 9%"."""
    if total_s <= 0:
        return ""
    shown = []
    for name in sorted(PARTS, key=lambda name: -seconds.get(name, 0.0))[:5]:
        if (fraction := seconds.get(name, 0.0) / total_s) >= 0.01:
            words = name.replace("wait_", "waiting for ").replace("waiting for other", "other")
            shown.append(f"{words} {fraction:.0%}")
    return ", ".join(shown)


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """Return the device time of a step in words, if its metrics have it."""
    seconds = {name: metrics.get(f"device/{name}_s", 0.0) for name in PARTS}
    return describe(seconds, metrics.get("device/total_s", 0.0))


def saturated_rate(devices: Iterable[DeviceUse]) -> float:
    """Return the highest tokens per device-second of any fill level of the slots; 0: unknown."""
    seconds: dict[str, float] = defaultdict(float)
    tokens: dict[str, float] = defaultdict(float)
    for device in devices:
        for name, number in device.tokens.items():
            tokens[name] += number
            seconds[name] += device.seconds.get(name, 0.0)
    enough = MIN_LEVEL_FRACTION * sum(seconds.values())
    rates = [tokens[name] / s for name, s in seconds.items() if s > 0 and s >= enough]
    return max(rates, default=0.0)


def account(
    devices: Sequence[DeviceUse],
    controller: Controller,
    rate: float,
    wasted_tokens: float = 0.0,
    evaluation_tokens: float = 0.0,
) -> DeviceTime:
    """Return the ledger of an interval. `rate`: tokens per device-second of full slots.

    The speed of light is the fraction of the interval that the busiest pool needs for its work:
    generation at the saturated rate, prefill, rewards and training. It is 1 if that pool never
    does anything else.
    """
    rows = [_device_parts(device, controller, rate) for device in devices]
    useful = sum(row["generation"] for row in rows)
    wasted = _fraction(wasted_tokens, rate, useful)
    evaluated = min(1.0 - wasted, _fraction(evaluation_tokens, rate, useful))
    for row in rows:
        made = row["generation"]
        row["wasted"], row["evaluation"] = made * wasted, made * evaluated
        row["generation"] = made - row["wasted"] - row["evaluation"]
    total = sum(device.elapsed for device in devices)
    parts = {name: sum(row[name] for row in rows) for name in PARTS}
    return DeviceTime(total, parts, _speed_of_light(devices, rows))


def _fraction(tokens: float, rate: float, useful_s: float) -> float:
    return min(1.0, tokens / rate / useful_s) if rate > 0 and useful_s > 0 else 0.0


def _device_parts(device: DeviceUse, controller: Controller, rate: float) -> dict[str, float]:
    busy = sum(device.seconds.values())
    # Workers that share a device report more than its time.
    scale = min(1.0, device.elapsed / busy) if busy > 0 else 1.0
    row = dict.fromkeys(PARTS, 0.0)
    row |= {name: scale * device.seconds.get(name, 0.0) for name in DIRECT}
    decode = scale * device.decode_s
    row["generation"] = (
        min(decode, scale * sum(device.tokens.values()) / rate) if rate > 0 else decode
    )
    row["underfilled"] = decode - row["generation"]
    absent = min(device.absent, max(0.0, device.elapsed - busy))
    row["wait_restart"] = absent
    idle = max(0.0, device.elapsed - scale * busy - absent)
    for cause, fraction in _causes(device, controller, row).items():
        row[f"wait_{cause}"] += fraction * idle
    return row


def _causes(
    device: DeviceUse, controller: Controller, row: Mapping[str, float]
) -> dict[str, float]:
    """Return for whom a device was idle, as fractions: the controller's time less its own work."""
    weights: dict[str, float] = defaultdict(float)
    for (phase, stage), seconds in controller.items():
        weights[_cause(device, phase, stage)] += seconds
    generates = row["generation"] + row["underfilled"] + row[device_clock.PREFILL]
    weights["sync"] -= row[device_clock.SYNC]
    weights["checkpoint"] -= row[device_clock.CHECKPOINT]
    weights["reward"] -= row[device_clock.REWARD]
    weights["other"] -= generates + row[device_clock.TRAINING] + row[device_clock.SWITCHING]
    weights = {cause: max(0.0, weight) for cause, weight in weights.items()}
    total = sum(weights.values())
    if total <= 0:
        return {"other": 1.0}
    return {cause: weight / total for cause, weight in weights.items()}


def _cause(device: DeviceUse, phase: str, stage: str) -> str:
    """Return for whom a device waits in a phase of the train task and a stage of generation.

    "other": it should be working. Then the controller, an environment or another device is late.
    """
    if phase in (timeline.SYNC, timeline.PAUSE):
        return "sync"
    if not device.generates:
        if phase == timeline.GROUPS:
            return "reward" if stage == timeline.SCORED else "groups"
    elif not device.trains or phase == timeline.GROUPS:
        by_stage = {timeline.GENERATED: "other", timeline.SCORED: "reward"}
        return by_stage.get(stage, "tickets")
    return {timeline.EVALUATION: "evaluation", timeline.CHECKPOINT: "checkpoint"}.get(
        phase, "other"
    )


def _speed_of_light(devices: Sequence[DeviceUse], rows: Sequence[Mapping[str, float]]) -> float:
    needed: dict[str, float] = defaultdict(float)
    elapsed: dict[str, float] = defaultdict(float)
    for device, row in zip(devices, rows, strict=True):
        needed[device.pool] += sum(row[name] for name in NEEDED)
        elapsed[device.pool] += device.elapsed
    return max((needed[pool] / s for pool, s in elapsed.items() if s > 0), default=0.0)
