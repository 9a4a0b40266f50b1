"""samples.jsonl: the completions and rewards of some prompts of every step, for people to read.

Metrics can look good while completions are not: a reward may be exploited, completions truncated
or repetitive. `paceline samples` prints this file.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.panel import Panel
from rich.text import Text

from paceline.errors import CheckpointError
from paceline.line_file import LineFile, end_of_step, intact_rows, read_lines, step_of
from paceline.observe.token_details import TokenDetails, turn_advantages
from paceline.printable import printable
from paceline.types import FloatArray, Group, Trajectory

NAME = "samples.jsonl"
REWRITTEN = "context rewritten: new sample"


class Samples:
    """Writer of the first `groups` groups of each step, one per line.

    `decode` turns the tokens of a conversation into text. `advantages` returns those of all tokens
    of the last batch, if they are known.
    """

    def __init__(
        self,
        run_dir: Path,
        groups: int,
        first_step: int,
        decode: Callable[[list[int]], str],
        advantages: Callable[[], FloatArray | None] = lambda: None,
    ) -> None:
        self._groups, self._decode, self._details = groups, decode, TokenDetails(decode)
        self._advantages = advantages
        path = run_dir / NAME
        # Steps after the checkpoint are trained again.
        self._file = LineFile(path, end_of_step(path, first_step))

    def step_done(self, step: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Write the groups of a step and return what was written."""
        saved, values = groups[: self._groups], self._advantages()
        known = {}
        if saved and values is not None:
            known = turn_advantages(groups, values, {group.seq for group in saved})
        rows = [self._row(step, group, known.get(group.seq)) for group in saved]
        for row in rows:
            self._file.write(row, ascii_only=False)
        self._file.flush()
        return rows

    def _row(
        self, step: int, group: Group, advantages: Sequence[Sequence[FloatArray]] | None
    ) -> dict[str, Any]:
        return {
            "step": step,
            "seq": group.seq,
            "uid": group.prompt.uid,
            # Step n is trained from version n - 1.
            "staleness": step - 1 - group.version_min,
            "prompt": group.prompt.text,
            "completions": [
                self._completion(
                    trajectory, group.prompt.tokens, advantages[number] if advantages else None
                )
                for number, trajectory in enumerate(group.trajectories)
            ],
        }

    def _completion(
        self,
        trajectory: Trajectory,
        prompt: tuple[int, ...],
        advantages: Sequence[FloatArray] | None,
    ) -> dict[str, Any]:
        turns, last = trajectory.turns, trajectory.turns[-1].completion
        found: dict[str, Any] = {
            "reward": trajectory.total_reward,
            "details": dict(trajectory.details),
            "tokens": trajectory.num_tokens,
            "finish": last.finish.value,
            "text": trajectory.text,
        }
        if trajectory.end is not None:
            found["end"] = trajectory.end.value
        if trajectory.agent:
            found["agent"] = trajectory.agent
        # An agent may have another prompt than the group; turns show it.
        if len(turns) == 1 and (turns[0].prompt == prompt or not trajectory.agent):
            known = advantages[0] if advantages else None
            return found | self._details.of(last, trajectory.text, known)
        found["turns"] = [
            {
                # The prompt of the first turn is the prompt of the group, unless it was changed.
                "prompt": "" if turn.prompt == prompt else self._decode(list(turn.prompt)),
                "text": (text := self._decode(turn.completion.tokens.tolist())),
                "reward": turn.reward,
                **({"restarts": True} if number and turn.restarts else {}),
                **self._details.of(
                    turn.completion, text, advantages[number] if advantages else None
                ),
            }
            for number, turn in enumerate(turns)
        ]
        return found

    def close(self) -> None:
        self._file.close()


def read_samples(run_dir: Path, step: int | None = None) -> list[dict[str, Any]]:
    """Return the groups saved at a step, by default at the last one."""
    path = run_dir / NAME
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; expected a run directory, for example runs/fully_async"
        )
    try:
        steps = [at for row in intact_rows(path) if (at := step_of(row)) < math.inf]
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}; check its rights and its disk"
        ) from error
    if not steps:
        raise CheckpointError(
            f"{path} has no complete line: no step is complete yet, or save_samples = 0"
        )
    wanted = steps[-1] if step is None else step
    if wanted not in steps:
        raise CheckpointError(f"{path} has no step {wanted}; it has {steps[0]} to {steps[-1]}")
    return [line.row for line in read_lines(path) if line.row and step_of(line.row) == wanted]


def samples_panel(row: dict[str, Any]) -> Panel:
    """Return a panel with a prompt and its completions, best first."""
    try:
        return _panel(row)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{NAME}: a line of step {row.get('step')} is damaged: {error!r}; delete the line, or "
            "restore the file from a backup"
        ) from error


def _panel(row: dict[str, Any]) -> Panel:
    parts: list[Text] = [Text(printable(row["prompt"].strip()), style="bold")]
    for sample in sorted(row["completions"], key=lambda sample: -sample["reward"]):
        details = "".join(f", {name} {value:g}" for name, value in sample["details"].items())
        truncated = ", truncated" if sample["finish"] == "length" else ""
        agent = f"{sample['agent']}: " if "agent" in sample else ""
        heading = f"\n{agent}reward {sample['reward']:g}{details}, {sample['tokens']} tokens"
        heading += truncated
        parts.append(Text(printable(heading), style="cyan"))
        parts += _turns(sample) or [Text(printable(sample["text"].strip()))]
    return Panel(
        Lines(*parts),
        title=Text(printable(f"step {row['step']}: {row['uid']}, staleness {row['staleness']}")),
        title_align="left",
    )


def _turns(sample: dict[str, Any]) -> list[Text]:
    """Return the conversation of a sample with several turns, in order."""
    parts = []
    for number, turn in enumerate(sample.get("turns", ()), 1):
        if turn.get("restarts"):
            parts.append(Text(REWRITTEN, style="yellow"))
        if turn["prompt"]:
            who = "context" if number == 1 or turn.get("restarts") else "environment"
            parts.append(Text(f"{who}: {printable(turn['prompt'].strip())}", style="dim"))
        reward = f" (reward {turn['reward']:g})" if turn["reward"] else ""
        parts.append(Text(f"turn {number}{reward}: {printable(turn['text'].strip())}"))
    return parts
