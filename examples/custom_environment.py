"""Custom agent loop: an incorrect completion gets a second try.

    paceline train recipes/hybrid.toml rollout.environment=examples/custom_environment.py:TwoTries

A turn has the tokens that the model sees since the last turn, and the completion. Only completions
are trained on. `generate` expects all tokens so far. Thousands of trajectories run concurrently on
one instance: await slow operations, and keep the state of a trajectory in local variables of `run`.
Tools and longer conversations are written in the same way.
"""

from typing import Any

from paceline.rollout.environment import Generate
from paceline.types import Prompt, Trajectory, Turn


class TwoTries:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        first = await generate(prompt.tokens)
        turns = (Turn(prompt.tokens, first),)
        text = self.tokenizer.decode(first.tokens, skip_special_tokens=True)
        if text.strip() == str(prompt.row["answer"]):
            return Trajectory(turns, text)
        feedback = f"\nno, {prompt.row['prompt']}"
        hint = tuple(self.tokenizer.encode(feedback, add_special_tokens=False))
        second = await generate(prompt.tokens + tuple(first.tokens.tolist()) + hint)
        text = self.tokenizer.decode(second.tokens, skip_special_tokens=True)
        return Trajectory((*turns, Turn(hint, second)), text)
