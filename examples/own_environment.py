"""An agent loop of your own: a wrong answer gets a second try. Tools and longer conversations are written the same way.

    paceline train recipes/hybrid.toml rollout.environment=examples/own_environment.py:TwoTries run_dir=runs/two_tries

A turn is what the model is shown since the last one, and what it then says; only what it says is trained on. `generate` wants all
tokens so far. Thousands of attempts run at the same time: await what takes long, and keep what belongs to one attempt in `run`.
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
        answer = self.tokenizer.decode(first.tokens, skip_special_tokens=True)
        if answer.strip() == str(prompt.row["answer"]):
            return Trajectory(turns, answer)
        again = tuple(
            self.tokenizer.encode(f"\nno, {prompt.row['prompt']}", add_special_tokens=False)
        )
        second = await generate(prompt.tokens + tuple(first.tokens.tolist()) + again)
        return Trajectory(
            (*turns, Turn(again, second)),
            self.tokenizer.decode(second.tokens, skip_special_tokens=True),
        )
