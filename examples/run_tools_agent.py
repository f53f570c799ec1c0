"""An agent on plain ``openai`` that has no tools of its own: those of the run (rollout.multi_turn.tools) do its work.

rollout.agent: examples/run_tools_agent.py:run
"""

import asyncio
import ssl

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion

CERTIFICATES = ssl.create_default_context()
"""Read once: a client that reads them itself takes longer to make than to use."""


async def run(task, client, *, turns=4, calls=3):
    """No reward: ``reward.function`` judges what was said."""
    http = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, http_client=http) as openai:
        messages, tools = list(task["messages"]), task["tools"]
        for turn in range(turns):
            body = {"model": client.model, "messages": messages, "tools": tools}
            try:
                # As ``chat.completions.create``, which first takes the whole history through its types, in most of a
                # call's time.
                answer = await openai.post("/chat/completions", body=body, cast_to=ChatCompletion)
            except APIStatusError as error:
                if error.code == "context_length_exceeded":
                    return
                raise
            said = answer.choices[0].message
            calls -= len(said.tool_calls or ())
            if not said.tool_calls or calls < 0 or turn == turns - 1:
                return
            results = [openai.post("/tool_calls", body=call.model_dump(), cast_to=object) for call in said.tool_calls]
            messages += [said.model_dump(exclude_none=True), *await asyncio.gather(*results)]
