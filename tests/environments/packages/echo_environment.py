"""A package of the library verifiers, as its users write them: two turns, a rubric, a tool."""

import verifiers as vf
from datasets import Dataset


class Echo(vf.MultiTurnEnv):  # type: ignore[misc]
    """Repeats what the model says, once."""

    async def env_response(self, messages, state, **kwargs):  # type: ignore[no-untyped-def]
        return [{"role": "user", "content": f"You said {messages[-1]['content']}."}]


class Forgetful(Echo):
    """Gives the model only the last message."""

    async def get_prompt_messages(self, state):  # type: ignore[no-untyped-def]
        return (await super().get_prompt_messages(state))[-1:]


def letters(completion, answer, **kwargs):  # type: ignore[no-untyped-def]
    """Score the fraction of the answer's characters in the last message."""
    text = completion[-1]["content"] or ""
    return sum(character in text for character in answer) / len(answer)


def load_environment(words=("cat", "dog", "owl", "ant"), turns=2, tool=False, forgets=False):  # type: ignore[no-untyped-def]
    rows = [{"question": f"Spell {word}.", "answer": word} for word in words]
    held_out = Dataset.from_list([{"question": "Spell bee.", "answer": "bee"}])
    rubric = vf.Rubric(funcs=[letters])
    if tool:

        async def twice(word: str) -> str:
            """Return a word twice.

            Args:
                word: The word.
            """
            return word + word

        return vf.ToolEnv(
            dataset=Dataset.from_list(rows), rubric=rubric, tools=[twice], max_turns=3
        )
    kind = Forgetful if forgets else Echo
    return kind(
        dataset=Dataset.from_list(rows), eval_dataset=held_out, rubric=rubric, max_turns=turns
    )
