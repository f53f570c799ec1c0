"""What `serve` and `chat` are given (a model's directory, a run, a checkpoint of one), and the settings with it.

| given | served | settings |
|---|---|---|
| a Hugging Face directory | it | of the run that it lies in, else the defaults |
| a run's directory | its export if it is of the newest step, else the newest checkpoint, or that of a step | its own |
| a checkpoint's directory | it | of the run that it lies in |

A configuration that is named takes the place of the run's, and overrides come last.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conversion.files.checksums import COMPLETE_NAME
from conversion.files.directory import FORMAT_NAME
from megatron_retool.config import Config, ConfigError, ModelConfig, RolloutConfig, load_config
from megatron_retool.data.path_checks import check_model_files
from megatron_retool.errors import InputError
from megatron_retool.runs.checkpoints import complete_checkpoints
from megatron_retool.runs.demo_base import read_state
from megatron_retool.runs.weights_checkpoints import weights_checkpoints
from sglang_rollout.engine.base import EngineStartError
from sglang_rollout.engine.launch_command import CPU_CACHE_TOKENS, RESERVED_TOKENS, resolve_device

_LEVELS_BELOW_A_RUN = 3


@dataclass(frozen=True)
class ServedSource:
    """
    Attributes:
        name: by which clients know the model.
        description: what is served, for people.
        config: its model.path is what is served: a Hugging Face directory, or a checkpoint that must be exported.
    """

    name: str
    description: str
    config: Config


def find_source(
    target: str, step: int | None = None, config_file: str | None = None, overrides: Sequence[str] = ()
) -> ServedSource:
    """What ``target`` names.

    Args:
        step: of the run's checkpoint; None: the newest.
        config_file: settings in place of the run's.
        overrides: dotted.key=value.

    Raises:
        FileNotFoundError, ValueError: it is no model, checkpoint or run, or has not the step.
        ConfigError: of the settings.
    """
    given = Path(target)
    if not given.is_dir():
        kind = "is a file" if given.exists() else "does not exist"
        raise FileNotFoundError(
            f"{target} {kind}: name a run (runs/<experiment_name>), one of its checkpoints, or the directory of a "
            f"Hugging Face model{_known_runs()}"
        )
    is_model, is_checkpoint = (given / "config.json").is_file(), _is_checkpoint(given)
    run_dir = _run_of(given)
    if is_model or is_checkpoint:
        if step is not None:
            raise InputError(f"--step {step} chooses a checkpoint of a run, and {target} is one model: leave it out")
        path, name = given, f"{run_dir.name}/{given.name}" if run_dir is not None else given.resolve().name
        description = target
    elif run_dir is not None and run_dir == given.resolve():
        path, result = _of_run(given, step)
        name = run_dir.name
        description = f"{target}, step {result} ({path.name})" if result is not None else f"{target} ({path.name})"
    else:
        raise InputError(
            f"{target} is neither a run (it has no config.yaml) nor a checkpoint (no {FORMAT_NAME}) nor a Hugging Face "
            "model (no config.json)"
        )
    settings = config_file or (run_dir / "config.yaml" if run_dir is not None else None)
    config = load_config(settings, overrides)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(path)))
    if (path / "config.json").is_file():
        check_model_files(config.model)
    return ServedSource(name, description, _for_serving(config))


def with_work_directory(config: Config, directory: Path) -> Config:
    """``config`` as that of a run in ``directory``, so that nothing is written into the run that is served."""
    trainer = dataclasses.replace(config.trainer, runs_dir=str(directory), experiment_name="serving")
    return dataclasses.replace(config, trainer=trainer)


@contextmanager
def in_temporary_logs() -> Iterator[None]:
    """A block in which the logs of engines go with the temporary directory that they lie in: an EngineStartError says
    how to keep them."""
    try:
        yield
    except EngineStartError as error:
        raise EngineStartError(f"{error}\nThat log is temporary: --log-dir DIR keeps it") from error


def context_length(rollout: RolloutConfig, model: ModelConfig) -> int:
    """Tokens of a context with its answer, by rollout.engine and the model's config.json; of what the model or the
    cache holds, those that SGLang leaves free are taken off.

    Raises:
        ConfigError: none of them says.
    """
    engine = rollout.engine
    known, held = [], [engine.max_total_tokens]
    if engine.context_length is not None:
        known.append(engine.context_length)
    else:
        said = json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8"))
        held.append(said.get("max_position_embeddings") if isinstance(said, dict) else None)
    free = RESERVED_TOKENS if engine.backend == "sglang" else 0
    known += [limit - free for limit in held if isinstance(limit, int)]
    if not known:
        raise ConfigError(
            f"{model.path}/config.json has no max_position_embeddings: say rollout.engine.context_length=…"
        )
    return min(known)


def _of_run(run_dir: Path, step: int | None) -> tuple[Path, int | None]:
    """The checkpoint or export of a run, and its step where that is known."""
    checkpoints = {each.step: each.path for each in weights_checkpoints(run_dir)}
    checkpoints |= {each.step: each.path for each in complete_checkpoints(run_dir)}
    if step is not None:
        if step not in checkpoints:
            there = f"it has {', '.join(map(str, sorted(checkpoints)))}" if checkpoints else "it has none"
            raise InputError(f"{run_dir} has no complete checkpoint of step {step}: {there}")
        return checkpoints[step], step
    export = run_dir / "export"
    exported = read_state(run_dir).get("steps", {}).get("export") if (export / COMPLETE_NAME).is_file() else None
    newest = max(checkpoints, default=None)
    if exported is not None and (newest is None or exported >= newest):
        return export, exported
    if newest is None:
        if (export / "config.json").is_file():
            return export, None
        raise InputError(
            f"{run_dir} has neither a complete checkpoint nor an export yet: trainer.save_freq and "
            "trainer.save_weights_freq say when a run saves"
        )
    return checkpoints[newest], newest


def _for_serving(config: Config) -> Config:
    """Without what only training needs of engines, and with a KV cache that a CPU has room for."""
    engine = config.rollout.engine
    on_cpu = engine.backend == "sglang" and resolve_device(engine.device) == "cpu"
    if on_cpu and engine.max_total_tokens is None:
        engine = dataclasses.replace(engine, max_total_tokens=CPU_CACHE_TOKENS)
    return dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, engine=engine),
        learner=dataclasses.replace(config.learner, routing_replay="none"),
        cluster=dataclasses.replace(config.cluster, placement="disaggregated"),
    )


def _is_checkpoint(directory: Path) -> bool:
    return any((each / FORMAT_NAME).is_file() for each in (directory, directory / "learner"))


def _run_of(directory: Path) -> Path | None:
    """The run that ``directory`` is or lies in."""
    place = directory.resolve()
    for each in (place, *list(place.parents)[:_LEVELS_BELOW_A_RUN]):
        if (each / "config.yaml").is_file():
            return each
    return None


def _known_runs() -> str:
    names = sorted(path.parent.name for path in Path("runs").glob("*/config.yaml"))
    return f"; runs/ has {', '.join(names[:8])}" if names else ""
