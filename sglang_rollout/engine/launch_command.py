"""What an SGLang server is started with: its command line and its environment."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import sglang_cpu_engine
from conversion.model.adapter_map import module_names, why_not_in_engine
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import blockwise_quantization_config
from conversion.model.config_reader import UnsupportedArchitecture
from conversion.model.family import engine_class
from conversion.model.model_operators import operators_of
from conversion.model.rotary import inverse_frequencies, softmax_scale
from conversion.model.weight_map import WeightMap
from megatron_retool.config import EngineConfig
from megatron_retool.cuda_toolkit import cuda_environment, has_driver
from megatron_retool.routed_experts import expert_dtype
from sglang_rollout.engine.base import EnginePart, EngineStartError
from sglang_rollout.engine.client import KEEP_ALIVE_SECONDS

_HERE = Path(__file__).resolve().parent
PLUGINS = _HERE / "sglang_plugins"
EXACT_PLUGIN = _HERE / "exact_plugin"
EXPERT_DTYPE_VARIABLE = "MEGATRON_RETOOL_EXPERT_DTYPE"
TORCHVISION_VARIABLE = "MEGATRON_RETOOL_TORCHVISION"
EXACT_VARIABLE = "MEGATRON_RETOOL_EXACT_MODEL"
RESERVED_TOKENS = 7
"""Tokens of its context length that SGLang leaves free of a request's input (managers/tp_worker.py), two of them of the
answer too. It gets so many more, so that rollout.engine.context_length can be filled."""
CPU_CACHE_TOKENS = 32768
"""KV cache of an engine without CUDA whose settings name none: SGLang would take most of the memory."""
CPU_RUNNING_REQUESTS = 64
"""Requests at a time of such an engine whose settings name no number."""
STATES_OF_A_REQUEST = 3
"""States of linear attention and of Mamba-2 that SGLang keeps for each running request, so that prefixes can stay in
its cache. On a CPU it would take most of the memory for them. A model without states ignores their number."""

_TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def resolve_device(device: str) -> str:
    """The config's device, "cpu" or "cuda"; "auto" takes CUDA where the driver shows a GPU (torch is not imported)."""
    if device != "auto":
        return device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return "cuda" if has_driver() and not hidden else "cpu"


def torchvision_directory() -> Path:
    """Where the engine's torchvision lies: apart (other processes of a CPU host would import it where torch is a CPU
    build, and break), or in the environment, where pip has put it there for SGLang."""
    configured = os.environ.get(TORCHVISION_VARIABLE)
    apart = Path(configured) if configured else Path(sys.prefix) / "sglang_only"
    if not configured and not apart.is_dir() and (result := importlib.util.find_spec("torchvision")) and result.origin:
        return Path(result.origin).parents[1]
    return apart


class SGLangLaunch:
    """How an SGLang server is started.

    Args:
        config: rollout.engine.
        model_path: Hugging Face directory with config.json and weights.
        log_file: stdout and stderr of the server; a restart appends.
        tokenizer: load the tokenizer in the server too. Only stop strings need it (token ids go in and out).
        weight_version: version of the weights in ``model_path``, reported with every token.
        colocated: learner and engine take turns on the same GPUs, so weights and KV cache can be released.
        gpu_ids: CUDA devices that this server sees (CUDA_VISIBLE_DEVICES); tensor-parallel rank r runs on the r-th.
            None leaves the environment as it is.
        weights_from_sync: the first weight sync comes before the first request, so an FP8 engine may start empty, in
            the block-quantised layout that syncs have. Without it, SGLang quantises what is in ``model_path``.
        deterministic: honour ``sampling_seed`` of requests.
        port: 0 takes any free port (again at every start).
        families: model.families.
        routed_experts: answers can carry the experts of every token (of a mixture of experts).
        exact_operators: of ``megatron_retool.exact`` those that it computes with, as the learner does; others stay
            SGLang's.
        weights_stay: no weight sync brings the weights back that ``colocated`` releases: a copy waits in host memory.
        part: which node's part of an engine it is; None: it is the whole engine.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        model_path: str | Path,
        log_file: str | Path,
        tokenizer: bool = False,
        weight_version: int = 0,
        colocated: bool = False,
        gpu_ids: Sequence[int | str] | None = None,
        weights_from_sync: bool = False,
        deterministic: bool | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        families: Sequence[str] = (),
        routed_experts: bool = False,
        weights_stay: bool = False,
        exact_operators: Collection[str] = (),
        part: EnginePart | None = None,
        extra_environment: Mapping[str, str] | None = None,
    ) -> None:
        self.model_path = Path(model_path)
        self.config = config
        self.log_file = Path(log_file)
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self.colocated = colocated
        self.gpu_ids = gpu_ids
        self.weights_from_sync = weights_from_sync
        self.deterministic = config.random_seed is not None if deterministic is None else deterministic
        self._serves = part is None or part.rank == 0
        # What SGLang has on the other nodes answers whether it is healthy, without a key.
        self.host = host if self._serves else "127.0.0.1"
        self.part = part
        self.requested_port = port
        self.port = port
        self.device = resolve_device(config.device)
        self.families = tuple(families)
        self.routed_experts = routed_experts
        self.weights_stay = weights_stay
        self.exact_operators = tuple(exact_operators)
        self.extra_environment = dict(extra_environment or {})
        self._key_file: Path | None = None

    def command(self) -> list[str]:
        """The server's command line."""
        config = self.config
        arguments = {
            "--model-path": self.model_path,
            "--host": self.host,
            "--port": self.port,
            "--tp-size": config.tensor_parallel_size,
            "--dtype": config.dtype,
            "--mem-fraction-static": config.mem_fraction_static if self.device == "cuda" else None,
            "--max-total-tokens": config.max_total_tokens,
            "--max-running-requests": config.max_running_requests,
            "--context-length": None if config.context_length is None else config.context_length + RESERVED_TOKENS,
            "--random-seed": config.random_seed,
            "--weight-version": self.weight_version,
            # The trainer's own generate call is the warm-up, and it waits for it.
            "--skip-server-warmup": True,
            "--log-level": "info",
            "--log-level-http": "warning",
            "--decode-log-interval": 400,
            "--skip-tokenizer-init": not self.tokenizer,
            "--enable-deterministic-inference": self.deterministic,
            "--enable-return-routed-experts": self.routed_experts,
            "--nnodes": self.part and self.part.count,
            "--node-rank": self.part and self.part.rank,
            "--dist-init-addr": self.part and self.part.address,
            "--speculative-algorithm": config.speculative.algorithm,
            "--speculative-draft-model-path": config.speculative.draft_model_path,
            "--speculative-num-steps": config.speculative.num_steps,
            "--speculative-eagle-topk": config.speculative.eagle_topk,
            "--speculative-num-draft-tokens": config.speculative.num_draft_tokens,
        }
        self._check_device()
        if self.device == "cpu":
            tokens = config.max_total_tokens or max(CPU_CACHE_TOKENS, config.context_length or 0)
            states = STATES_OF_A_REQUEST * (config.max_running_requests or CPU_RUNNING_REQUESTS)
            arguments |= {"--max-total-tokens": tokens, "--max-mamba-cache-size": states}
        else:
            arguments |= {"--enable-memory-saver": self.colocated}
            if self.exact_operators:
                arguments |= {
                    "--attention-backend": "torch_native",
                    "--sampling-backend": "pytorch",
                    "--moe-runner-backend": "triton",
                    "--disable-shared-experts-fusion": True,
                    "--cuda-graph-backend-decode": "disabled",
                    "--cuda-graph-backend-prefill": "disabled",
                }
                architecture = Architecture.from_pretrained(self.model_path, self.families)
                if architecture.delta_net is not None or architecture.mamba is not None:
                    # States are float32, and none is kept but where the plugin's functions leave it.
                    arguments |= {
                        "--mamba-ssm-dtype": "float32",
                        "--mamba-radix-cache-strategy": "no_buffer",
                        "--disable-overlap-schedule": True,
                        "--linear-attn-prefill-backend": "triton",
                        "--linear-attn-decode-backend": "triton",
                    }
            arguments |= {"--ep-size": self._expert_groups()}
            if config.attention_data_parallel_size > 1:
                arguments |= {"--attn-dp-size": config.attention_data_parallel_size}
            # Asleep the engine forgets its weights. No sync brings the draft model's back.
            drafted = config.speculative.draft_model_path is not None
            arguments |= {"--enable-draft-weights-cpu-backup": self.colocated and drafted}
            arguments |= {"--enable-weights-cpu-backup": self.colocated and self.weights_stay}
        if config.quantization is not None and "quantization_config" not in self._model_config():
            if config.quantization == "fp8" and self.weights_from_sync:
                # Synced weights come quantised in blocks; until the first sync there is nothing worth loading.
                weight_map = WeightMap(Architecture.from_pretrained(self.model_path, self.families))
                override = json.dumps({"quantization_config": blockwise_quantization_config(weight_map)})
                arguments |= {"--json-model-override-args": override, "--load-format": "dummy"}
                if config.speculative.draft_model_path is not None:
                    arguments |= {"--speculative-draft-load-format": "auto"}
            else:
                arguments |= {"--quantization": config.quantization}
        arguments |= self._adapter_arguments()
        if self._key_file is not None:
            arguments |= {"--config": self._key_file}
        command = [sys.executable, "-m", "sglang.launch_server"]
        if self.device == "cpu":
            command += sglang_cpu_engine.SERVER_ARGUMENTS
        for flag, value in arguments.items():
            if value is True:
                command.append(flag)
            elif isinstance(value, list):
                command += [flag, *value]
            elif value is not None and value is not False:
                command += [flag, str(value)]
        return command + list(config.extra_args)

    def _adapter_arguments(self) -> dict[str, Any]:
        adapters = self.config.adapters
        if not adapters.max_rank:
            return {}
        architecture = Architecture.from_pretrained(self.model_path, self.families)
        if reason := why_not_in_engine(architecture, adapters.targets):
            raise EngineStartError(
                f"rollout.engine.adapters.targets={adapters.targets} does not fit family {architecture.family}: "
                f"{reason}: change it, or set rollout.engine.adapters.max_rank=0"
            )
        on_device = "torch_native" if self.device == "cpu" else "csgmv"
        return {
            "--enable-lora": True,
            "--max-lora-rank": adapters.max_rank,
            "--lora-target-modules": module_names(architecture, adapters.targets),
            "--max-loras-per-batch": adapters.per_batch,
            "--lora-backend": on_device if adapters.backend == "auto" else adapters.backend,
            # Without it factors that no layer takes are left out with a warning.
            "--lora-strict-loading": True,
        }

    def environment(self) -> dict[str, str]:
        """The server's environment."""
        environment = {
            # After the death of one of its processes it would wait 65 s for core dumps before it ends.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(int(2 * KEEP_ALIVE_SECONDS)),
        }
        if self._fills_the_model():
            environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
        # The learner's torchrun variables would make SGLang join the wrong process group.
        for name in list(environment):
            if name in _TORCHRUN_VARIABLES or name.startswith("TORCHELASTIC_"):
                del environment[name]
        paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
        # An engine may have started this process: it does not hand its own paths on.
        given = (sglang_cpu_engine.PYTHON_PATH, EXACT_PLUGIN, PLUGINS, torchvision_directory())
        paths = [path for path in paths if Path(path) not in given]
        paths = [str(PLUGINS), *paths]
        if self.routed_experts:
            experts = Architecture.from_pretrained(self.model_path, self.families).num_experts or 0
            environment[EXPERT_DTYPE_VARIABLE] = np.dtype(expert_dtype(experts)).name
        if self.exact_operators:
            paths = [str(EXACT_PLUGIN), *paths]
            environment |= self._exact_environment()
        if self.device == "cpu":
            paths = [str(torchvision_directory()), *paths]
            environment |= sglang_cpu_engine.environment(
                {"PYTHONPATH": os.pathsep.join(paths)},
                threads=self.config.threads,
                tensor_parallel_size=self.config.tensor_parallel_size,
                model_class=engine_class(self._architecture(), self.families),
                without=self.exact_operators,
            )
        else:
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            environment |= cuda_environment(environment)
            if self.gpu_ids is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in self.gpu_ids)
        return environment | self.extra_environment

    def _exact_environment(self) -> dict[str, str]:
        """What the exact plugin reads; and on a GPU that layers take their methods of plain torch, which it replaces,
        and that experts' matrices stay in the order of the checkpoint."""
        architecture = Architecture.from_pretrained(self.model_path, self.families)
        kinds = (False,) if architecture.local_rope_theta is None else (False, True)
        settings = {
            "operators": [each for each in self.exact_operators if each in operators_of(architecture)],
            "frequencies": [inverse_frequencies(architecture, local).tolist() for local in kinds],
            "scales": [softmax_scale(architecture, local) for local in kinds],
        }
        on_gpu = {
            "SGLANG_FORCE_FUSED_OP_BACKEND": "native",
            "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",
            "SGLANG_ENABLE_GDN_DECODE_FUSED_PROJ_CONV": "0",
        }
        return {EXACT_VARIABLE: json.dumps(settings), **(on_gpu if self.device == "cuda" else {})}

    def _model_config(self) -> dict[str, object]:
        try:
            return dict(json.loads((self.model_path / "config.json").read_text()))
        except ValueError as error:
            raise EngineStartError(f"{self.model_path / 'config.json'} is not valid JSON: {error}") from error

    def _fills_the_model(self) -> bool:
        """Whether context_length fits the model but context_length + RESERVED_TOKENS does not."""
        wanted = self.config.context_length
        if wanted is None:
            return False
        longest = self._model_config().get("max_position_embeddings")
        return isinstance(longest, int) and wanted <= longest < wanted + RESERVED_TOKENS

    def _architecture(self) -> str:
        architectures = self._model_config().get("architectures")
        return str(architectures[0]) if isinstance(architectures, list) and architectures else ""

    def _expert_groups(self) -> int | None:
        """Groups of GPUs with experts of their own; None: SGLang's default, one."""
        groups = self.config.expert_parallel_size
        try:
            architecture = Architecture.from_pretrained(self.model_path, self.families, dequantized=True)
        except UnsupportedArchitecture:  # of a model that no family covers, which an evaluation may serve
            return groups
        return (groups or self.config.tensor_parallel_size) if architecture.is_moe else None

    def _check_device(self) -> None:
        """
        Raises:
            EngineStartError: settings need a GPU, and this host has none, which a configuration alone does not tell.
        """
        config = self.config
        if self.device == "cpu" and config.speculative.algorithm is not None:
            raise EngineStartError(
                f"rollout.engine.speculative.algorithm={config.speculative.algorithm} needs CUDA, and this host has no "
                "GPU: on a CPU SGLang does not sample what it guesses from the policy. Set it to null"
            )
        for name in ("expert_parallel_size", "attention_data_parallel_size"):
            if self.device == "cpu" and (getattr(config, name) or 1) > 1:
                raise EngineStartError(
                    f"rollout.engine.{name} above 1 needs CUDA, and this host has no GPU: set it to 1"
                )
