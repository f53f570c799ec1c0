"""An agent for the benchmarks that makes its client as anywhere else, for each rollout anew; see gateway_step.py.

But for the client it is examples/run_tools_agent.py.
"""

from __future__ import annotations

from typing import Any

from openai import APIStatusError, AsyncOpenAI


async def run(task: dict[str, Any], client: Any, *, turns: int = 4, calls: int = 3) -> None:
    """No reward: ``reward.function`` judges what was said."""
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:
        messages: list[Any] = list(task["messages"])
        for turn in range(turns):
            body = {"model": client.model, "messages": messages, "tools": task["tools"]}
            try:
                answer: Any = await openai.post("/chat/completions", body=body, cast_to=object)
            except APIStatusError as error:
                if error.code == "context_length_exceeded":
                    return
                raise
            said = answer["choices"][0]["message"]
            asked = said.get("tool_calls", ())
            calls -= len(asked)
            if not asked or calls < 0 or turn == turns - 1:
                return
            messages.append(said)
            for call in asked:
                messages.append(await openai.post("/tool_calls", body=call, cast_to=object))
