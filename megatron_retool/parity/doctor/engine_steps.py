"""SGLang on this host against the learner, and what all steps with an engine share."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conversion.model.model_operators import OPERATORS
from megatron_retool.algorithms.log_prob_comparison import LogProbComparison
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.cluster.log_prob_check import as_batch, default_bound, fixed_text
from megatron_retool.config import Config, ModelConfig, RolloutConfig, SamplingConfig
from megatron_retool.config.cluster import visible_devices
from megatron_retool.parity.doctor import model
from megatron_retool.parity.doctor.learner_steps import learner_config, make_learner
from megatron_retool.parity.doctor.outcome import Skipped, StepFailed, StepFigure
from megatron_retool.parity.doctor.session import DoctorSession
from megatron_retool.trajectory import FinishReason, Trajectory, TrajectoryBatch
from sglang_rollout.engine.base import EngineStartError, GenerateRequest
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.configured import make_engine
from sglang_rollout.engine.key import engine_key, use_engine_key
from sglang_rollout.engine.process import SGLangServer

TEXT_TOKENS = 512
LEAST_FP8_CAPABILITY = (8, 9)
_KV_CACHE_TOKENS_ON_GPU, _KV_CACHE_TOKENS_ON_CPU = 1_000_000, 8192
"""On a GPU about 2 GB, which has to be seen when it is given back."""
KERNELS = {
    "rms_norm": "ops.layernorm.norm._jit_rmsnorm_module(4096, torch.bfloat16)",
    "fused_add_rms_norm": "ops.layernorm.norm._jit_fused_add_rmsnorm_module(torch.bfloat16, False)",
    "query_key_norm": "ops.layernorm.norm._jit_qknorm_module(128, torch.bfloat16)",
}
"""Some of those that SGLang compiles at its first forward pass, by their expressions below sglang.kernels."""
_PRELOADED = "torch_memory_saver_hook_mode_preload_cu{cuda}.abi3.so"
_PROMPTS, _PROMPT_TOKENS, _SAMPLED_TOKENS = 4, 24, 48


def preload(session: DoctorSession) -> list[StepFigure]:
    """The library that is loaded into a colocated engine's processes before Python: all that it needs has to be found.

    Raises:
        Skipped: no GPU.
        StepFailed: with what the loader says.
    """
    session.need_gpus(1, "a colocated engine")
    spec = importlib.util.find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        raise StepFailed("torch_memory_saver is not installed")
    name = _PRELOADED.format(cuda=str(torch.version.cuda).partition(".")[0])
    libraries = preloaded(engine_environment(session), Path(spec.origin).parents[1] / name)
    return [StepFigure("preloaded libraries", ", ".join(sorted({Path(path).name for path in libraries})))]


def preloaded(environment: Mapping[str, str], library: Path) -> list[str]:
    """Paths of CUDA's and the memory saver's libraries in a process that preloads ``library``.

    Raises:
        StepFailed: the process does not start, with what the loader says, or the library is not in it.
    """
    shown = "print(*{line.split()[-1] for line in open('/proc/self/maps') if '/' in line}, sep=chr(10))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", shown],
        env={**environment, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    paths = [path for path in done.stdout.splitlines() if "cuda" in path or "memory_saver" in path]
    if done.returncode != 0 or str(library) not in paths:
        raise StepFailed(f"LD_PRELOAD={library.name}: {done.stderr.strip() or 'it is not loaded'}")
    return paths


def kernels(session: DoctorSession) -> list[StepFigure]:
    """Kernels that SGLang compiles at its first forward pass, with an engine's environment.

    Raises:
        Skipped: no GPU.
        StepFailed: with the end of what the compiler or linker says.
    """
    session.need_gpus(1, "compiling an engine's kernels")
    environment = engine_environment(session)
    compiled = compiled_kernels(environment)
    # By its name: reports hold no paths.
    home = Path(environment.get("CUDA_HOME", "none")).name
    return [StepFigure("CUDA_HOME", home), StepFigure("kernels compiled", ", ".join(compiled))]


def compiled_kernels(environment: Mapping[str, str], prepare: str = "") -> list[str]:
    """Those of KERNELS that were compiled and loaded.

    Args:
        prepare: Python that is executed first.

    Raises:
        StepFailed: with the end of what the compiler or linker says.
    """
    lines = [prepare, "import torch", "import sglang.kernels.ops.layernorm.norm", "from sglang.kernels import ops"]
    lines += [f"{expression}; print({name!r}, flush=True)" for name, expression in KERNELS.items()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=dict(environment), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise StepFailed(f"with CUDA_HOME={environment.get('CUDA_HOME')}: {done.stderr.strip()[-1500:]}")
    return done.stdout.split()


def engine_environment(session: DoctorSession) -> dict[str, str]:
    """That of a colocated engine of the tiny dense model."""
    config = engine_config(session, "dense")
    return SGLangServer(
        config.rollout.engine, model_path=config.model.path, log_file=session.directory / "log", colocated=True
    ).environment()


def engine_config(session: DoctorSession, kind: str, *overrides: str) -> Config:
    """Learner and engine of the same precision. With GPUs they may share one, so neither takes all of its memory."""
    cache = _KV_CACHE_TOKENS_ON_GPU if session.gpus else _KV_CACHE_TOKENS_ON_CPU
    return learner_config(
        session,
        kind,
        f"learner.dtype={session.learner_dtype}",
        f"rollout.engine.dtype={session.learner_dtype}",
        f"rollout.engine.max_total_tokens={cache}",
        "rollout.engine.max_running_requests=8",
        "rollout.engine.mem_fraction_static=0.4",
        "rollout.engine.start_timeout_seconds=480",
        "weight_sync.verify=true",
        "weight_sync.timeout_seconds=60",
        *overrides,
    )


def start_server(
    session: DoctorSession,
    rollout: RolloutConfig,
    model: ModelConfig,
    name: str,
    *,
    routed_experts: bool = False,
    weights_from_sync: bool = False,
    exact: bool = False,
) -> SGLangServer:
    """A server for ``config.model.path`` on the last GPU: where there are two, weights have to cross.

    Raises:
        StepFailed: it did not start, with the end of its log.
    """
    places = [session.gpus - 1, *range(session.gpus - 1)]
    gpus = visible_devices(places, os.environ.get("CUDA_VISIBLE_DEVICES")) if session.gpus else None
    server = SGLangServer(
        rollout.engine,
        model_path=model.path,
        log_file=session.directory / f"{name}_server.log",
        colocated=bool(session.gpus),
        gpu_ids=gpus,
        routed_experts=routed_experts,
        weights_from_sync=weights_from_sync,
        exact_operators=OPERATORS if exact else (),
    )
    try:
        server.start()
    except EngineStartError as error:
        raise StepFailed(str(error)) from error
    return server


def engine(session: DoctorSession) -> tuple[list[StepFigure], SGLangServer]:
    """Start the engine that other steps use; the caller stops it."""
    config = engine_config(session, model.EXPERTS)
    began = time.monotonic()
    server = start_server(session, config.rollout, config.model, "engine", routed_experts=True)
    started = time.monotonic() - began
    ids = fixed_text(ByteTokenizer(), model.VOCABULARY, 32)
    request = GenerateRequest(ids, 16, SamplingConfig(n=1, temperature=0.0))

    async def generate(client: SGLangClient) -> Any:
        return await client.generate(request)

    result = ask(server.base_url, generate)
    path = _address_file(session)
    path.touch(mode=0o600)
    path.write_text(json.dumps([server.base_url, engine_key()]), encoding="utf-8")
    return [
        StepFigure("start", started, "s"),
        StepFigure("sampled tokens", len(result.output_ids), at_least=16),
    ], server


def engine_url(session: DoctorSession) -> str:
    """The address of the engine that the step ``engine`` started in another process; takes over that engine's key."""
    url, key = json.loads(_address_file(session).read_text(encoding="utf-8"))
    use_engine_key(key)
    return str(url)


def _address_file(session: DoctorSession) -> Path:
    return session.directory / "engine_url.json"


def ask(url: str, question: Any) -> Any:
    """What ``question(client)``, a coroutine, finds out from the engine at ``url``."""

    async def run() -> Any:
        async with SGLangClient(url, timeout_seconds=120) as client:
            answer: Coroutine[Any, Any, Any] = question(client)
            return await answer

    return asyncio.run(run())


class ByteTokenizer:
    """The tiny models read bytes."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The text's UTF-8 bytes as token ids."""
        return list(text.encode())


def score_figures(config: Config, learner: Any, url: str) -> list[StepFigure]:
    """Log-probs of the fixed text by the engine at ``url`` against those of ``learner``.

    Raises:
        StepFailed: they are of different models, with the diagnosis.
    """
    ids = fixed_text(ByteTokenizer(), model.VOCABULARY, TEXT_TOKENS)
    ours = learner.log_probs(as_batch(ids), sampling=SamplingSettings())["log_probs"]

    async def score(client: SGLangClient) -> Any:
        return await client.score(ids)

    comparison = LogProbComparison(ids, ask(url, score), ours)
    bound = default_bound(config)
    if comparison.differs(bound):
        raise StepFailed(comparison.diagnosis(bound))
    return [
        StepFigure("log-probs, mean difference", comparison.relative, "spreads", at_most=bound),
        StepFigure("log-probs, largest difference", comparison.max, "nats"),
    ]


def log_probs(session: DoctorSession) -> list[StepFigure]:
    """The model as both have loaded it from its files; each chooses its experts."""
    config = engine_config(session, model.EXPERTS)
    learner = make_learner(config)
    return score_figures(config, learner, engine_url(session))


def replay(session: DoctorSession) -> list[StepFigure]:
    """Responses that the engine samples, read by the learner with the engine's experts."""
    config = engine_config(session, model.EXPERTS)
    batch = asyncio.run(_sample(config, engine_url(session)))
    result = make_learner(config).log_probs(batch)
    mask = batch.loss_mask
    ids = [0, *batch.response_ids[mask].tolist()]
    comparison = LogProbComparison(ids, batch.rollout_log_probs[mask], result["log_probs"][mask])
    bound = default_bound(config)
    return [
        StepFigure("sampled tokens", int(mask.sum()), at_least=_PROMPTS * _SAMPLED_TOKENS),
        StepFigure("log-probs, mean difference", comparison.relative, "spreads", at_most=bound),
        StepFigure("log-probs, largest difference", comparison.max, "nats"),
        # Each response's last token was no input of the engine.
        StepFigure("tokens without experts", result["metrics"]["routing_replay/missing_rows"], at_most=0.05),
    ]


def dense(session: DoctorSession) -> list[StepFigure]:
    """An engine of its own, for what a mixture of experts has not: a dense MLP."""
    session.need_gpus(1, "a second engine")
    config = engine_config(session, model.DENSE)
    server = start_server(session, config.rollout, config.model, "engine_dense")
    try:
        return score_figures(config, make_learner(config), server.base_url)
    finally:
        server.stop()


def fp8(session: DoctorSession) -> list[StepFigure]:
    """An engine that starts without weights and gets them in FP8 blocks, as a run with FP8 engines does."""
    session.need_gpus(1, "an FP8 engine")
    if torch.cuda.get_device_capability(session.gpus - 1) < LEAST_FP8_CAPABILITY:
        raise Skipped("this GPU has no FP8: its compute capability is below 8.9")
    config = engine_config(
        session,
        model.DENSE,
        "rollout.engine.quantization=fp8",
        "weight_sync.method=tensor",
        "weight_sync.bucket_bytes=4194304",
        # An engine may turn scales into its kernels' own layout.
        "weight_sync.verify=false",
    )
    server = start_server(session, config.rollout, config.model, "engine_fp8", weights_from_sync=True)
    try:
        learner = make_learner(config)
        sync = make_engine(config).weight_sync([server.base_url])
        try:
            report = sync.push(learner.export_weights(config.weight_sync.bucket_bytes), 1)
        finally:
            sync.close()
        return [
            StepFigure("tensors sent", report.tensors, at_least=1),
            *score_figures(config, learner, server.base_url),
        ]
    finally:
        server.stop()


async def _sample(config: Config, url: str) -> TrajectoryBatch:
    """Responses with the experts of all their tokens.

    Raises:
        StepFailed: the engine gave no experts.
    """
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, model.VOCABULARY - 1, _PROMPT_TOKENS).tolist() for _ in range(_PROMPTS)]
    sampling = SamplingConfig(n=1)
    async with make_engine(config).client(url) as client:
        requests = [GenerateRequest(each, _SAMPLED_TOKENS, sampling, routed_experts_start=0) for each in prompts]
        answers = await asyncio.gather(*(client.generate(request) for request in requests))
    trajectories = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        count = len(answer.output_ids)
        if answer.routed_experts is None:
            raise StepFailed("the engine's answer has no routed experts")
        rows = answer.routed_experts
        # The last token was no input yet, and so has no row.
        missing = np.full((1, *rows.shape[1:]), np.iinfo(rows.dtype).max, rows.dtype)
        trajectories.append(
            Trajectory(
                prompt_ids=np.array(prompt, np.int32),
                response_ids=np.array(answer.output_ids, np.int32),
                loss_mask=np.ones(count, np.bool_),
                rollout_log_probs=np.array(answer.log_probs, np.float32),
                turn_ids=np.zeros(count, np.int16),
                weight_versions=np.array(answer.weight_versions, np.int32),
                group_id=index,
                index=0,
                finish_reason=FinishReason.LENGTH,
                reward=0.0,
                routed_experts=np.concatenate([rows, missing]),
            )
        )
    return TrajectoryBatch.from_trajectories(trajectories)
