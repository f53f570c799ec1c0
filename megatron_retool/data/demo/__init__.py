"""The demo: a tiny model and integer problems that it learns to solve with tools, made from a seed.

``make_demo(config)`` writes everything into ``config.demo.directory``:

    model/             Qwen2 with random weights in Hugging Face format, and its tokenizer
    pretrain.parquet   short snippets for the first training stage (columns messages, tools: JSON text)
    sft.parquet        multi-turn demonstrations (same columns); sft_val.parquet held out
    train.parquet      prompts for reinforcement learning (verl's columns); val.parquet held out
    corpus.parquet     what the search tool of demo.variant=two_tools knows (columns id, text)
    manifest.json      what all of it was made from
"""

from megatron_retool.data.demo.make import make_demo

__all__ = ["make_demo"]
