"""Soak: a run of the built-in model with a random fault every 20 to 30 seconds.

    python benchmarks/soak.py [--ray] [--minutes 15] [--every 25 60] [--seed 0]

`paceline train --restart` runs with real processes, or with --ray on a Ray cluster of two nodes on
this machine. Faults are injected from outside: processes of every role are killed, suspended or get
no more memory, a weight transfer is cut, a node is killed. The seed determines their order. A
fault counts if its effect on the victim was seen (endurance/faults.py).

Then the run is continued for five steps and audited, and compared with a run of as many steps
without faults. --every 25 is a fault every 20 to 30 s, --every 60 one every 48 to 72 s. Useful time
is the sum of the times of the steps that count, divided by the time from the first command to the
end: steps that were repeated and the time of restarts do not count. The reward takes 7 ms per
completion, so that a step takes about a second as with a larger model.

Exit code 1 if a limit is missed; results in benchmarks/results/soak_local.json or soak_ray.json.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.endurance import paced
from benchmarks.endurance.checks import Check, as_json, save, show
from benchmarks.endurance.faults import FAULTS, LOCAL, Fault, Victims
from benchmarks.endurance.leftovers import Leftovers
from benchmarks.endurance.nodes import Nodes, two_nodes
from benchmarks.report import circumstances, command_line

ROOT = Path(__file__).parents[1]
REWARD_S = 0.007
DURING_RECOVERY = 0.2  # fraction of faults that do not wait for a step after the one before
RESTARTS = 5  # without a new checkpoint
VICTIM_S = 120.0  # for a process of a role to exist
END_S = 300.0  # for a run to save its step and end
WINDOW = 25  # steps of a mean reward
LEAST_FAULTS, LEAST_USEFUL, REWARD_TOLERANCE = 25, 0.85, 0.05
SETTINGS = (
    *("groups_per_step=16", "group_size=8", f"data.task={paced.TASK}", "save_samples=1"),
    *("save_every=2", "schedule.max_staleness=2", "schedule.on_sync=swap", "sync.transport=stream"),
    *("placement.rollout_workers=2", "placement.threads=1", "reward.workers=1"),
    *("fleet.heartbeat_timeout_s=5", "sync.timeout_s=15", "reward.timeout_s=5"),
    f"reward.function={Path(paced.__file__)}:reward",
)


@dataclass(slots=True)
class Injected:
    fault: str
    at_s: float  # since the start
    wall_time_s: float
    proof: str
    next_step_s: float | None = None  # until the next step that counts


class Soak:
    def __init__(self, folder: Path, seed: int, nodes: Nodes | None) -> None:
        self.run_dir, self._output = folder / "run", folder / "output.txt"
        (folder / "tmp").mkdir(parents=True)
        self.leftovers = Leftovers(folder / "tmp")
        self._nodes, self._random = nodes, random.Random(seed)
        self.injected: list[Injected] = []
        self.wall_s = 0.0

    def command(self, *settings: str) -> list[str]:
        found = [sys.executable, "-m", "paceline", "train", "fully_async", *SETTINGS]
        if self._nodes:
            found += ["cluster=ray", f"ray.address={self._nodes.address}"]
        return [*found, f"run_dir={self.run_dir}", *settings]

    def start(self, command: Sequence[str], reward_s: float) -> "subprocess.Popen[bytes]":
        env = os.environ | self.leftovers.environment | {"PYTHONPATH": str(ROOT)}
        with self._output.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=env | {paced.REWARD_S: str(reward_s)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, minutes: float, every: float) -> int:
        """Run with faults for some minutes, and return the exit code of the supervisor."""
        begun = time.monotonic()
        command = self.command("steps=1000000", "--restart", str(RESTARTS))
        process = self.start(command, REWARD_S)
        try:
            victims = Victims(
                process.pid, self.run_dir, self._nodes.raylets if self._nodes else None
            )
            faults, end = self._faults(), begun + 60 * minutes
            self._wait_for_step(process, 0.0, end)
            due = time.monotonic() + self._interval(every)
            while process.poll() is None and time.monotonic() < end:
                if self._random.random() > DURING_RECOVERY:
                    self._wait_for_step(process, time.time(), end)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, min(due, end) - time.monotonic()))
                if time.monotonic() >= due:
                    due = time.monotonic() + self._interval(every)
                    if not self._inject(next(faults), victims, begun):
                        due = time.monotonic()  # another one instead
            process.send_signal(signal.SIGTERM)
            code = process.wait(END_S)
            self.wall_s = time.monotonic() - begun
            return code
        finally:
            self._end(process)

    def finish(self, steps: int, reward_s: float) -> int:
        """Run to a number of steps without faults, and return the exit code."""
        process = self.start(self.command(f"steps={steps}"), reward_s)
        try:
            return process.wait()
        finally:
            self._end(process)

    def rows(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # the last line may be incomplete
                found.append(json.loads(line))
        return found

    def restarts(self) -> int:
        path = self.run_dir / "restarts.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def _interval(self, every: float) -> float:
        return self._random.uniform(0.8 * every, 1.2 * every)

    def _faults(self) -> Iterator[Fault]:
        """Yield all faults in a random order, again and again."""
        known = (*FAULTS, Fault("kill", "node")) if self._nodes else LOCAL
        while True:
            yield from self._random.sample(known, len(known))

    def _wait_for_step(self, process: "subprocess.Popen[bytes]", since: float, end: float) -> None:
        """Wait until a step has been made since a wall time."""
        while process.poll() is None and time.monotonic() < end:
            if (rows := self.rows()) and rows[-1]["wall_time_s"] > since:
                break
            time.sleep(0.2)

    def _inject(self, fault: Fault, victims: Victims, begun: float) -> bool:
        """Return whether the fault fired."""
        role = "controller" if fault.role == "all" else fault.role
        deadline = time.monotonic() + VICTIM_S
        while not (found := victims.find(role)) and time.monotonic() < deadline:
            time.sleep(0.05)
        at, wall = time.monotonic() - begun, time.time()
        proof = "no such process"
        if found:
            try:
                proof = fault.inject(victims, self._random.choice(found)) or "did not fire"
            except (OSError, LookupError, ValueError, psutil.Error) as error:  # it has just ended
                proof = f"did not fire: {error}"
        fired = "" if proof.startswith(("no such", "did not")) else proof
        self.injected.append(Injected(str(fault), round(at, 1), wall, fired))
        print(f"{at:7.1f} s  step {len(self.rows()):5}  {fault}: {proof}", flush=True)
        if self._nodes:
            self._nodes.replace()
        return bool(fired)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        if process.poll() is None:
            process.kill()
            process.wait()


def useful(rows: Sequence[dict[str, Any]], wall_s: float) -> dict[str, float]:
    """Return which part of the time steps took, and what it would be at the median step time."""
    times = [
        sum(row[f"time/{part}_s"] for part in ("wait", "evaluate", "train", "sync")) for row in rows
    ]
    return {
        "step_s": statistics.median(times),
        "useful": sum(times) / wall_s,
        "at_median": len(times) * statistics.median(times) / wall_s,
    }


def reward_at(rows: Sequence[dict[str, Any]], step: int) -> float:
    return statistics.fmean(row["reward/mean"] for row in rows[max(0, step - WINDOW) : step])


def measure(
    folder: Path, minutes: float, every: float, seed: int, nodes: Nodes | None
) -> tuple[list[Check], dict[str, Any]]:
    soak = Soak(folder / "faults", seed, nodes)
    code = soak.run(minutes, every)
    rows = soak.rows()
    for one in soak.injected:
        later = [row["wall_time_s"] for row in rows if row["wall_time_s"] > one.wall_time_s]
        one.next_step_s = round(later[0] - one.wall_time_s, 1) if later else None
    steps = len(rows) + 5
    finished = soak.finish(steps, 0.0)
    audit = json.loads(
        subprocess.run(
            [sys.executable, "-m", "paceline", "audit", "--json", str(soak.run_dir)],
            capture_output=True,
            text=True,
            cwd=ROOT,
        ).stdout
    )
    left = soak.leftovers.find(soak.run_dir)
    left["workers on Ray"] = list(map(str, nodes.workers())) if nodes else []
    calm = Soak(folder / "calm", seed, nodes)
    calm_code = calm.finish(steps, 0.0)
    end, calm_end = reward_at(soak.rows(), steps), reward_at(calm.rows(), steps)
    fired = [one for one in soak.injected if one.proof]
    time_used, counts = useful(rows, soak.wall_s), lost_and_twice(soak.run_dir)
    checks = [
        Check("faults that fired", len(fired), ">=", LEAST_FAULTS if every <= 25 else 1),
        Check("faults that did not fire", len(soak.injected) - len(fired)),
        Check("restarts of the run", soak.restarts()),
        Check("prompts lost", counts["lost"], "==", 0),
        Check("prompts trained twice", counts["twice"], "==", 0),
        Check("prompts dropped", counts["dropped"], "==", 0),
        Check("problems found by paceline audit", len(audit["problems"]), "==", 0),
        Check("exit code of the soak (SIGTERM: 143)", code, "==", 143),
        Check("exit code of its last five steps", finished, "==", 0),
        Check("exit code of the run without faults", calm_code, "==", 0),
        Check("train steps", len(rows)),
        Check("median step, s", time_used["step_s"]),
        Check("useful time", time_used["useful"], ">=", LEAST_USEFUL if every >= 60 else None),
        Check("steps x median step / time", time_used["at_median"]),
        Check("next step after a fault, s, median", _median_delay(fired)),
        Check("reward at the end", end, ">=", calm_end - REWARD_TOLERANCE),
        Check("reward without faults", calm_end),
        *(Check(f"left behind: {kind}", len(found), "==", 0) for kind, found in left.items()),
    ]
    details = circumstances() | {
        "seed": seed,
        "minutes": minutes,
        "checks": as_json(checks),
        "problems": audit["problems"],
        "left": {kind: found for kind, found in left.items() if found},
        "faults": [asdict(one) for one in soak.injected],
    }
    if not all(check.ok for check in checks):
        print(soak.output()[-6000:], calm.output()[-1000:], sep="\n", file=sys.stderr)
    return checks, details


def _median_delay(fired: Sequence[Injected]) -> float:
    return statistics.median([one.next_step_s for one in fired if one.next_step_s] or [0.0])


def lost_and_twice(run_dir: Path) -> dict[str, int]:
    """Count, without the code of the audit, what became of each prompt."""
    events: dict[str, list[int]] = {"issued": [], "trained": [], "dropped": []}
    for line in (run_dir / "ledger.jsonl").read_text().splitlines():
        row = json.loads(line)
        events.setdefault(row["event"], []).append(row.get("seq"))
    trained = set(events["trained"])
    # Prompts are trained in order, so one before the last that was trained is not in flight.
    due = range(max(trained, default=-1) + 1)
    return {
        "lost": len(set(due) - trained - set(events["dropped"])),
        "twice": len(events["trained"]) - len(trained),
        "dropped": len(events["dropped"]),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--every", type=float, nargs="+", default=[25, 60], metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for the files of the runs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    where, good, found = "ray" if args.ray else "local", True, {}
    with ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        nodes = stack.enter_context(two_nodes(folder / "ray")) if args.ray else None
        for every in args.every:
            checks, details = measure(folder / f"{every:g}", args.minutes, every, args.seed, nodes)
            title = f"{where}: {args.minutes:g} minutes, a fault every {every:g} s"
            good &= show(title, checks)
            found[f"a fault every {every:g} s"] = details
    save(f"soak_{where}.json", found)
    sys.exit(not good)


if __name__ == "__main__":
    main()
