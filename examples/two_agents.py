"""Two agents in one episode: a proposer drafts an answer, and a solver sees the draft.

    paceline train recipes/hybrid.toml rollout.environment=examples/two_agents.py:ProposeAndSolve

Both are the same model. Each gives a trajectory, and an advantage compares it with the same agent
in the other episodes of the prompt. The reward of the task scores both; the proposer earns half a
point more if the solver, who has read the draft, is right.
"""

from typing import Any

from paceline.rollout.environment import Generate
from paceline.types import Prompt, Trajectory, Turn


class ProposeAndSolve:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def run(self, prompt: Prompt, generate: Generate) -> tuple[Trajectory, ...]:
        draft = await generate(prompt.tokens)
        proposal = self.tokenizer.decode(draft.tokens, skip_special_tokens=True)
        question = f"{proposal}\n{prompt.row['prompt']}"
        seen = tuple(self.tokenizer.encode(question))
        answer = await generate(seen)
        solution = self.tokenizer.decode(answer.tokens, skip_special_tokens=True)
        bonus = 0.5 * (solution.strip() == str(prompt.row["answer"]))
        return (
            Trajectory((Turn(prompt.tokens, draft, bonus),), proposal, agent="proposer"),
            Trajectory((Turn(seen, answer),), solution, agent="solver"),
        )
