from pathlib import Path

import pytest

from megatron_retool.config import load_config
from megatron_retool.loop.checks import check_extensions

CONFIGS = Path(__file__).parents[2] / "configs"
TWO_TOOLS = CONFIGS / "demo_two_tools_cpu.yaml"


def test_a_corpus_that_the_demo_will_write_need_not_be_there_yet(tmp_path):
    runs = f"trainer.runs_dir={tmp_path}"
    check_extensions(load_config(TWO_TOOLS, [runs]))
    with pytest.raises(ValueError, match=r"tools\.search\.corpus: search corpus .*corpus\.parquet does not exist"):
        check_extensions(load_config(TWO_TOOLS, [runs, "demo.enable=false"]))
    with pytest.raises(ValueError, match=r"search corpus gone\.parquet does not exist"):
        check_extensions(load_config(TWO_TOOLS, [runs, "tools.search.corpus=gone.parquet"]))


def test_a_mixture_of_experts_that_the_demo_will_write_need_not_be_there_yet(tmp_path):
    overrides = [f"trainer.runs_dir={tmp_path}", "learner.routing_replay=rollout"]
    check_extensions(load_config(CONFIGS / "demo_moe_cpu.yaml", overrides))
