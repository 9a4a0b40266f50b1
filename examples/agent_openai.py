"""Agent written with the `openai` package: two tries, the second one after a hint.

    paceline train hybrid rollout.agent=examples/agent_openai.py:play run_dir=runs/agent

Nothing in `play` depends on Paceline: with `client = openai.AsyncOpenAI()` it asks any other model.
"""

from typing import Any

from openai import AsyncOpenAI


async def play(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for reward in (1.0, 0.5):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        if message.content == row["answer"]:
            return reward
        hint = f"\n{row['answer'][0]} comes first: {row['prompt']}"
        messages += [message, {"role": "user", "content": hint}]
    return 0.0
