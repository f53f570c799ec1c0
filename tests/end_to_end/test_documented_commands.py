"""Every command in README and docs/ does what it is written to do, in a copy of the repository as a newcomer has it.

The copy differs in two things: its demo is small, and begins with the other tests' fine-tuned model. Commands
that need a GPU, a cluster or a container, or take hours, are named below with the test that runs them instead. Of whole
pipelines that differ in settings alone, one runs; the configuration of the others is resolved and checked.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_retool.config import load_config
from tests.campaign.demo import shrink_demo
from tests.end_to_end.conftest import ROOT, FinishedRun, copy_checkout

PAGES = ("README.md", "docs/first_steps.md", "docs/demo.md")

RUN_ELSEWHERE = {
    r"^bash scripts/test\.sh": "this test is part of it",
    r"^docker |^enroot |^apptainer |^export MEGATRON_RETOOL_CONTAINER": "a container cannot be built here",
    r"scripts/slurm/|^sbatch ": "tests/slurm has a cluster",
    r"setup\.sh --gpu": "it installs CUDA packages",
    r"-m experiments\.mismatch": "tests/end_to_end/test_mismatch_experiment.py runs the quick form",
    r"^megatron-retool data ": "tests/data/test_prepare.py and test_construct.py: here is neither hub nor endpoint",
    r"code_interpreter\.server|^curl ": "tests/tools/code_interpreter starts servers and asks them",
    r"^megatron-retool doctor": "tests/parity/doctor runs it, on this host",
    r"^megatron-retool admit|megatron_retool\.admission\.page": "tests/parity admits every family",
    r"^bash scripts/docs\.sh": "tests/test_documentation_site.py builds it",
    r"configs/demo_moe_cpu\.yaml": "tests/end_to_end/test_mixture_of_experts.py runs it, made small",
    r"configs/demo_lora_cpu\.yaml": "tests/end_to_end/test_adapters.py runs it, made small",
    r"configs/smollm2_135m_cpu\.yaml": "hours; the demo has its stages, tests/data its data",
    r"^lm_eval ": "a package of its own",
    r"-m sglang\.launch_server": "tests/end_to_end/test_distillation.py starts a teacher",
    r"^megatron-retool report operators ": "tests/parity/test_mismatch_by_operator.py makes such a report",
    r"^megatron-retool engines ": "tests/end_to_end/test_async_run.py changes a run's engines",
    r"^megatron-retool tinker ": "tests/end_to_end/test_tinker.py starts it",
    r"models/MiniMax-M2": "230 B parameters; tests/conversion/test_fp8_source.py converts small ones",
}
RESOLVED_ONLY = {
    "trainer.experiment_name=profiled": "tests/end_to_end/test_run.py records a profile",
    "trainer.experiment_name=once": "tests/end_to_end/test_run.py makes a deterministic run twice",
    "trainer.experiment_name=mine": "gspo is such a run",
    "trainer.experiment_name=bf16": "the mixture of experts' engine computes in it",
    "trainer.experiment_name=exact": "tests/end_to_end/test_match_engine.py makes a run with experts",
    "trainer.experiment_name=tp2": "the demo has two ranks too; tests/learner has each layout",
    "trainer.experiment_name=cp2": "the same",
    "trainer.experiment_name=from_20": "every run begins with such a directory, that of the fine-tuned model",
    "trainer.experiment_name=seed1": "gspo begins from the demo's data and model too",
    "configs/demo_two_tools_cpu.yaml": "the demo is such a run; tests/data makes its data with both real tools",
}
STAYS = r"^tensorboard |^megatron-retool view runs$|^megatron-retool serve "
"""Servers: they have to stay up."""
SHORTER = {
    "trainer.total_steps=100": "trainer.total_steps=2",
    "global_step_80": "global_step_1",
    "weights_step_20": "global_step_1/learner",
    "rollout.val.n=8": "rollout.val.n=2",
}


def commands_of(page: Path) -> list[str]:
    """The lines of the page's bash blocks, continued ones joined, without comments."""
    blocks = re.findall(r"(?m)^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


def documented() -> list[str]:
    """Commands of all pages, each once, in the order in which a newcomer reads them."""
    others = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
    pages = dict.fromkeys([*PAGES, *others])
    return list(dict.fromkeys(command for page in pages for command in commands_of(ROOT / page)))


def run_here(commands: list[str]) -> list[str]:
    return [c for c in commands if not any(re.search(pattern, c) for pattern in RUN_ELSEWHERE)]


def test_exceptions_are_needed():
    commands = documented()
    for pattern in (*RUN_ELSEWHERE, *map(re.escape, RESOLVED_ONLY), STAYS):
        assert any(re.search(pattern, command) for command in commands), f"no page has a command like {pattern}"
    for written in SHORTER:
        assert any(written in command for command in commands), written
    assert len(run_here(commands)) > 15


@pytest.fixture
def clone(demo_run: FinishedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the repository with a small demo, and the environment of this test as its .venv."""
    clone = tmp_path_factory.mktemp("clone") / "megatron-retool"
    copy_checkout(clone)
    path = clone / "configs" / "demo_cpu.yaml"
    tree = OmegaConf.load(path)
    shrink_demo(tree, steps=1)
    tree.demo.base = str(demo_run.run_dir)
    OmegaConf.save(tree, path)
    venv = clone / ".venv"
    venv.mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name != ".installed":
            (venv / part.name).symlink_to(part)
    # setup.sh takes the environment for installed: it would otherwise install into that of this test.
    flavour, digest, _ = (Path(sys.prefix) / ".installed").read_text().split(" ", 2)
    (venv / ".installed").write_text(f"{flavour} {digest} {clone}\n")
    return clone


@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_documented_commands_run_as_written(clone: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    environment.pop("MEGATRON_RETOOL_VENV", None)
    for command in run_here(documented()):
        for written, shorter in SHORTER.items():
            command = command.replace(written, shorter)
        words = shlex.split(command)
        if not RESOLVED_ONLY.keys().isdisjoint(words):
            config = words[words.index("--config") + 1] if "--config" in words else "configs/demo_cpu.yaml"
            load_config(clone / config, [word for word in words if "=" in word])
            continue
        stays = re.search(STAYS, command)
        line = f"timeout 10 {command}" if stays else command
        done = subprocess.run(
            ["bash", "-c", f"source .venv/bin/activate\n{line}"],
            cwd=clone, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        output = f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == (124 if stays else 0), output
        assert "Traceback" not in output, output
    assert not (clone / "runs" / "gspo" / "sft").exists(), "a second experiment fine-tunes again"
    for made in (
        "demo/report/index.html",
        "gspo/export/COMPLETE",
        "again/validation/step_000000.parquet",
        "demo/step_80",
    ):
        assert (clone / "runs" / made).exists(), made
