"""What the demo's experiments start from: data, fine-tuned model and its conversion, made by one run for all of them.

A run that made its base leaves, beside ``pipeline.json`` with the settings that it depends on,

    data/         prompts, conversations and the random model (make-demo)
    sft_hf/       the fine-tuned model, Hugging Face
    sft_mcore/    the same, Megatron-Core

A later run whose settings agree in these starts from there (``demo.base=auto``), so that a second experiment repeats
nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversion.files.directory import COMPLETE_NAME
from megatron_retool.config import Config, ConfigError
from run_files import PIPELINE_FILE


@dataclass(frozen=True)
class DemoBase:
    """The base that the run in ``run_dir`` made."""

    run_dir: Path

    @property
    def data(self) -> Path:
        """The demo's data and random model."""
        return self.run_dir / "data"

    @property
    def sft_hf(self) -> Path:
        """The fine-tuned model, Hugging Face's form."""
        return self.run_dir / "sft_hf"

    @property
    def sft_mcore(self) -> Path:
        """The fine-tuned model, Megatron-Core's form."""
        return self.run_dir / "sft_mcore"

    @property
    def missing(self) -> Path | None:
        """A part that is not there; None where the base is complete."""
        parts = (self.data / "model", self.run_dir / "sft" / COMPLETE_NAME, self.sft_hf, self.sft_mcore)
        return next((path for path in parts if not path.exists()), None)

    @property
    def data_overrides(self) -> list[str]:
        """Settings by which another run reads its data."""
        return [f"demo.directory={self.data}"]

    @property
    def model_overrides(self) -> list[str]:
        """Settings by which another run starts from its model."""
        return [f"model.path={self.sft_hf}", f"model.mcore_path={self.sft_mcore}"]


def base_settings(config: Config) -> dict[str, Any]:
    """The settings that a base depends on, by dotted key. Where it lies is none of them."""
    flat: dict[str, Any] = {"trainer.seed": config.trainer.seed}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                add(f"{prefix}.{key}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                add(f"{prefix}[{index}]", inner)
        elif isinstance(value, str) and value.startswith(f"{config.demo.directory}/"):
            flat[prefix] = "${demo.directory}" + value.removeprefix(config.demo.directory)
        else:
            flat[prefix] = value

    demo = dataclasses.asdict(config.demo)
    for name in ("enable", "directory", "base"):
        del demo[name]
    add("demo", demo)
    add("sft", dataclasses.asdict(config.sft))
    return flat


def difference(made_with: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """The first setting that differs, as "key=old, now new"; None where none does.

    A key that is new since the base was made had its default then, and one that is gone counts for nothing.
    """
    if not made_with:
        return None
    made_with = {**base_settings(Config()), **made_with}
    for key, value in settings.items():
        if key in made_with and made_with[key] != value:
            return f"{key}={made_with[key]!r}, now {value!r}"
    gone = [key for key in made_with if key not in settings and key.startswith("sft.stages[")]
    return f"{gone[0]}={made_with[gone[0]]!r}, now nothing" if gone else None


def read_state(run_dir: Path) -> dict[str, Any]:
    """``pipeline.json`` of a run: settings, seconds by stage, steps of results; empty where there is none."""
    path = run_dir / PIPELINE_FILE
    if not path.exists():
        return {}
    state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return state


def find_base(config: Config) -> DemoBase | None:
    """The base of another run to start from; None where the run makes its own, or has begun to.

    ``demo.base`` names a run, whatever its settings, or is ``auto``: what this run started from before, else the run
    in ``trainer.runs_dir`` with equal settings whose base is complete and newest.

    Raises:
        ConfigError: the base that is named, or that the run started from, is not there or not complete.
    """
    run_dir, wanted = config.trainer.run_dir, config.demo.base
    if wanted == "none" or Path(config.demo.directory).exists():
        return None
    named = str(read_state(run_dir).get("base", wanted)) if wanted == "auto" else wanted
    if named != "auto":
        base = DemoBase(Path(named))
        if base.missing is not None:
            origin = f"demo.base={named}" if named == wanted else f"{run_dir} started from the base of {named}"
            raise ConfigError(
                f"{origin}: {base.missing} does not exist; give a demo run whose fine-tuning is done "
                "(demo.base=runs/…), or demo.base=none to make data and base model again"
            )
        return base
    settings = base_settings(config)
    result = [
        base
        for path in run_dir.parent.glob(f"*/{PIPELINE_FILE}")
        if (base := DemoBase(path.parent)).missing is None
        and "settings" in (state := read_state(path.parent))
        and difference(state["settings"], settings) is None
    ]
    return max(result, key=lambda base: base.sft_mcore.stat().st_mtime, default=None)


def missing_base(config: Config) -> str:
    """Why ``demo.base=auto`` found nothing: the runs that have a base, and where each differs."""
    settings = base_settings(config)
    reasons = [
        f"{path.parent} has {result}"
        for path in sorted(config.trainer.run_dir.parent.glob(f"*/{PIPELINE_FILE}"))
        if DemoBase(path.parent).missing is None
        and (result := difference(read_state(path.parent).get("settings", {}), settings))
    ]
    where = "; ".join(reasons) or f"no run in {config.trainer.run_dir.parent} has one"
    return (
        f"No base with the same demo, sft and trainer.seed settings was found ({where}): make it with the command "
        "pipeline, or name a run's with demo.base=runs/…"
    )


def with_demo_base(config: Config, reload: Callable[[list[str]], Config]) -> Config:
    """The configuration of a single command of the demo, with what the run starts from.

    A run of its own has ``demo.directory``; any other takes the base of ``demo.base``: its data, and its fine-tuned
    model where no other is named. Where there is no base the configuration stays as it is (``naming_the_base``).

    Args:
        reload: reads the same configuration with overrides that the command line's own come after.

    Raises:
        ConfigError: the base that ``demo.base`` names is not there.
    """
    base = find_base(config) if config.demo.enable else None
    if base is None:
        return config
    own_model = Path(config.model.path) == Path(config.demo.directory) / "model"
    return reload([*base.data_overrides, *(base.model_overrides if own_model else [])])


@contextmanager
def naming_the_base(config: Config) -> Iterator[None]:
    """For the length of the block, an error about a file of the demo that was never made says where a base may be."""
    try:
        yield
    except (ValueError, OSError) as error:
        directory = config.demo.directory
        if config.demo.enable and directory in str(error) and not Path(directory).exists():
            raise ConfigError(f"{error}. {missing_base(config)}") from error
        raise
