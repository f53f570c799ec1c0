"""The typed configuration tree: one YAML file plus dotted overrides, checked before anything starts.

    config = load_config("configs/demo_cpu.yaml", ["learner.context_parallel_size=2"])

A file with the key ``extends: other.yaml`` (relative to itself) holds only what differs from the other file; a list is
replaced as a whole.

Every key is declared here with its type and default, one file a section; an unknown key is an error that names the
nearest known one. After ``load_config`` the tree is frozen: no code may change a setting while a run is under way.
Rules within a section are in its ``check``, rules between sections in ``tree.validate``, and rules that need the
model's own shape in ``conversion.model.layout``.
"""

from megatron_retool.config.algorithm import (
    AdaptiveSamplingConfig,
    AlgorithmConfig,
    DynamicSamplingConfig,
    RolloutCorrectionConfig,
)
from megatron_retool.config.base import ConfigError
from megatron_retool.config.cluster import ClusterConfig
from megatron_retool.config.data import DataConfig
from megatron_retool.config.demo import DemoConfig
from megatron_retool.config.distillation import DistillationConfig, TeacherConfig
from megatron_retool.config.learner import (
    CriticConfig,
    Fp8Config,
    LearnerConfig,
    LoraConfig,
    MtpConfig,
    RecomputeConfig,
)
from megatron_retool.config.loading import load_config, save_config
from megatron_retool.config.model import ModelConfig
from megatron_retool.config.optimizer import OptimizerConfig
from megatron_retool.config.profiler import ProfilerConfig
from megatron_retool.config.reward import JudgeConfig, OverlongConfig, RewardConfig
from megatron_retool.config.rollout import (
    BranchingConfig,
    EngineConfig,
    MultiTurnConfig,
    PartialRolloutConfig,
    QuickValConfig,
    RolloutConfig,
    SamplingConfig,
    ValSamplingConfig,
)
from megatron_retool.config.sft import SFTConfig, SFTStage
from megatron_retool.config.tinker import TinkerConfig
from megatron_retool.config.tools import (
    CodeInterpreterConfig,
    ReadPageConfig,
    SearchConfig,
    SearchServiceConfig,
    ToolsConfig,
)
from megatron_retool.config.trainer import EarlyStoppingConfig, TrainerConfig
from megatron_retool.config.tree import Config, validate
from megatron_retool.config.weight_sync import WeightSyncConfig

__all__ = [
    "AdaptiveSamplingConfig",
    "AlgorithmConfig",
    "BranchingConfig",
    "ClusterConfig",
    "CodeInterpreterConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "DemoConfig",
    "DistillationConfig",
    "DynamicSamplingConfig",
    "EarlyStoppingConfig",
    "EngineConfig",
    "Fp8Config",
    "LearnerConfig",
    "LoraConfig",
    "MtpConfig",
    "ModelConfig",
    "MultiTurnConfig",
    "OptimizerConfig",
    "JudgeConfig",
    "OverlongConfig",
    "PartialRolloutConfig",
    "ProfilerConfig",
    "QuickValConfig",
    "ReadPageConfig",
    "RecomputeConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "SFTConfig",
    "SFTStage",
    "SamplingConfig",
    "SearchConfig",
    "SearchServiceConfig",
    "TinkerConfig",
    "TeacherConfig",
    "ToolsConfig",
    "TrainerConfig",
    "ValSamplingConfig",
    "WeightSyncConfig",
    "load_config",
    "save_config",
    "validate",
]
