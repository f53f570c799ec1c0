"""Every number has a range, every value the type of its key, and what is near an unknown key is really near."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest

from megatron_retool.algorithms.settings import BUILT_IN
from megatron_retool.config import Config, ConfigError, SFTConfig, SFTStage, load_config
from megatron_retool.config.nearest import nearest_key
from megatron_retool.config.schema import dotted_keys
from megatron_retool.config.tree import check_values, walk
from megatron_retool.fields import Range, number
from untrusted import MOST_TOLD

EVERYTHING = dataclasses.replace(Config(), sft=SFTConfig(stages=[SFTStage()]))


def numbers(node: Any, prefix: str = "", nodes: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """(dotted key, the sections that it lies in from the outermost, its field) of every number, lists of them too."""
    nodes = (*nodes, node)
    hints = get_type_hints(type(node))
    for item in dataclasses.fields(node):
        value, hint = getattr(node, item.name), hints[item.name]
        if {int, float} & {hint, *get_args(hint)}:
            yield prefix + item.name, nodes, item
        for inner in value if isinstance(value, list) else [value]:
            if dataclasses.is_dataclass(inner):
                yield from numbers(inner, f"{prefix}{item.name}.", nodes)


NUMBERS = {key: (nodes[-1], item) for key, nodes, item in numbers(EVERYTHING)}


def test_the_walk_reaches_all_numbers():
    assert len(NUMBERS) > 130
    assert {"learner.optimizer.betas", "sft.stages.optimizer.lr", "rollout.val.top_p"} <= set(NUMBERS)


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_a_range_and_is_refused_outside(key):
    section, item = NUMBERS[key]
    assert isinstance(item.metadata.get("range"), Range), f"{key}: declare it with number, at_least_one, positive, …"
    allowed, default = item.metadata["range"], getattr(section, item.name)
    whole = {int} & {get_type_hints(type(section))[item.name], *get_args(get_type_hints(type(section))[item.name])}
    wrong = [math.nan, math.inf, -math.inf, allowed.high + 1, allowed.low - 1, -(10**400), 10**400]
    wrong += [allowed.low] if not allowed.includes_low else []
    wrong += [allowed.high] if not allowed.includes_high else []
    for value in wrong:
        if value == allowed.special:
            continue
        broken = dataclasses.replace(section, **{item.name: [value, 0.5] if isinstance(default, list) else value})
        with pytest.raises(ConfigError, match=rf"{item.name}=.* must be .*(at least|above)") as caught:
            check_values(broken, "section.")
        assert str(allowed) in str(caught.value)
    for value in (allowed.low if allowed.includes_low else None, allowed.high if allowed.includes_high else None):
        if value is not None:
            good = int(value) if whole else float(value)
            check_values(
                dataclasses.replace(section, **{item.name: [good, good] if isinstance(default, list) else good})
            )


def test_defaults_lie_in_their_ranges():
    check_values(EVERYTHING)


@pytest.mark.parametrize(
    "override",
    [
        "learner.optimizer.lr=-1",
        "trainer.total_steps=-2",
        "algorithm.clip_ratio_low=-3",
        "rollout.train.temperature=.nan",
        "tools.code_interpreter.workers=-1",
        "learner.world_size=0",
        "learner.mini_batch_size=0",
        "learner.tensor_model_parallel_size=0",
        "learner.pipeline_model_parallel_size=0",
        "learner.context_parallel_size=0",
        "learner.expert_model_parallel_size=0",
        "learner.optimizer.betas=[0.9,1.0]",
        "sft.stages=[{optimizer: {lr: 0}}]",
        "rollout.train.top_k=0",
    ],
)
def test_a_number_outside_its_range_names_key_value_and_range(override):
    with pytest.raises(ConfigError, match=r" must be (-1, or )?(at least|above) -?\d.*, (at most|below) \d"):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.seed=many", "trainer.seed=many must be a whole number"),
        ("trainer.seed=1.5", "trainer.seed=1.5 must be a whole number"),
        ("trainer.seed=true", "trainer.seed=True must be a whole number"),
        ("trainer.seed=null", "trainer.seed=null must be a whole number"),
        ("trainer.total_steps=[3]", "trainer.total_steps=[3] must be a whole number, or null"),
        ("algorithm.gamma=all", "algorithm.gamma=all must be a number"),
        ("data.shuffle=7", "data.shuffle=7 must be true or false"),
        ("data.prompt_key={a: 1}", "data.prompt_key={'a': 1} must be text"),
        ("data.train_files={a: 1}", "data.train_files={'a': 1} must be a list, each element text"),
        ("data.train_files=[[a]]", "data.train_files[0]=['a'] must be text"),
        ("learner.optimizer.betas=[a, b]", "learner.optimizer.betas[0]=a must be a number"),
        ("reward.function_kwargs=3", "reward.function_kwargs=3 must be a mapping"),
        ("reward.function_kwargs={1: 2}", "reward.function_kwargs={1: 2} must be a mapping"),
        ("trainer=3", "trainer=3 must be a mapping"),
        ("trainer=null", "trainer=null must be a mapping"),
        ("sft.stages=[3]", "sft.stages[0]=3 must be a mapping"),
        ("trainer.loggers[0]=x", "a list is replaced as a whole: trainer.loggers=[…]"),
        ("trainer. seed=1", "'trainer. seed' is no key"),
        ("=1", "'' is no key"),
        ("learner.fp8.recipe=mxfp4", "learner.fp8.recipe=mxfp4 must be one of null, tensorwise, blockwise"),
        ("model.path='a\tb\x07'", "control character"),
        ("learner.optimizer.betas=[0.9]", "must be two numbers"),
        ("learner.optimizer.min_lr=0.1", "exceeds learner.optimizer.lr"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_expected(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_one_value_is_a_list_of_one(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("data: {train_files: a.parquet}\ntrainer: {test_schedule: 0 3}\n")
    config = load_config(file, ["data.val_files=b.parquet", "rollout.multi_turn.tools=code_interpreter"])
    assert (config.data.train_files, config.data.val_files) == (["a.parquet"], ["b.parquet"])
    assert (config.trainer.test_schedule, config.rollout.multi_turn.tools) == (["0 3"], ["code_interpreter"])


def test_an_override_without_a_value_is_empty_text_or_null():
    config = load_config(None, ["model.path=", "trainer.total_steps=", "model.mcore_path="])
    assert (config.model.path, config.trainer.total_steps, config.model.mcore_path) == ("", None, None)


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../../x", "/x", "a/", "a//b", "-x", ".x", "a\nb", "a\tb", "a b", "$x", "a" * 200]
)
def test_an_experiment_name_is_that_of_a_directory(name):
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name"):
        load_config(None, [f'trainer.experiment_name="{name}"'.replace("\n", "\\n").replace("\t", "\\t")])


@pytest.mark.parametrize("name", ["demo", "team/qwen_7b", "lr=1e-6", "2026-01-02", "größer", "a.b"])
def test_good_experiment_names(name):
    assert load_config(None, [f"trainer.experiment_name={name}"]).trainer.experiment_name == name


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("trainer.sead", "trainer.seed"),
        ("trainer.total_step", "trainer.total_steps"),
        ("trainer.test_frequency", "trainer.test_freq"),
        ("learner.lr", "learner.optimizer.lr"),
        ("lr", "learner.optimizer.lr"),
        ("learner.tensor_parallel_size", "learner.tensor_model_parallel_size"),
        ("trainer.nnodes", "cluster.nodes"),
        ("rollout.multi_turn.max_turns", "rollout.multi_turn.max_assistant_turns"),
        ("algorithm.adv_estimator", None),
        ("algorithm.filter_groups", None),
        ("algorithm.lam", None),
        ("data.temperature", None),
        ("actor_rollout_ref", None),
        ("trainer.enable", None),
    ],
)
def test_nearest_key_is_near(key, near):
    assert nearest_key(key, dotted_keys(Config)) == near


def test_an_unknown_key_far_from_all_shows_those_of_its_section():
    with pytest.raises(ConfigError, match=r"'algorithm\.keep_alike'; the keys of algorithm are advantage"):
        load_config(None, ["algorithm.keep_alike=true"])


def test_ranges_in_words():
    assert str(number(0, minimum=1, special=-1).metadata["range"]) == "-1, or at least 1, at most 1e9"
    assert str(number(0, above=0, below=1.5).metadata["range"]) == "above 0, below 1.5"


def test_built_in_algorithms_need_what_is_declared():
    from megatron_retool.algorithms.advantages import advantage_estimators
    from megatron_retool.algorithms.kl import kl_estimators
    from megatron_retool.algorithms.loss_aggregation import loss_aggregations
    from megatron_retool.algorithms.policy_loss import policy_losses

    for registry in (advantage_estimators, policy_losses, loss_aggregations, kl_estimators):
        declared = BUILT_IN[registry.key.removeprefix("algorithm.")]
        assert set(registry.names) == set(declared)
        for name, needed in declared.items():
            assert set(getattr(registry.load(name), "needs", ())) == set(needed)


def test_a_configuration_is_read_without_torch():
    """Importing it takes longer than everything else of a command that refuses a configuration."""
    code = (
        "import sys; from megatron_retool.config import load_config; "
        "load_config('configs/demo_cpu.yaml', ['algorithm.policy_loss=gspo']); "
        "print([name for name in ('torch', 'numpy', 'transformers', 'ray', 'pyarrow') if name in sys.modules])"
    )
    root = __file__.rpartition("/tests/")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_walk_names_elements_of_lists():
    assert "sft.stages[0].optimizer.lr" in [key for key, _, _ in walk(EVERYTHING)]


@pytest.mark.parametrize(
    "override",
    [
        "{0}",
        "{0}=1",
        "trainer.{0}=1",
        "trainer.{0}.y=1",
        "trainer.total_steps={0}",
        "trainer.resume_mode={0}",
        "trainer={0}",
    ],
)
def test_a_value_of_any_length_has_a_short_error_at_once(override, tmp_path):
    long = "x" * 100_000
    began = time.monotonic()
    with pytest.raises(ConfigError) as raised:
        load_config(None, [override.format(long)])
    (tmp_path / "long.yaml").write_text(f"extends: {long}")
    with pytest.raises(ConfigError, match="File name too long"):
        load_config(tmp_path / "long.yaml")
    assert len(str(raised.value)) <= MOST_TOLD and time.monotonic() - began < 5
