"""An agent on plain ``openai``: asks, runs the calculator when it is called, and is right or wrong.

rollout.agent: examples/openai_agent.py:run
"""

import ast
import json
import operator

from openai import AsyncOpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Compute with + - * and //.", "parameters": PARAMETERS}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


async def run(task, client, *, turns=8):
    """1 where the last answer holds the ground truth, else 0."""
    openai = AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    messages, tools = list(task["messages"]), [{"type": "function", "function": CALCULATOR}]
    for _ in range(turns):
        answer = await openai.chat.completions.create(model=client.model, messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    return float(str(task["ground_truth"]) in (message.content or ""))


def calculate(arguments: str) -> str:
    """The value of {"expression": …}, or what is wrong with it."""
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except Exception as error:
        return f"Error: {error}"


def value(node: ast.AST) -> int:
    """Of numbers and the four operators alone: what a model writes is never evaluated as Python."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError("only whole numbers, + - * and // are known")
