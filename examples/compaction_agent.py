"""An agent with compaction: after each step it keeps its notes and forgets the conversation.

rollout.agent: examples/compaction_agent.py:run

Each step is sent with a history that was rewritten, so each becomes a segment of the rollout; all of them learn from
the one reward.
"""

from openai import AsyncOpenAI


async def run(task, client, *, steps=3):
    """1 where the last notes hold the ground truth, else 0."""
    openai = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    question, notes = task["messages"][-1]["content"], "nothing yet"
    for step in range(steps):
        asked = (
            f"{question}\n\nYour notes so far: {notes}\n\nStep {step + 1} of {steps}: continue, and end with new notes."
        )
        answer = await openai.chat.completions.create(model=client.model, messages=[{"role": "user", "content": asked}])
        notes = answer.choices[0].message.content or notes
    return float(str(task["ground_truth"]) in notes)
