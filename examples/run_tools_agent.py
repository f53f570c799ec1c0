"""An agent on plain ``openai`` that has no tools of its own: those of the run (rollout.multi_turn.tools) do its work.

rollout.agent: examples/run_tools_agent.py:run
"""

import asyncio

from openai import APIStatusError


async def run(task, client, *, turns=4, calls=3):
    """No reward: ``reward.function`` judges what was said."""
    # AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) does the same, in twice the time.
    async with client.openai() as openai:
        messages, tools = list(task["messages"]), task["tools"]
        for turn in range(turns):
            body = {"model": client.model, "messages": messages, "tools": tools}
            try:
                # As ``chat.completions.create``, which takes the history and the answer through its types, in most of
                # a call's time.
                answer = await openai.post("/chat/completions", body=body, cast_to=object)
            except APIStatusError as error:
                if error.code == "context_length_exceeded":
                    return
                raise
            said = answer["choices"][0]["message"]
            asked = said.get("tool_calls", ())
            calls -= len(asked)
            if not asked or calls < 0 or turn == turns - 1:
                return
            results = await asyncio.gather(*map(client.call_tool, asked))
            messages += [said, *results]
