"""What README and docs/ name exists: messages, settings, metrics, files, commands, options, variables."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from functools import cache
from pathlib import Path

import pytest

from megatron_retool.commands import find_command
from megatron_retool.config import Config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGES = ("megatron_retool", "sglang_rollout", "conversion", "tools")
FOREIGN_MESSAGES = ("Ray:", "Slurm:", "NCCL:", "CUDA:", "pip:")
SLURM_OPTIONS = "--batch --exclude --gres --mem --no-requeue --overlap --partition --requeue --signal --time"
FOREIGN_OPTIONS = {*SLURM_OPTIONS.split(), "--block", "--cap-add", "--gpus", "--logdir", "--nv", "--security-opt"}


# --- what the documentation says ------------------------------------------------------------------------------------


def named(pattern: str, *, code: str = r"```.*?```|`[^`]+`") -> list[tuple[str, str]]:
    """(page, match) of ``pattern`` inside code (``code``: blocks and spans) of all pages, each once."""
    found = {
        (str(page.relative_to(ROOT)), match)
        for page in PAGES
        for piece in re.findall(code, page.read_text(encoding="utf-8"), re.DOTALL)
        for match in re.findall(pattern, piece)
    }
    return sorted(found)


def quoted_messages() -> list[str]:
    """The project's own messages: the code in the first column of docs/failures.md."""
    found = []
    for line in (ROOT / "docs" / "failures.md").read_text(encoding="utf-8").splitlines():
        cell = line.removeprefix("| ").partition(" | ")[0]
        if line.startswith("| `") and not cell.startswith(FOREIGN_MESSAGES):
            found += re.findall(r"`([^`]+)`", cell)
    return found


# --- what the sources say -------------------------------------------------------------------------------------------


def source_files(*suffixes: str) -> list[Path]:
    folders = (*PACKAGES, "scripts", "benchmarks", "experiments", "tests/campaign")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]


@cache
def source_text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in source_files(".py", ".sh", ".sbatch", ".env"))


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    assert isinstance(node, ast.JoinedStr)
    return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)


@cache
def message_texts() -> str:
    """Every string of the code that is no docstring, one a line, with … for what is put in when it runs."""
    texts = []
    for path in source_files(".py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr)))
        texts += [_text(node).replace("%s", "…") for node in nodes if id(node) not in bare]
    for path in source_files(".sh", ".sbatch"):
        script = re.sub(r"(?m)^\s*#.*$", "", path.read_text(encoding="utf-8"))
        script = re.sub(r"\$\{\w+:[?-](?=\w)([^{}$]*)\}", r"…\1", script)  # a default, or an error, is text too
        while (shorter := re.sub(r"\$\{[^{}]*\}|\$\([^()]*\)|\$\w+|\$\*", "…", script)) != script:
            script = shorter
        texts += script.splitlines()
    return "\n".join(text.replace("\n", " ") for text in texts)


@cache
def settings() -> dict[str, tuple[str, ...] | None]:
    """Every dotted key with its choices."""
    found: dict[str, tuple[str, ...] | None] = {}

    def add(schema: type, prefix: str) -> None:
        hints = typing.get_type_hints(schema)
        for item in dataclasses.fields(schema):
            found[prefix + item.name] = item.metadata.get("choices")
            for inner in (hints[item.name], *typing.get_args(hints[item.name])):
                if dataclasses.is_dataclass(inner):
                    add(inner, f"{prefix}{item.name}.")

    add(Config, "")
    return found


# --- the tests ------------------------------------------------------------------------------------------------------


def test_the_failure_page_has_messages() -> None:
    assert len(quoted_messages()) > 60


@pytest.mark.parametrize("message", quoted_messages())
def test_message_exists(message: str) -> None:
    pattern = ".*?".join(re.escape(part) for part in message.split("…"))
    assert re.search(pattern, message_texts()), "no source says this"


def test_a_message_of_a_docstring_or_comment_does_not_count() -> None:
    assert "Every string of the code" not in message_texts()
    assert "started with an earlier job" not in message_texts()


SECTIONS = "|".join({key.rpartition(".")[0].rpartition(".")[2] for key in settings() if "." in key})
# A key stands alone in its span, or has a value; a.b(c) and paths are something else.
KEYS = [
    *named(rf"^`((?:{SECTIONS})\.[a-z_0-9.]+)`$", code="`[^`\n]+`"),
    *named(rf"(?<![\w./-])((?:{SECTIONS})\.[a-z_0-9.]+(?:=|: )[^\s`'\[]*)"),
]


def test_there_are_settings() -> None:
    assert len(KEYS) > 80


@pytest.mark.parametrize(("page", "text"), KEYS)
def test_setting_exists(page: str, text: str) -> None:
    """Also one without its first sections, as docs/algorithms.md has them."""
    key, _, value = re.sub("=|: ", "\0", text, count=1).partition("\0")
    if key.endswith((".py", ".parquet", ".safetensors")):
        return
    path = ROOT / key.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists():
        return  # a module, such as tools.registry
    known = [choices for name, choices in settings().items() if f".{name}".endswith(f".{key}")]
    assert known, f"{page} names a setting that does not exist"
    if known[0] and re.fullmatch(r"[\w-]+", value):
        assert value in known[0]


@pytest.mark.parametrize(
    ("page", "link"),
    [
        (str(page.relative_to(ROOT)), link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
        if not link.startswith(("http:", "https:"))
    ],
)
def test_link_leads_somewhere(page: str, link: str) -> None:
    name, _, anchor = link.partition("#")
    target = ROOT / page if not name else (ROOT / page).parent / name
    assert target.exists()
    if anchor:
        titles = re.findall(r"(?m)^#+ (.*)$", target.read_text(encoding="utf-8"))
        assert anchor in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


FILE = r"(?<![\w./<>{-])((?:[\w.-]+/)*[\w-]+\.(?:py|sh|sbatch|yaml|md|env)|(?:[\w.-]+/)+)(?![\w./-])"


@pytest.mark.parametrize(("page", "name"), named(FILE))
def test_file_exists(page: str, name: str) -> None:
    if name in (
        "config.yaml",
        "results.md",
        "step_000005.md",
        "path/to/file.py",
        "rollout_corr/",
        "routing_replay/",
        "reward/failures/",
        "reward/",
        "val-core/",
        "val-aux/",
        "val-quick/",
        "actor/",
        "own/",
        "val-aux/own/",
    ):
        return  # what a run makes, or a metric's prefix
    if page == "docs/metrics.md" and name.endswith("/"):
        return
    folders = "runs|logs|models|export|report|rollouts|validation(_quick)?|checkpoints|profile|learner|critic|model"
    made = rf"/|({folders}|engine_requests|tokenizer)/"
    if re.match(made, name):
        return
    if re.match(r"tensorboard/|my_\w+\.(py|yaml|sh)$", name):
        return  # the reader's own
    places = (ROOT, ROOT / "docs", ROOT / "megatron_retool", ROOT / "scripts" / "slurm")
    assert any((place / name).exists() for place in places), f"{page} names {name}"


@pytest.mark.parametrize(("page", "module"), named(r"python -m (?!tinker_cookbook|sglang)([\w.]+)"))
def test_module_exists(page: str, module: str) -> None:
    path = ROOT / module.replace(".", "/")
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize(
    ("page", "command"), named(r"(?:python -m megatron_retool|megatron-retool) ([a-z][a-z-]*(?: [a-z-]+)?)")
)
def test_command_exists(page: str, command: str) -> None:
    assert find_command(command.split())[0]


@pytest.mark.parametrize(("page", "option"), named(r"(?<![\w-])(--[a-z][a-z-]+)"))
def test_option_exists(page: str, option: str) -> None:
    if option in FOREIGN_OPTIONS:
        return
    assert re.search(rf"{option}(?![\w-])", source_text())


@pytest.mark.parametrize(("page", "variable"), named(r"(MEGATRON_RETOOL_[A-Z_]+)"))
def test_variable_exists(page: str, variable: str) -> None:
    assert re.search(rf"\b{variable}\b", source_text())


METRIC = (
    r"^`((?:actor|critic|rollout|rollout_corr|reward|tool|perf|checkpoint|monitor|dynamic_sampling|routing_replay)"
    r"/[\w/<>]+)`$"
)


@pytest.mark.parametrize(("page", "metric"), named(METRIC, code="`[^`\n]+`"))
def test_metric_exists(page: str, metric: str) -> None:
    """Each part of its name, for many names are put together."""
    for part in re.findall(r"(?<![\w<])\w+(?![\w>])", metric):
        assert re.search(rf"\b{part}\b", source_text()), f"{page}: {part} of {metric}"
