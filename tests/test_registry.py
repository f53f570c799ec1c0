"""What a setting may name, and what is said about each wrong target."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_retool.config import load_config
from megatron_retool.registry import ExtensionError, Need, Registry, load_object, needs


@dataclass
class Section:
    low: float = 0.2
    high: float = 0.3


def make_registry() -> Registry:
    registry: Registry = Registry("section.loss", takes=("inputs",), optional=("progress",))

    @registry.register("clip", Need.GROUPS)
    def clip(inputs, *, low=0.0, scale=1.0):
        return inputs, low, scale

    return registry


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_built_in_gets_its_keyword_arguments_from_the_section_unless_the_configuration_gives_them() -> None:
    registry = make_registry()
    assert registry.bind("clip", {}, Section())(1) == (1, 0.2, 1.0)
    assert registry.bind("clip", {"low": 0.5, "scale": 2.0}, Section())(1) == (1, 0.5, 2.0)
    assert registry.bind("clip", {}, Section()).needs == {Need.GROUPS}


def test_a_file_and_a_module_give_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Thing:\n    def __init__(self, inputs, high=0): self.high = high\n"
    file = write(tmp_path / "own_things.py", text)
    registry = make_registry()
    bound = registry.bind(f"{file}:Thing", {}, Section())
    assert bound(1).high == 0.3 and bound.needs == frozenset()
    assert registry.load(f"{file}:Thing") is registry.load(f"{file}:Thing"), "one module for one file"
    assert pickle.loads(pickle.dumps(bound(1))).high == 0.3
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.bind("own_things:Thing").target == "own_things:Thing"


def test_an_object_of_ones_own_declares_its_needs(tmp_path: Path) -> None:
    text = "from megatron_retool.registry import needs\n@needs('critic', 'entropy')\ndef loss(inputs): ...\n"
    file = write(tmp_path / "a.py", text)
    assert make_registry().bind(f"{file}:loss").needs == {Need.CRITIC, Need.ENTROPY}
    with pytest.raises(ValueError, match="'coffee' is not a valid Need"):
        needs("coffee")


@pytest.mark.parametrize(
    ("target", "kwargs", "said"),
    [
        ("clop", {}, r"section.loss='clop' is not one of clip, and not of the form .* the nearest is clip"),
        ("{file}:lost", {}, r"section.loss=.*own.py:lost: .*own.py has no 'lost'; did you mean loss\?"),
        ("{file}:number", {}, r"section.loss=.*: the int '3' cannot be called: name a function or a class"),
        ("{file}:no_arguments", {}, r"no_arguments takes 0 argument\(s\) by position, and is called with 1: inputs"),
        ("{file}:loss", {"hihg": 1}, r"section.loss_kwargs.hihg: loss has no parameter of that name; its own are high"),
        ("{file}:needy", {}, r"needy needs alpha: set section.loss_kwargs=\{alpha: …\}, or give it a default"),
        ("{dir}/none.py:loss", {}, r"section.loss=.*: there is no file .*none.py: correct the path"),
        ("no_such_package.x:loss", {}, r"there is no module no_such_package.x: install it, put its directory on"),
        ("{dir}/broken.py:loss", {}, r"importing .*broken.py failed at line 2: ZeroDivisionError: division by zero"),
        ("{dir}/syntax.py:loss", {}, r"importing .*syntax.py failed at line 1: SyntaxError"),
        ("{dir}/missing_import.py:f", {}, r"failed at line 1: ModuleNotFoundError: No module named 'not_installed'"),
        ("{dir}/exits.py:f", {}, r"importing .*exits.py failed at line 1: SystemExit: 3"),
    ],
)
def test_a_wrong_target_is_one_message_with_key_object_and_cure(
    tmp_path: Path, target: str, kwargs: dict, said: str
) -> None:
    file = write(
        tmp_path / "own.py",
        "number = 3\n"
        "def no_arguments(): ...\n"
        "def loss(inputs, *, high=0, progress=None): ...\n"
        "def needy(inputs, *, alpha): ...\n",
    )
    write(tmp_path / "broken.py", "x = 1\ny = x / 0\n")
    write(tmp_path / "syntax.py", "def (:\n")
    write(tmp_path / "missing_import.py", "import not_installed\n")
    write(tmp_path / "exits.py", "raise SystemExit(3)\n")
    with pytest.raises(ExtensionError, match=said):
        make_registry().bind(target.format(file=file, dir=tmp_path), kwargs)


def test_what_an_object_raises_is_one_message_with_its_own_line(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.py", "def half(inputs):\n    return inputs[0] / 2\n\ndef loss(inputs): return half(inputs)\n"
    )
    bound = make_registry().bind(f"{file}:loss")
    assert bound.attempt([3]) == 1.5
    with pytest.raises(
        ExtensionError, match=r"^section.loss=.*c.py:loss: loss raised IndexError at line 2: list index"
    ):
        bound.attempt([])


def test_the_caller_asks_which_of_its_own_arguments_an_object_takes(tmp_path: Path) -> None:
    file = write(tmp_path / "b.py", "def loss(inputs, progress): ...\n")
    registry = make_registry()
    assert registry.wants(registry.bind(f"{file}:loss"), "progress")
    assert not registry.wants(registry.bind("clip"), "progress")


def test_a_file_is_looked_up_beside_the_configuration_and_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "work").mkdir()
    write(tmp_path / "here" / "mine.py", "def f(): ...\n")
    write(tmp_path / "work" / "other.py", "def f(): ...\n")
    config = write(tmp_path / "here" / "c.yaml", "reward: {function: mine.py:f}\n")
    monkeypatch.chdir(tmp_path / "work")
    assert load_config(config).reward.function == f"{tmp_path}/here/mine.py:f"
    assert load_config(config, ["reward.function=other.py:f"]).reward.function == f"{tmp_path}/work/other.py:f"
    assert load_config(config, ["reward.function=lost.py:f"]).reward.function == "lost.py:f", "its room names the key"


def test_an_object_without_a_registry() -> None:
    assert load_object("k", "pathlib:Path.cwd")() == Path.cwd()
