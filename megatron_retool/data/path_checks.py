"""What can be said against the paths that a command was given, before the imports that take seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from conversion.files.safetensors_headers import HFCheckpointError, check_tensors, check_weight_files
from conversion.model.config_reader import MalformedConfig, UnsupportedArchitecture
from megatron_retool.config import Config, ConfigError, DataConfig, DemoConfig, ModelConfig, SFTConfig
from megatron_retool.config.model import check_model_path
from megatron_retool.data.folders import REASONING_GYM, DataError, data_files
from megatron_retool.data.tokenizer import check_tokenizer_files, check_vocabulary

_READ_AT_ONCE_BYTES = 4 * 2**20
"""Of a data file: its rows are read in less time than the imports take."""
_ROOM_FOR_NAMES = 48
"""Bytes by which names of files beside a directory, such as its lock's, are longer than its own."""


def check_paths(config: Config, *, prompts: Iterable[str] = (), stages: bool = False) -> None:
    """Check the run's directory, the model's files and the data files; what make-demo is going to write is left out.

    Args:
        prompts: settings of files of prompts that the command reads, such as "train_files". Small ones are read.
        stages: the command reads those of sft.stages.

    Raises:
        ConfigError: the message names key and cure.
    """
    check_directory("trainer.runs_dir and trainer.experiment_name", config.trainer.run_dir)
    if (config.trainer.run_dir / "metrics.jsonl").is_dir():
        raise ConfigError(
            f"{config.trainer.run_dir / 'metrics.jsonl'} is a directory, where a run writes a file: move it away"
        )
    if not config.model.path:
        raise ConfigError("model.path is not set: give a Hugging Face directory or a hub id")
    for name in prompts:
        _check_files(config.demo, f"data.{name}", getattr(config.data, name), partial(_read_prompts, config.data))
    if stages:
        check_stage_files(config.sft, config.demo, config.model)
    if not is_made_by_the_demo(config.demo, config.model.path):
        check_model_files(config.model)


def check_stage_files(sft: SFTConfig, demo: DemoConfig, model: ModelConfig) -> None:
    """Raise ConfigError where sft.stages lack a file, or one is missing, of another kind, or small and wrong."""
    if not sft.stages:
        raise ConfigError("sft.stages is empty: name at least one stage with train_files")
    for number, stage in enumerate(sft.stages):
        if not stage.train_files:
            raise ConfigError(f"sft.stages[{number}].train_files is empty: name at least one file")
        read = {"dpo": partial(_read_pairs, sft), "top_k": partial(_read_scored, model)}.get(
            stage.loss, partial(_read_conversations, sft)
        )
        _check_files(demo, f"sft.stages[{number}].train_files", stage.train_files, read)
        _check_files(demo, f"sft.stages[{number}].val_files", stage.val_files, read)


def check_model_files(model: ModelConfig) -> None:
    """Check model.path, its config.json's types, the sizes of its weight files, names and shapes of its tensors, the
    files of its tokenizer, and that its vocabulary has room for the tokenizer's.

    A model that no family covers passes: an evaluation may serve it.

    Raises:
        ConfigError: the message names the file and the cure.
    """
    check_model_path(model.path)
    if model.tokenizer_path:
        check_model_path(model.tokenizer_path, "model.tokenizer_path")
    try:
        check_weight_files(model.path)
        if (Path(model.path) / "config.json").is_file():
            check_tensors(model.path, model.architecture())
    except (HFCheckpointError, MalformedConfig) as error:
        raise ConfigError(f"model.path={model.path}: {error}") from error
    except UnsupportedArchitecture:
        pass
    check_tokenizer_files(model)
    check_vocabulary(model)


def check_directory(keys: str, directory: Path) -> None:
    """Raise ConfigError where ``directory``, which ``keys`` name, cannot be made or written."""
    if "\0" in str(directory):
        raise ConfigError(f"{str(directory)!r:.80} is no path: {keys} hold a NUL character")
    place = directory
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        kind = "a link that leads nowhere" if place.is_symlink() else "a file"
        raise ConfigError(f"{place} is {kind} where {keys} need a directory: choose another, or move it away")
    if not os.access(place, os.W_OK | os.X_OK):
        reason = "lies on a file system that is read-only" if _is_read_only(place) else "may not be written"
        raise ConfigError(f"{place} {reason}, where {keys} need a directory: choose another")
    longest = os.pathconf(place, "PC_NAME_MAX") - _ROOM_FOR_NAMES
    for name in directory.parts:
        if len(os.fsencode(name)) > longest:
            raise ConfigError(
                f"{name[:40]}… has {len(os.fsencode(name))} bytes, more than the {longest} that a name in {keys} may "
                "have: choose a shorter one"
            )
    longest = os.pathconf(place, "PC_PATH_MAX") // 2
    if len(os.fsencode(os.path.abspath(directory))) > longest:
        raise ConfigError(f"{str(directory)[:40]}… is longer than the {longest} bytes that {keys} may have together")


def check_output_file(option: str, file: Path) -> None:
    """Raise ConfigError where ``file``, which a command line's ``option`` names, cannot be written."""
    if file.is_dir():
        raise ConfigError(f"{option} {file} is a directory: name a file in it")
    check_directory(option, file.absolute().parent)


def _is_read_only(place: Path) -> bool:
    return bool(os.statvfs(place).f_flag & os.ST_RDONLY)


def _check_files(demo: DemoConfig, key: str, sources: Iterable[str], read: Callable[[Sequence[str]], object]) -> None:
    for source in sources:
        if source.startswith(REASONING_GYM) or is_made_by_the_demo(demo, source):
            continue
        try:
            read([file for file in data_files(source) if os.path.getsize(file) <= _READ_AT_ONCE_BYTES])
        except DataError as error:
            raise ConfigError(f"{key}: {error}") from None


def _read_prompts(data: DataConfig, files: Sequence[str]) -> object:
    from megatron_retool.data.prompt_files import read_prompts

    return read_prompts(files, data.prompt_key, data.question_instruction)


def _read_conversations(sft: SFTConfig, files: Sequence[str]) -> object:
    from megatron_retool.data.sft_dataset import read_conversations

    return [read_conversations(file, sft.messages_key, sft.tools_key) for file in files]


def _read_pairs(sft: SFTConfig, files: Sequence[str]) -> object:
    from megatron_retool.data.preference_dataset import read_pairs

    return [read_pairs(file, sft.prompt_key, sft.chosen_key, sft.rejected_key, sft.tools_key) for file in files]


def _read_scored(model: ModelConfig, files: Sequence[str]) -> object:
    from megatron_retool.data.scored_dataset import read_scored

    known = (Path(model.path) / "config.json").is_file()
    size = model.architecture().vocab_size if known else 2**31
    return [read_scored(file, size) for file in files]


def is_made_by_the_demo(demo: DemoConfig, path: str) -> bool:
    """Whether make-demo writes ``path``, which may still be that of other settings."""
    return demo.enable and Path(demo.directory) in Path(path).parents
