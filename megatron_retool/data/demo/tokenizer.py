"""The demo's tokenizer: a small byte-level BPE in Hugging Face format with a Qwen-style chat template.

Digits are always tokens of their own, as in Qwen2: a model this small learns to copy numbers digit by digit, and not
when two digits may merge. Turn and tool tags are single ids, as in the real models.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_retool.config import ConfigError
from megatron_retool.data.demo.problems import Family, draw
from megatron_retool.data.demo.traces import DemoTools, trace

# Text as Qwen2 splits it before byte-pair merges.
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>")
"""Single ids like the control tokens, but text for the reader: a decoder that skips special tokens keeps them."""

SMALLEST_VOCABULARY = 256 + len(CONTROL_TOKENS) + len(TAG_TOKENS)

# Append-only: what a message renders to does not depend on the messages after it, so a rollout may append token ids.
# The tools' schema is cut down to names and types, which keeps the prompt of the one-tool demo under sixty tokens.
CHAT_TEMPLATE = """\
{%- if tools %}
    {%- set listed %}
        {{- '<tools>' }}
        {%- for tool in tools %}
            {{- '\\n{"name": "' + tool.function.name + '", "arguments": {' }}
            {%- for name, schema in tool.function.parameters.properties.items() %}
                {{- '"' + name + '": "' + schema.type + '"' }}
                {{- '' if loop.last else ', ' }}
            {%- endfor %}
            {{- '}}' }}
        {%- endfor %}
        {{- '\\n</tools>' }}
    {%- endset %}
    {%- if messages and messages[0].role != 'system' %}
        {{- '<|im_start|>system\\n' + listed + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|im_start|>system\\n' + message.content }}
        {%- if tools and loop.first %}
            {{- '\\n' + listed }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def check_vocabulary_size(vocab_size: int) -> None:
    """Raise ConfigError where it is no multiple of 128, or holds no byte alphabet."""
    if vocab_size % 128 or vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"demo.vocab_size={vocab_size} must be a multiple of 128 and at least {SMALLEST_VOCABULARY} "
            "(256 bytes and the special tokens)"
        )


def build_tokenizer(
    families: Mapping[str, Family],
    tools: DemoTools,
    schemas: Sequence[Mapping[str, Any]],
    vocab_size: int,
    sample_traces: int = 2000,
) -> Any:
    """Train the tokenizer on demonstrations; the result has exactly ``vocab_size`` ids.

    Args:
        families: of the problems.
        tools: what the demonstrations' calls return.
        schemas: the tools' OpenAI function schemas.

    Returns:
        transformers.PreTrainedTokenizerFast with its chat template; <|im_end|> ends a turn, <|endoftext|> pads.

    Raises:
        ConfigError: ``vocab_size`` is no multiple of 128, holds no byte alphabet, or more than the demo's text fills.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_vocabulary_size(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(TAG_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample_text(families, tools, schemas, sample_traces), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in TAG_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ConfigError(
            f"demo.vocab_size={vocab_size} is more than the demo's text fills ({tokenizer.get_vocab_size()} tokens)"
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=32768
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _sample_text(
    families: Mapping[str, Family], tools: DemoTools, schemas: Sequence[Mapping[str, Any]], count: int
) -> Iterator[str]:
    # A seed of its own: the tokenizer is the same whatever the run's seed.
    rng = random.Random(7)
    names = list(families)
    for row in range(count):
        messages, _ = trace(rng, draw(rng, names[row % len(names)], families=families), tools)
        for message in messages:
            yield f"{message['role']}\n"
            yield message["content"]
            for call in message.get("tool_calls", ()):
                # Between tags, as the chat template writes it.
                yield "\n" + json.dumps(call["function"]) + "\n"
    for schema in schemas:
        function = schema["function"]
        arguments = {name: value["type"] for name, value in function["parameters"]["properties"].items()}
        yield "\n" + json.dumps({"name": function["name"], "arguments": arguments}) + "\n"
