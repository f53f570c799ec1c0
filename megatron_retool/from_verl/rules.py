"""Settings of verl that stand for ours only together: each rule reads some of verl's and gives some of ours.

A rule also writes what verl does where a file is silent, wherever our own default is another: a translated run is
verl's run. What a rule cannot decide it says with ``VerlValues.decide``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conversion.model.adapter_map import TARGETS
from megatron_retool.config import ConfigError
from megatron_retool.config.verl_keys import ACTOR, CORRECTION, MODEL, ROLLOUT, advantage, kl_estimator, policy_loss
from megatron_retool.rewards.by_data_source import grader_of, missing_grader

_ROWS_LOOKED_AT = 2000
Settings = dict[str, Any]
"""Our dotted key -> value."""

DEFAULTS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.mode": "async",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.val_kwargs.temperature": 0.0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    f"{ROLLOUT}.val_kwargs.n": 1,
    f"{ROLLOUT}.multi_turn.max_parallel_calls": 1,
    f"{ROLLOUT}.multi_turn.max_tool_response_length": 256,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.log_val_generations": 0,
}
"""What verl 0.7 to 0.9 does where a setting is not given, as far as a rule asks for it."""


class VerlValues:
    """The settings of one verl file.

    Args:
        given: verl's dotted key -> value.
        megatron: whether it is for verl's Megatron workers; None: judged by the keys.
        directory: relative paths are looked up there and in the directories above it.

    Attributes:
        decisions: what the reader of the translation has to decide.
    """

    def __init__(self, given: Mapping[str, Any], megatron: bool | None = None, directory: Path | None = None) -> None:
        self.given = dict(given)
        self.directory = directory
        self.decisions: list[str] = []
        asked = (
            any(key.startswith(f"{ACTOR}.megatron.") for key in given) or given.get(f"{ACTOR}.strategy") == "megatron"
        )
        self.megatron = asked if megatron is None else megatron

    def get(self, key: str, default: Any = None) -> Any:
        """The value that is given, else verl's default, else ``default``."""
        value = self.given.get(key)
        if value is not None:
            return value
        return DEFAULTS.get(key, default)

    def number(self, key: str, default: float = 0) -> Any:
        """As ``get``, for a number; one that is none is left for the reader to decide."""
        value = self.get(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return value
        self.decide(f"{key}={value!r} is no number; {default} is taken")
        return default

    def decide(self, text: str) -> None:
        """Note a question that the user has to decide, once."""
        if text not in self.decisions:
            self.decisions.append(text)

    def find_file(self, name: str) -> Path | None:
        """The file that a setting names, beside the translated file, above it, or in the working directory."""
        path = Path(name).expanduser()
        above = [] if self.directory is None else [self.directory, *self.directory.resolve().parents]
        return next((base / path for base in [Path.cwd(), *above] if (base / path).is_file()), None)

    def is_true(self, *keys: str) -> bool:
        """Whether one of the keys is given and true."""
        return any(self.given.get(key) is True for key in keys)


def other_training(values: VerlValues) -> Settings:
    """Kinds of training that are not built in: a translation without them would be another run.

    Raises:
        ConfigError: the file asks for one.
    """
    if values.is_true("distillation.enabled"):
        raise ConfigError(
            "distillation.enabled=true: teachers are set in other words here: set it to false in the file to translate "
            "the rest, and add algorithm.distillation (docs/distillation.md)"
        )
    return {}


_ADAPTED: Mapping[str, tuple[frozenset[str], ...]] = {
    "attention": (
        frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
        frozenset({"qkv_proj", "o_proj"}),
        frozenset({"linear_qkv", "linear_proj"}),
    ),
    "mlp": (
        frozenset({"gate_proj", "up_proj", "down_proj"}),
        frozenset({"gate_up_proj", "down_proj"}),
        frozenset({"linear_fc1", "linear_fc2"}),
    ),
}
"""learner.lora.targets -> all matrices of that kind, under Hugging Face's names, fused ones and Megatron-Core's."""


def adapters(values: VerlValues) -> Settings:
    """LoRA, under verl's names for FSDP (lora_rank) and for Megatron (lora.rank).

    Raises:
        ConfigError: the rank is no whole number.
    """
    prefix, alpha = (f"{MODEL}.lora_", 16) if values.get(f"{MODEL}.lora_rank") else (f"{MODEL}.lora.", 32)
    rank = values.get(f"{prefix}rank") or 0
    if not rank:
        return {}
    if not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"{prefix}rank={rank!r} is no rank: give a whole number, or 0 to train all weights")
    result: Settings = {"learner.lora.rank": rank, "learner.lora.alpha": float(values.number(f"{prefix}alpha", alpha))}
    if path := values.get(f"{prefix}adapter_path"):
        result["learner.lora.path"] = str(path)
    key = f"{MODEL}.target_modules" if prefix.endswith("_") else f"{prefix}target_modules"
    named = values.get(key)
    if isinstance(named, (list, tuple)):
        names = {str(name) for name in named}
        kinds = [kind for kind, sets in _ADAPTED.items() if names & frozenset().union(*sets)]
        whole = all(any(names >= one for one in _ADAPTED[kind]) for kind in kinds)
        result["learner.lora.targets"] = [*kinds, *(["experts"] if "mlp" in kinds else [])] or list(TARGETS)
        if not whole or names - frozenset().union(*(one for sets in _ADAPTED.values() for one in sets)):
            values.decide(
                f"{key}={list(named)}: adapters are chosen by kind here, and learner.lora.targets="
                f"{result['learner.lora.targets']} adapts every matrix of these kinds"
            )
    elif named not in (None, "all-linear"):
        values.decide(f"{key}={named}: adapters are chosen by kind here (learner.lora.targets); all kinds are taken")
    for name in ("exclude_modules", "lora.exclude_modules"):
        if excluded := values.get(f"{MODEL}.{name}"):
            values.decide(f"{MODEL}.{name}={excluded}: adapters are chosen by kind here (learner.lora.targets)")
    return result


def kl(values: VerlValues) -> Settings:
    """The KL in the loss or in the reward, with the estimator of the one that is on."""
    result: Settings = {
        "algorithm.kl_in_loss": 0.0,
        "algorithm.kl_in_reward": 0.0,
        "algorithm.adaptive_kl_target": None,
        "algorithm.adaptive_kl_horizon": None,
    }
    if values.is_true(f"{ACTOR}.use_kl_loss"):
        result["algorithm.kl_in_loss"] = values.get(f"{ACTOR}.kl_loss_coef")
        result["algorithm.kl_estimator"] = kl_estimator(values.get(f"{ACTOR}.kl_loss_type"))
    if values.is_true("algorithm.use_kl_in_reward"):
        if result["algorithm.kl_in_loss"]:
            values.decide("both KL penalties are on: algorithm.kl_in_loss is kept, algorithm.kl_in_reward is 0 here")
            return result
        result["algorithm.kl_in_reward"] = values.get("algorithm.kl_ctrl.kl_coef")
        result["algorithm.kl_estimator"] = kl_estimator(values.get("algorithm.kl_penalty"))
        if values.get("algorithm.kl_ctrl.type") == "adaptive":
            result["algorithm.adaptive_kl_target"] = values.get("algorithm.kl_ctrl.target_kl")
            result["algorithm.adaptive_kl_horizon"] = values.get("algorithm.kl_ctrl.horizon")
    return result


def advantage_and_loss(values: VerlValues) -> Settings:
    """Estimator, clipping, aggregation and the discounts, where verl's defaults are not ours."""
    clip = values.get(f"{ACTOR}.clip_ratio")
    result = {
        "algorithm.advantage": advantage(values.get("algorithm.adv_estimator")),
        "algorithm.gamma": values.get("algorithm.gamma"),
        "algorithm.gae_lambda": values.get("algorithm.lam"),
        "algorithm.policy_loss": policy_loss(values.get(f"{ACTOR}.policy_loss.loss_mode")),
        "algorithm.clip_ratio_low": values.get(f"{ACTOR}.clip_ratio_low", clip),
        "algorithm.clip_ratio_high": values.get(f"{ACTOR}.clip_ratio_high", clip),
        "algorithm.loss_aggregation": values.get(f"{ACTOR}.loss_agg_mode"),
    }
    if result["algorithm.policy_loss"] == "clip":
        result["algorithm.dual_clip"] = values.get(f"{ACTOR}.clip_ratio_c")
    for key, ours in (("algorithm.adv_estimator", "algorithm.advantage"),
                      (f"{ACTOR}.policy_loss.loss_mode", "algorithm.policy_loss")):  # fmt: skip
        if result[ours] is None:
            values.decide(f"{key}={values.get(key)} has no built-in counterpart: write it as a function and name it in "
                          f"{ours} (docs/extending.md)")  # fmt: skip
            del result[ours]
    if f"{ACTOR}.clip_ratio" in values.given and f"{ACTOR}.clip_ratio_low" not in values.given:
        values.decide(
            f"{ACTOR}.clip_ratio={clip} by itself: verl from 0.5 on ignores it, for clip_ratio_low and clip_ratio_high "
            "default to 0.2; here it is taken for both"
        )
    return result


def dynamic_sampling(values: VerlValues) -> Settings:
    """DAPO's filter_groups, which is off in verl where nothing is said."""
    prefix = "algorithm.filter_groups"
    if not values.is_true(f"{prefix}.enable"):
        return {"algorithm.dynamic_sampling.enable": False}
    return {
        "algorithm.dynamic_sampling.enable": True,
        "algorithm.dynamic_sampling.metric": "acc" if values.get(f"{prefix}.metric") == "acc" else "reward",
        "algorithm.dynamic_sampling.max_generation_batches": max(
            int(values.number(f"{prefix}.max_num_gen_batches")), 0
        ),
    }


def rollout_correction(values: VerlValues) -> Settings:
    """Weights and rejection against the mismatch, in the words of verl 0.5 (tis), 0.6 and 0.7."""
    ours = "algorithm.rollout_correction"
    result: Settings = {f"{ours}.mode": "none", f"{ours}.rejection": [], f"{ours}.veto_threshold": None}
    old_threshold = values.get("algorithm.rollout_is_threshold")
    cap = values.get(f"{ACTOR}.tis_imp_ratio_cap", -1)
    level = values.get(f"{CORRECTION}.rollout_is")
    if level in ("token", "sequence"):
        lower, _, upper = str(values.get(f"{CORRECTION}.rollout_is_threshold")).rpartition("_")
        # verl's "lower_upper" masks, as IcePop does; a number truncates.
        result |= {f"{ours}.level": level, f"{ours}.mode": "mask" if lower else "truncate"}
        result |= {f"{ours}.lower": float(lower or 0.0), f"{ours}.upper": float(upper)}
    elif old_threshold is not None and values.is_true("algorithm.rollout_is"):
        mask = values.get("algorithm.rollout_is_mode") == "mask"
        lower = values.get("algorithm.rollout_is_threshold_lower", 1.0 / float(old_threshold))
        result |= {
            f"{ours}.level": values.get("algorithm.rollout_is_level", "token"),
            f"{ours}.mode": "mask" if mask else "truncate",
            f"{ours}.lower": lower if mask else 0.0,
            f"{ours}.upper": old_threshold,
        }
    elif isinstance(cap, (int, float)) and cap > 0:
        result |= {f"{ours}.level": "token", f"{ours}.mode": "truncate", f"{ours}.upper": float(cap)}
    result[f"{ours}.rejection"] = _rejection(values)
    veto = values.get(f"{CORRECTION}.rollout_token_veto_threshold", values.get("algorithm.rollout_is_veto_threshold"))
    if isinstance(veto, float) and 0 < veto < 1:
        result[f"{ours}.veto_threshold"] = veto
    if values.is_true(f"{CORRECTION}.bypass_mode"):
        result |= {f"{ours}.bypass_old_log_probs": True, f"{ours}.mode": "none"}
        if values.get(f"{CORRECTION}.loss_type") == "reinforce":
            result["algorithm.policy_loss"] = "policy_gradient"
    if values.is_true(f"{CORRECTION}.rollout_is_batch_normalize"):
        result[f"{ours}.batch_normalize"] = True
    if result[f"{ours}.mode"] == "none" and not result[f"{ours}.rejection"]:
        values.decide(
            "rollout correction is off, as in the file; between Megatron and SGLang our defaults are advised: remove "
            "algorithm.rollout_correction from the translation to have them (docs/mismatch.md)"
        )
    return result


def _rejection(values: VerlValues) -> list[str]:
    names, bounds = values.get(f"{CORRECTION}.rollout_rs"), values.get(f"{CORRECTION}.rollout_rs_threshold")
    if not names or str(names).lower() == "none":
        return []
    bounds = values.get(f"{CORRECTION}.rollout_is_threshold") if bounds is None else bounds
    rules = []
    all_bounds = [part.strip() for part in str(bounds).split(",")]
    for place, name in enumerate(part.strip() for part in str(names).split(",")):
        lower, _, upper = all_bounds[min(place, len(all_bounds) - 1)].rpartition("_")
        if name in ("token", "sequence", "geometric") or name in ("token_k1", "seq_sum_k1", "seq_mean_k1"):
            # k1 is bounded on the ratio itself.
            rule = {"token_k1": "token", "seq_sum_k1": "sequence", "seq_mean_k1": "geometric"}.get(name, name)
            given = values.get(f"{CORRECTION}.rollout_rs_threshold_lower")
            low = float(lower) if lower else (float(given) if given is not None else 1.0 / float(upper))
            rules.append(f"{rule}_ratio {low:g} {float(upper):g}")
        elif name.startswith(("token_k", "seq_")):
            rules.append(f"{name.replace('seq_', 'sequence_', 1)} -inf {float(upper):g}")
        else:
            values.decide(
                f"{CORRECTION}.rollout_rs={name} has no counterpart: see algorithm.rollout_correction.rejection"
            )
    return rules


def reward(values: VerlValues) -> Settings:
    """The reward function and DAPO's punishment of overlong responses."""
    result: Settings = {}
    path = next((values.get(f"{prefix}custom_reward_function.path") for prefix in ("", "reward.")
                 if values.get(f"{prefix}custom_reward_function.path")), None)  # fmt: skip
    if path:
        name = values.get(
            "custom_reward_function.name", values.get("reward.custom_reward_function.name", "compute_score")
        )
        result["reward.function"] = f"{path}:{name}" if str(path).endswith(".py") else f"{path}.py:{name}"
        if values.find_file(str(path)) is None:
            values.decide(
                f"reward.function={path}:{name} is not here: put the file there, or take the built-in "
                "reward.function=math, which reads \\boxed{} and gives +1 or -1"
            )
        else:
            values.decide(f"reward.function={path}:{name}: the file must be importable without verl's own modules")
    else:
        result |= _default_reward(values)
    prefixes = (
        "reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer",
        "reward.reward_kwargs.overlong_buffer_cfg",
    )  # fmt: skip
    for prefix in prefixes:
        if values.is_true(f"{prefix}.enable"):
            result["reward.overlong.mode"] = "soft_punish"
            result["reward.overlong.buffer_length"] = int(values.number(f"{prefix}.len", 4096))
            result["reward.overlong.penalty"] = float(values.number(f"{prefix}.penalty_factor", 1.0))
    if values.is_true("reward_model.enable", "reward.reward_model.enable"):
        values.decide(
            "reward_model.enable=true: there is no reward model here. A reward function may ask a server that serves "
            "one (an async def in reward.function, docs/extending.md)"
        )
    return result


def _default_reward(values: VerlValues) -> Settings:
    """verl's own reward, whose grader the rows' data_source chooses."""
    read, ungraded = False, []
    for name in ("train_files", "val_files"):
        for file in as_list(values.get(f"data.{name}")):
            path = values.find_file(str(file))
            sources = None if path is None else _data_sources(path)
            read = read or sources is not None
            ungraded += [source for source in sources or () if grader_of(source) is None]
    for source in dict.fromkeys(ungraded):
        values.decide(missing_grader(source))
    if not read:
        values.decide(
            "reward.function=by_data_source grades as verl does for openai/gsm8k, MATH, math_dapo, aime*, numina_*, "
            "hiyouga/geometry3k and searchR1_*; a run on rows of another data_source is refused: set reward.function"
        )
    return {"reward.function": "by_data_source"}


def _data_sources(path: Path) -> set[str] | None:
    """The first values of a parquet file's column data_source; None if it cannot be read."""
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(_ROWS_LOOKED_AT, columns=["data_source"]), None)
            return set() if batch is None else {str(source) for source in batch.column(0).to_pylist()}
    except Exception:  # not parquet, damaged, or without the column: the run says so
        return None


def as_list(value: Any) -> list[Any]:
    """A setting that is one thing or a list of them, as a list."""
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def prompts(values: VerlValues) -> Settings:
    """What happens to prompts that are too long, and the lengths."""
    result: Settings = {
        f"data.{name}": values.get(f"data.{name}")
        for name in ("train_batch_size", "max_prompt_length", "max_response_length")
    }
    filtered = values.is_true("data.filter_overlong_prompts")
    truncation = values.get("data.truncation")
    result["data.overlong_prompts"] = "error" if not filtered and truncation == "error" else "filter"
    if not filtered and truncation != "error":
        values.decide(
            f"data.truncation={truncation} cuts long prompts in verl; here they are left out "
            "(data.overlong_prompts=filter)"
        )
    for name in ("train_files", "val_files"):
        if files := as_list(values.get(f"data.{name}")):
            result[f"data.{name}"] = [str(file) for file in files]
    limit = values.get("data.val_max_samples", -1)
    if isinstance(limit, int) and limit > 0:
        result["data.max_val_samples"] = limit
    return result


def run_itself(values: VerlValues) -> Settings:
    """Length, names, frequencies, loggers and the place of the run."""
    every = {name: max(int(values.number(f"trainer.{name}")), 0) for name in ("save_freq", "test_freq")}
    result: Settings = {
        "trainer.project_name": str(values.get("trainer.project_name")),
        "trainer.experiment_name": re.sub(r"[^\w.=+@,-]", "_", str(values.get("trainer.experiment_name"))).lstrip("-."),
        "trainer.total_epochs": values.get("trainer.total_epochs"),
        "trainer.log_val_generations": values.get("trainer.log_val_generations"),
        **{f"trainer.{name}": value for name, value in every.items()},
    }
    local = values.get("trainer.default_local_dir")
    if local:
        path = Path(str(local))
        same = path.name == result["trainer.experiment_name"]
        result["trainer.runs_dir"] = str(path.parent if same else path)
    kept = values.get("trainer.max_actor_ckpt_to_keep")
    if isinstance(kept, int):
        result["trainer.keep_checkpoints"] = kept
    loggers = values.get("trainer.logger", ["console", "wandb"])
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    known = {"file": "jsonl"} | {
        name: name for name in ("console", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")
    }
    for name in loggers:
        if name not in known:
            values.decide(f"trainer.logger: {name} has no counterpart; one's own logger is a class (docs/extending.md)")
    result["trainer.loggers"] = list(dict.fromkeys([*(known[name] for name in loggers if name in known), "jsonl"]))
    return result


RULES: tuple[Callable[[VerlValues], Settings], ...] = (
    other_training, adapters, kl, advantage_and_loss, dynamic_sampling, rollout_correction, reward, prompts, run_itself,
)  # fmt: skip
"""The rules about algorithm, data, reward and run; ``machine_rules`` has those about learner and engines."""
