"""From a teacher's server to a policy that comes closer to it: `data score`, then `sft` with loss=top_k."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_retool.config import Config, ConfigError, EngineConfig, OptimizerConfig, SFTStage, load_config
from megatron_retool.sft.launch import fine_tune
from sglang_rollout.engine.key import engine_key
from tests.data.conftest import demo_directory  # noqa: F401
from tests.kit.forked_engine import ForkedServer
from tests.sft.conftest import QUIET, metrics, with_sft

ROWS, VALIDATION = 48, 16


def teacher_of(student: Path, directory: Path) -> Path:
    """Another random model with the student's tokenizer, whose distributions are far from even."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(student)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.save_pretrained(directory)
    for file in student.glob("*token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    for file in student.glob("*template*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return directory


def responses(path: Path) -> Path:
    random = np.random.default_rng(3)
    rows = [
        {
            "prompt_ids": random.integers(0, 500, 6).tolist(),
            "response_ids": random.integers(0, 500, 20).tolist(),
            "loss_mask": [place not in (8, 9) for place in range(20)],
        }
        for _ in range(ROWS + VALIDATION)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:ROWS]), path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[ROWS:]), path / "val.parquet")
    return path


@pytest.mark.rare
@pytest.mark.timeout(900)
def test_the_policy_comes_closer_to_its_teacher(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = Path(config.model.path)
    teacher, data = teacher_of(student, tmp_path / "teacher"), responses(tmp_path)
    engine = EngineConfig(device="cpu", dtype="float32", max_total_tokens=4096, threads=1)
    server = ForkedServer(engine, model_path=teacher, log_file=tmp_path / "teacher.log", tokenizer=True)
    server.start()
    monkeypatch.setenv("TEACHER_KEY", engine_key())
    try:
        for name in ("train", "val"):
            command = [sys.executable, "-m", "megatron_retool", "data", "score", str(data / f"{name}.parquet")]
            command += ["--url", server.base_url, "--model", str(student), "--key-variable", "TEACHER_KEY"]
            done = subprocess.run([*command, "--output", str(tmp_path / name), "--top-k", "8"], capture_output=True)
            assert done.returncode == 0, done.stderr.decode()
    finally:
        server.stop()
    # What the server says is what transformers computes of the same tokens.
    row = pq.read_table(tmp_path / "train" / "scored_000000.parquet").slice(0, 1).to_pylist()[0]
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
    with torch.no_grad():
        log_probs = AutoModelForCausalLM.from_pretrained(teacher)(ids).logits[0, 5:-1].log_softmax(-1)
    best = log_probs.topk(8, -1)
    for place, taken in enumerate(row["loss_mask"]):
        assert row["top_ids"][place] == (best.indices[place].tolist() if taken else [])
        np.testing.assert_allclose(row["top_log_probs"][place], best.values[place] if taken else [], atol=1e-4)

    stage = SFTStage(
        name="teacher",
        train_files=[str(tmp_path / "train")],
        val_files=[str(tmp_path / "val")],
        batch_size=16,
        steps=30,
        max_length=64,
        loss="top_k",
        optimizer=OptimizerConfig(lr=5e-3, schedule="constant"),
    )
    config = with_sft(config, stages=[stage], test_freq=10)
    assert fine_tune(config, QUIET)
    rows = metrics(config)
    assert rows[-1]["sft/loss"] < 0.8 * rows[0]["sft/loss"]
    validation = [row["sft/val_loss"] for row in rows if "sft/val_loss" in row]
    assert len(validation) == 3 and validation[-1] > 0

    stage = dataclasses.replace(stage, train_files=[str(data / "train.parquet")])
    with pytest.raises(Exception, match="megatron-retool data score"):
        fine_tune(with_sft(config, stages=[stage]), QUIET)


def test_layers_for_multi_token_prediction_do_not_go_with_it() -> None:
    stage = "sft.stages=[{train_files: [a.parquet], loss: top_k}]"
    with pytest.raises(ConfigError, match=r"sft.stages\[0\].loss=top_k does not go with learner.mtp.train=true"):
        load_config(None, [stage, "learner.mtp.train=true"])
