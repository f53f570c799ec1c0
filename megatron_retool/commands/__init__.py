"""The commands of `megatron-retool`: a line in COMMANDS and a module each.

The module's docstring is the text of ``megatron-retool NAME --help``, after the usage line. It has

    add_arguments(parser)           the command's own arguments; ``settings.add_config`` adds --config and overrides
    run(options, console) -> int    does the work and returns the exit status
    SETTINGS = ("trainer", …)       optional: sections or keys of the configuration that it reads, for its help
    EXIT_STATUS = {85: "…"}         optional: what exit statuses mean beside those that all commands have

Only the module of the command that was asked for is imported, also for its help: what is slow to import (torch, Ray)
belongs into ``run``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """
    Attributes:
        name: one word, or two where several commands share the first.
        summary: its line in the list of commands.
        module: dotted name.
    """

    name: str
    summary: str
    module: str


COMMANDS = (
    Command("pipeline", "train; for the demo, from data to report", "megatron_retool.commands.pipeline"),
    Command("train", "the RL loop", "megatron_retool.commands.train"),
    Command("sft", "supervised fine-tuning", "megatron_retool.commands.sft"),
    Command("engines", "list, add and remove engines during a run", "megatron_retool.commands.engines"),
    Command("evaluate", "validation of model.path", "megatron_retool.commands.evaluate"),
    Command("serve", "a model or run behind OpenAI's and Anthropic's APIs", "megatron_retool.commands.serve"),
    Command("tinker", "a server for clients of Tinker, who write the training loop", "megatron_retool.commands.tinker"),
    Command("chat", "talk to a model or run on the terminal", "megatron_retool.commands.chat"),
    Command("make-demo", "the demo's model, tokenizer and data", "megatron_retool.commands.make_demo"),
    Command("data prepare", "published data sets as our parquet", "megatron_retool.commands.data_prepare"),
    Command(
        "data construct", "plain reasoning to reasoning with code, for SFT", "megatron_retool.commands.data_construct"
    ),
    Command("data score", "a teacher's likeliest tokens in traces, for SFT", "megatron_retool.commands.data_score"),
    Command("plan", "memory and time on given GPUs, before any is asked for", "megatron_retool.commands.plan"),
    Command("doctor", "whether this machine can train: every layer, with the cure", "megatron_retool.commands.doctor"),
    Command("admit", "whether a model can be trained: held against transformers", "megatron_retool.commands.admit"),
    Command("report", "a run in one file: summary, curves, time", "megatron_retool.commands.report"),
    Command(
        "report mismatch", "where engine and learner disagree in a run", "megatron_retool.commands.report_mismatch"
    ),
    Command("report operators", "which operator makes them differ", "megatron_retool.commands.report_operators"),
    Command("report referee", "which of the two is off, and where", "megatron_retool.commands.report_referee"),
    Command("check", "whether the files of a run are what was written", "megatron_retool.commands.check"),
    Command("config reference", "every setting: type, default, meaning", "megatron_retool.commands.config_reference"),
    Command("config from-verl", "verl's settings in our words", "megatron_retool.commands.config_from_verl"),
    Command("view", "a step's groups, or a response with its tokens coloured", "megatron_retool.commands.view"),
    Command("diff", "runs side by side, and where they part", "megatron_retool.commands.diff"),
)


def find_command(words: list[str]) -> tuple[Command | None, list[str]]:
    """The command that ``words`` begin with, the longest name first, and the words after its name."""
    for length in (2, 1):
        for command in COMMANDS:
            if len(words) >= length and command.name.split() == words[:length]:
                return command, words[length:]
    return None, words
