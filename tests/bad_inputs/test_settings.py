"""Overrides and configuration files that no command accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_inputs.conftest import Refused

OVERRIDES = [
    ("trainer.sead=1", "'trainer.sead'", "'trainer.seed'"),
    ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator", "algorithm.advantage=grpo"),
    ("actor_rollout_ref.actor.optim.lr=1e-6", "learner.optimizer.lr=1e-06"),
    ("no_equals_sign", "'no_equals_sign'", "dotted.key=value"),
    ("=3", "is no key"),
    ("trainer..seed=3", "is no key"),
    ("trainer.seed.more=3", "trainer.seed={'more': 3}", "a whole number"),
    ("trainer.loggers[0]=console", "trainer.loggers=[…]"),
    ("trainer.loggers=[", "trainer.loggers", "not valid YAML", "line 2"),
    ("trainer.loggers={console: true}", "trainer.loggers", "must be a list"),
    ("trainer=none", "trainer=none must be a mapping"),
    ("trainer.seed=many", "trainer.seed=many", "a whole number"),
    ("trainer.seed=1.5", "trainer.seed=1.5", "a whole number"),
    ("trainer.seed=", "trainer.seed=null", "a whole number"),
    ("trainer.seed=-1", "trainer.seed=-1 must be at least 0"),
    ("trainer.seed=" + "9" * 5000, "trainer.seed"),
    ("trainer.seed=${trainer.seed}", "trainer.seed"),
    ("trainer.seed=${trainer.sead}", "trainer.seed", "trainer.sead"),
    ("trainer.seed=${trainer.experiment_name}", "trainer.seed"),
    ("trainer.runs_dir=${oc.env:NO_SUCH_VARIABLE}", "trainer.runs_dir", "NO_SUCH_VARIABLE"),
    ("trainer.seed=${", "trainer.seed"),
    ("trainer.total_steps=-2", "trainer.total_steps=-2 must be at least 1"),
    ("trainer.total_steps=0", "trainer.total_steps=0 must be at least 1"),
    ("trainer.val_before_train=perhaps", "trainer.val_before_train=perhaps must be true or false"),
    ("trainer.resume_mode=always", "trainer.resume_mode=always must be one of auto, disable, resume_path"),
    ("trainer.resume_mode=resume_path", "trainer.resume_from_path"),
    ("trainer.experiment_name=", "trainer.experiment_name=''"),
    ("trainer.experiment_name=../../x", "trainer.experiment_name='../../x'"),
    ("trainer.experiment_name=/x", "trainer.experiment_name='/x'"),
    ("trainer.experiment_name=-x", "trainer.experiment_name='-x'"),
    ('trainer.experiment_name="a\\x07"', "trainer.experiment_name", "control character"),
    ("trainer.runs_dir=", "trainer.runs_dir is empty"),
    ("trainer.loggers=[console,wandbb]", "unknown logger 'wandbb'", "known are console"),
    ("trainer.keep_best=1", "trainer.keep_best needs trainer.best_metric"),
    ("trainer.test_schedule=soon", "trainer.test_schedule", "'soon'"),
    ("trainer.straggler_factor=0.5", "trainer.straggler_factor=0.5 must be 0, or above 1"),
    ("learner.optimizer.lr=-1", "learner.optimizer.lr=-1.0 must be above 0"),
    ("learner.optimizer.lr=1e400", "learner.optimizer.lr=inf must be"),
    ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas=[0.9] must be two numbers"),
    ("learner.optimizer.betas=0.9", "learner.optimizer.betas=[0.9] must be two numbers"),
    ("learner.world_size=0", "learner.world_size=0 must be at least 1"),
    ("learner.world_size=3 learner.tensor_model_parallel_size=2", "learner.world_size=3", "TP x PP x CP = 2"),
    ("learner.mini_batch_size=0", "learner.mini_batch_size=0 must be at least 1"),
    ("learner.mini_batch_size=7", "learner.mini_batch_size=7"),
    ("learner.tensor_model_parallel_size=0", "learner.tensor_model_parallel_size=0 must be at least 1"),
    ("learner.pipeline_model_parallel_size=0", "learner.pipeline_model_parallel_size=0 must be at least 1"),
    ("learner.context_parallel_size=0", "learner.context_parallel_size=0 must be at least 1"),
    ("learner.expert_model_parallel_size=0", "learner.expert_model_parallel_size=0 must be at least 1"),
    ("learner.dtype=bf16", "learner.dtype=bf16 must be one of bfloat16, float32, float16"),
    ("learner.fp8.recipe=int4", "learner.fp8.recipe=int4 must be one of null, tensorwise"),
    ("rollout.train.temperature=0", "rollout.train.temperature=0.0", "greedy"),
    ("rollout.train.temperature=.nan", "rollout.train.temperature=nan must be"),
    ("rollout.train.top_p=1.5", "rollout.train.top_p=1.5 must be above 0, at most 1"),
    ("rollout.train.n=1", "rollout.train.n must be at least 2"),
    ("rollout.engine.quantization=int8", "rollout.engine.quantization=int8 must be one of null, fp8"),
    ("rollout.engine.mem_fraction_static=90", "rollout.engine.mem_fraction_static=90.0 must be above 0, below 1"),
    ("rollout.multi_turn.tools=3", "rollout.multi_turn.tools[0]=3"),
    ("rollout.multi_turn.tools=[{name: a}]", "rollout.multi_turn.tools[0]", "tool"),
    ("tools.code_interpreter.workers=-1", "tools.code_interpreter.workers=-1 must be at least 1"),
    ("tools.code_interpreter.url=5", "tools.code_interpreter.url=5 must be a URL"),
    ("tools.code_interpreter.port=70000", "tools.code_interpreter.port=70000 must be at least 0, at most 65535"),
    ("tools.search.service.base_url=localhost:8000", "tools.search.service.base_url='localhost:8000' must be a URL"),
    ("tools.read_page.allowed_hosts=[https://a.org]", "allowed_hosts: 'https://a.org' must be a host's name"),
    ("algorithm.clip_ratio_low=-3", "algorithm.clip_ratio_low=-3.0 must be at least 0"),
    ("algorithm.kl_in_loss=0.1 algorithm.kl_in_reward=0.1", "the same KL twice"),
    ("algorithm.kl_schedule=steep", "algorithm.kl_schedule=steep must be one of constant, linear, cosine"),
    ("algorithm.kl_schedule=linear algorithm.kl_schedule_steps=9", "algorithm.kl_in_loss or algorithm.kl_in_reward"),
    ("algorithm.kl_schedule=cosine algorithm.kl_in_loss=0.1", "needs algorithm.kl_schedule_steps"),
    ("algorithm.kl_final=0.1", "algorithm.kl_final=0.1 belongs to a schedule"),
    ("algorithm.kl_schedule=linear algorithm.kl_schedule_steps=9 algorithm.kl_in_reward=0.1 "
     "algorithm.adaptive_kl_target=0.1", "set one of them"),
    ("algorithm.gae_reward=first_token", "algorithm.gae_reward=first_token must be one of last_token, spread, linear_"),
    ("algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false"),
    ("algorithm.rollout_correction.rejection=geometric", "algorithm.rollout_correction.rejection", "geometric_ratio"),
    ("algorithm.rollout_correction.upper=0", "algorithm.rollout_correction.upper=0.0 must be above 0"),
    ("algorithm.adaptive_sampling.enable=true algorithm.adaptive_sampling.stages=[]", "adaptive_sampling.stages"),
    ("reward.processes=0", "reward.processes=0 must be at least 1"),
    ("reward.overlong.mode=hard", "reward.overlong.mode='hard' is not one of none, soft_punish, piecewise"),
    ("data.train_batch_size=1e99", "data.train_batch_size=1e+99", "a whole number"),
    ("data.overlong_prompts=skip", "data.overlong_prompts=skip must be one of filter, error"),
    ("weight_sync.bucket_bytes=-1", "weight_sync.bucket_bytes=-1 must be at least 1"),
    ("cluster.gpus_per_node=-8", "cluster.gpus_per_node=-8 must be at least 0"),
    ("sft.stages=[{lr: 1}]", "'sft.stages[0].lr'", "'sft.stages.optimizer.lr'"),
    ("sft.stages=fine", "sft.stages[0]=fine must be a mapping"),
]  # fmt: skip


@pytest.mark.parametrize("case", OVERRIDES, ids=[case[0][:60] for case in OVERRIDES])
def test_overrides(case: tuple[str, ...], refused: Refused) -> None:
    overrides, *words = case
    parts = [overrides] if " " not in overrides or "{" in overrides else overrides.split(" ")
    refused(["train", *parts], *words)


FILES = [
    ("broken", "trainer: [1", "c.yaml", "not valid YAML", "line 2"),
    ("tabs", "trainer:\n\tseed: 1\n", "c.yaml", "not valid YAML", "line 2"),
    ("list", "- trainer\n", "c.yaml", "a mapping at its top level"),
    ("text", "hello\n", "c.yaml", "unknown key 'hello'"),
    ("number", "3\n", "c.yaml", "a mapping at its top level"),
    ("duplicated key", "trainer: {seed: 1}\ntrainer: {seed: 2}\n", "c.yaml", "duplicate key trainer"),
    ("two documents", "trainer: {seed: 1}\n---\ntrainer: {seed: 2}\n", "c.yaml", "not valid YAML"),
    ("python", "trainer: !!python/object/apply:os.system [ls]\n", "c.yaml", "not valid YAML"),
    ("unknown key", "trainer: {sead: 1}\n", "c.yaml", "'trainer.sead'"),
    ("key that is a number", "1: 2\n", "c.yaml", "'1'"),
    ("list for a section", "trainer: [seed, 1]\n", "c.yaml", "trainer=['seed', 1] must be a mapping"),
    ("nothing for a section", "trainer:\n", "c.yaml", "trainer=null must be a mapping"),
    ("mapping for a list", "data: {train_files: {a: b}}\n", "c.yaml", "data.train_files", "must be a list"),
    ("mapping for text", "model: {path: {a: b}}\n", "c.yaml", "model.path={'a': 'b'} must be text"),
    ("nothing for text", "model: {path: }\n", "c.yaml", "model.path=null must be text"),
    ("number outside its range", "trainer: {total_steps: -1}\n", "trainer.total_steps=-1 must be at least 1"),
    ("wrong encoding", "trainer: {experiment_name: größe}\n".encode("latin-1"), "c.yaml", "UTF-8"),
    ("UTF-16", "trainer: {seed: 1}\n".encode("utf-16"), "c.yaml"),
    ("bytes", bytes(range(256)), "c.yaml", "UTF-8"),
    ("deep", "[" * 3000, "c.yaml", "not valid YAML"),
    ("extends itself", "extends: c.yaml\n", "c.yaml", "leads back to itself"),
    ("extends a loop", "extends: other.yaml\n", "other.yaml", "leads back to itself"),
    ("extends nothing", "extends: gone.yaml\n", "gone.yaml", "c.yaml extends", "does not exist"),
    ("extends two", "extends: [a.yaml, b.yaml]\n", "c.yaml", "must name one file"),
    ("extends a directory", "extends: .\n", "is a directory"),
]


@pytest.mark.parametrize("case", FILES, ids=[case[0] for case in FILES])
def test_files(case: tuple[object, ...], refused: Refused, tmp_path: Path) -> None:
    _, content, *words = case
    file = tmp_path / "c.yaml"
    file.write_bytes(content if isinstance(content, bytes) else str(content).encode())
    (tmp_path / "other.yaml").write_text("extends: c.yaml\n")
    refused(["train", "--config", "c.yaml"], *map(str, words))


def test_a_file_that_is_not_there(refused: Refused) -> None:
    refused("train --config gone.yaml", "gone.yaml", "does not exist")


def test_a_directory_for_a_file(refused: Refused) -> None:
    refused("train --config .", "is a directory")


def test_a_file_that_may_not_be_read(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "c.yaml").write_text("trainer: {seed: 1}\n")
    monkeypatch.setattr(OmegaConf, "load", refuse)
    refused("train --config c.yaml", "c.yaml may not be read")
