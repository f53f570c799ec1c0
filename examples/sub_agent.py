"""An agent with a sub-agent on plain ``openai``: one plans, the other answers each question of the plan in a context of
its own.

rollout.agent: examples/sub_agent.py:run

The sub-agent never sees the conversation that it works for, so each of its own is a segment of the rollout, as is the
planner's. All of them learn from the one reward.
"""

import asyncio
import json

from openai import AsyncOpenAI

PARAMETERS = {"type": "object", "properties": {"question": {"type": "string"}}, "required": ["question"]}
ASK = {"name": "ask", "description": "Have a colleague answer a question.", "parameters": PARAMETERS}


async def run(task, client, *, turns=4, sub_turns=2):
    """1 where the planner's last answer holds the ground truth, else 0."""
    openai = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages, tools = list(task["messages"]), [{"type": "function", "function": ASK}]
    for _ in range(turns):
        answer = await openai.chat.completions.create(model=client.model, messages=messages, tools=tools)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        found = await asyncio.gather(*(solve(openai, client, call, sub_turns) for call in said.tool_calls))
        for call, text in zip(said.tool_calls, found, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return float(str(task["ground_truth"]) in (said.content or ""))


async def solve(openai, client, call, turns):
    """The sub-agent: answers, looks at its answer again, and returns the last one."""
    try:
        question = json.loads(call.function.arguments)["question"]
    except (ValueError, KeyError, TypeError):
        return "Error: ask needs a question"
    messages = [{"role": "user", "content": str(question)}]
    for _ in range(turns):
        answer = await openai.chat.completions.create(model=client.model, messages=messages)
        said = answer.choices[0].message
        messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "Check it and answer again."}]
    return said.content or "no answer"
