"""An agent on smolagents, as its documentation has it: a ToolCallingAgent with a calculator.

rollout.agent: examples/smolagents_agent.py:run
(pip install --no-deps smolagents==1.26.0 python-dotenv==1.2.4)

smolagents writes calls and their results into the history as texts of its own, so each of its steps is a segment.
"""

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import REMOVE_PARAMETER


@tool
def multiply(first: int, second: int) -> int:
    """Multiply two whole numbers.

    Args:
        first: One of them.
        second: The other.
    """
    return first * second


def run(task, client, *, steps=4):
    """1 where the final answer holds the ground truth, else 0."""
    # The policy decides whether it calls a tool, and where its turn ends.
    free = {"tool_choice": "auto", "stop": REMOVE_PARAMETER}
    model = OpenAIModel(client.model, api_base=client.base_url, api_key=client.api_key, **free)
    agent = ToolCallingAgent([multiply], model, max_steps=steps, verbosity_level=LogLevel.OFF)
    return float(str(task["ground_truth"]) in str(agent.run(task["messages"][-1]["content"])))
