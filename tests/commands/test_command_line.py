"""What `megatron-retool` says of itself, and to a Python that lacks its packages."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron_retool.__main__ import main
from megatron_retool.commands import COMMANDS, Command
from megatron_retool.commands.command_line import parse, parser_of
from megatron_retool.commands.pipeline import quick_form
from megatron_retool.commands.settings import settings_text
from megatron_retool.config import Config, ConfigError, load_config
from megatron_retool.config.tree import walk

ROOT = Path(__file__).parents[2]


def status_of(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_a_help_of_its_own(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*command.name.split(), "--help") == 0
    text = capsys.readouterr().out
    module = importlib.import_module(command.module)
    assert text.startswith(f"usage: megatron-retool {command.name}")
    assert "example" in text
    assert "exit status:" in text
    assert module.__doc__.split("\n")[0] in text
    assert command.summary[:20] not in text, "the list's words are not all that its help has to say"
    if "--config FILE" in text.partition("\n\n")[0]:
        assert "settings that it reads" in text


def test_help_lists_every_setting_of_a_section() -> None:
    text = settings_text(list(vars(Config())))
    for key, _, value in walk(Config()):
        if not hasattr(value, "__dataclass_fields__"):
            assert key.rpartition(".")[2] in text
    assert max(map(len, text.splitlines())) <= 80
    with pytest.raises(ValueError, match="no setting"):
        settings_text(["trainer.sed"])


def test_settings_that_commands_name_exist() -> None:
    for command in COMMANDS:
        module = importlib.import_module(command.module)
        assert parser_of(command, module).epilog


def test_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("--help") == 0
    listed = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  {command.name} " in listed
    assert max(map(len, listed.splitlines())) <= 82
    assert status_of() == 2, "nothing was done"
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian'; the nearest is 'train'"),
        (["report"], "the following arguments are required: RUN"),
        (["report", "mismatch"], "megatron-retool report mismatch: error: the following arguments are required: RUN"),
        (["train", "--confg", "x"], "unrecognized arguments: --confg"),
        (["plan", "--sizes", "8,0"], "positive whole numbers"),
    ],
)
def test_wrong_words_end_with_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(*words) == 2
    assert message in capsys.readouterr().err


def test_options_and_overrides_mix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "trainer.seed=1", "--config", "nowhere.yaml", "trainer.total_steps=2"]) == 1
    assert "nowhere.yaml does not exist" in capsys.readouterr().out


def test_help_imports_nothing_slow() -> None:
    script = (
        "import contextlib, sys; from megatron_retool.__main__ import main\n"
        f"for name in {[command.name for command in COMMANDS]!r}:\n"
        "    with contextlib.suppress(SystemExit): main([*name.split(), '--help'])\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"


def test_console_script_is_there() -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["megatron-retool"]
    module, _, name = target.partition(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.parametrize("made", [True, False], ids=["environment made", "no environment"])
def test_python_without_packages_is_told_where_they_are(tmp_path: Path, made: bool) -> None:
    venv = tmp_path / "venv"
    if made:
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(sys.executable)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-S", "-m", "megatron_retool", "train"]
    environment["MEGATRON_RETOOL_VENV"] = str(venv)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"lacks the package rich, which `megatron-retool` needs: `{'source' if made else 'bash'} " in line
    assert f"source {venv}/bin/activate" in line


def _said_by_the_check(before: str, **variables: str) -> str:
    code = f"import sys; {before}; from megatron_retool.installation import require_packages; require_packages('this')"
    environment = {**os.environ, "MEGATRON_RETOOL_VENV": sys.prefix, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_an_environment_of_an_earlier_python_is_said_to_be_old() -> None:
    line = _said_by_the_check("sys.version_info = (3, 11, 7, 'final', 0)")
    assert "is of an earlier version: it has Python 3.11, and 3.12 is needed: `rm -r " in line
    assert line.endswith("then `bash scripts/setup.sh` makes a new one")


def test_an_environment_of_an_earlier_megatron_is_said_to_be_old(tmp_path: Path) -> None:
    (tmp_path / "megatron_core-0.16.1.dist-info").mkdir()
    (tmp_path / "megatron_core-0.16.1.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.16.1\n")
    line = _said_by_the_check("pass", PYTHONPATH=str(tmp_path))
    assert line.endswith("it has megatron-core 0.16.1, and 0.19 is needed: `bash scripts/setup.sh` makes a new one")
    line = _said_by_the_check("pass", PYTHONPATH=str(tmp_path), MEGATRON_RETOOL_VENV=str(tmp_path))
    assert line.endswith(f"`source {tmp_path}/bin/activate` first, then `this`")


@pytest.mark.parametrize("name", ["installation.py", "__main__.py", "__init__.py"])
def test_earlier_pythons_can_read_what_says_so(name: str) -> None:
    ast.parse((ROOT / "megatron_retool" / name).read_text(), feature_version=(3, 9))


def test_quick_takes_the_short_form_beside_the_configuration() -> None:
    assert quick_form("configs/demo_cpu.yaml") == "configs/demo_cpu_quick.yaml"
    with pytest.raises(ConfigError, match=r"no configs/demo_moe_cpu_quick\.yaml.*demo_cpu\.yaml, smollm2"):
        quick_form("configs/demo_moe_cpu.yaml")


@pytest.mark.parametrize("quick", sorted((ROOT / "configs").glob("*_quick.yaml")), ids=lambda path: path.stem)
def test_a_short_form_has_the_same_stages_and_a_run_of_its_own(quick: Path) -> None:
    whole, short = load_config(quick.with_name(quick.name.replace("_quick", ""))), load_config(quick)
    assert short.trainer.experiment_name == f"{whole.trainer.experiment_name}_quick"
    assert [stage.name for stage in short.sft.stages] == [stage.name for stage in whole.sft.stages]
    assert short.trainer.total_steps <= 4
    assert short.trainer.total_steps % short.trainer.test_freq == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "--conifg", "a.yaml"], "unrecognized arguments: --conifg; did you mean --config?"),
        (["plan", "--confg=a.yaml"], "--confg=a.yaml; did you mean --config?"),
        (["chat", "runs/demo", "--sytem", "Be brief."], "did you mean --system?"),
        (["train", "--zzz"], "`megatron-retool train --help` lists the options"),
    ],
)
def test_an_unknown_option_names_the_nearest(words, hint, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2 and hint in capsys.readouterr().err


@pytest.mark.parametrize("name", ["base.yaml", "configs/base.yml"])
def test_a_configuration_without_its_option_is_told_the_option(name) -> None:
    with pytest.raises(ConfigError, match=f"did you mean --config {name}"):
        load_config(None, [name])


def test_a_model_that_is_not_here_is_said_before_heavy_imports() -> None:
    script = (
        "import sys; from megatron_retool.__main__ import main; status = main(['train', 'model.path=nowhere']); "
        "sys.exit(3 if 'torch' in sys.modules else status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, "the path was looked at after torch was imported"
    assert "model.path=nowhere: the directory does not exist" in done.stdout
