"""Every snippet of docs/extending.md does what the page says, from a directory outside of the repository."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import SeedOssConfig, SeedOssForCausalLM

from code_interpreter.client import CodeInterpreterClient
from conversion import hf_to_mcore, mcore_to_hf
from megatron_retool import __main__ as command_line
from megatron_retool.algorithms.advantages import AdvantageInputs, compute_advantages
from megatron_retool.algorithms.kl import kl_penalty
from megatron_retool.algorithms.policy_loss import PolicyLossInputs
from megatron_retool.algorithms.rollout_correction import correct_responses
from megatron_retool.cluster.checks import check_extensions
from megatron_retool.config import Config, ToolsConfig, load_config
from megatron_retool.data.prompts import PromptSource
from megatron_retool.registry import Need
from megatron_retool.rewards.overlong import length_penalties, length_penalty
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.loggers import check_loggers
from sglang_rollout.agent.chosen_format import make_format
from sglang_rollout.engine.base import GenerateRequest
from sglang_rollout.engine.configured import make_engine
from tests.conversion.conftest import save_tokenizer
from tests.extending_page import PAGE, snippets, write_snippets
from tests.kit import markov_policy
from tests.tools.search.conftest import Service
from tools.registry import ToolRegistry
from tools.tool import ToolResult, TrajectoryInfo


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_snippets(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(directory: Path, *names: str) -> Config:
    """The configuration of several snippets together."""
    merged = OmegaConf.merge(*(OmegaConf.load(directory / f"my_{name}.yaml") for name in names))
    OmegaConf.save(merged, directory / "all.yaml")
    return load_config(directory / "all.yaml")


def test_the_page_names_a_file_for_every_snippet() -> None:
    blocks = re.findall(r"```(?:python|yaml)\n", PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == len(snippets()) == 31


def test_every_snippet_passes_the_checks_before_a_run(outside: Path) -> None:
    check_extensions(load(outside, "data", "loss", "advantage", "reward", "tool", "format", "agent", "engine"))
    check_extensions(load(outside, "search"))
    check_extensions(load(outside, "data", "correction", "kl", "penalty", "metric"))


def test_a_logger_writes_what_it_is_told(outside: Path) -> None:
    config = load(outside, "logger")
    check_loggers(config.trainer)
    trainer = config.trainer
    with MetricLogger(outside / "run", trainer.loggers, logger_kwargs=trainer.logger_kwargs) as log:
        log.log(3, {"val-core/all/acc/mean@4": 0.5, "critic/rewards/mean": 1.0})
    assert (outside / "run" / "lines.txt").read_text() == "3 val-core/all/acc/mean@4=0.5\n"


def test_loss_and_advantage_get_what_they_need(outside: Path) -> None:
    algorithm = load(outside, "loss", "advantage").algorithm
    assert set(algorithm.needs) == {Need.REFERENCE, Need.GROUPS}
    t = torch.tensor
    inputs = PolicyLossInputs(
        log_probs=t([-1.0, -2.0], requires_grad=True), old_log_probs=t([-1.0, -2.0]), advantages=t([1.0, -1.0]),
        loss_mask=t([True, True]), loss_weights=t([0.5, 0.5]), sequence_ids=t([0, 0]), ref_log_probs=t([-1.5, -2.0]),
    )  # fmt: skip
    losses, metrics = algorithm.objective.loss(inputs)
    assert losses.tolist() == pytest.approx([-(1.0 - 0.2 * 0.5), 1.0]) and metrics["distance"].tolist() == [0.5, 0.0]
    batch = AdvantageInputs(
        rewards=t([1.0, 1.0]), group_ids=t([0, 0]), loss_mask=t([True, True, True]), sequence_ids=t([0, 0, 1])
    )
    advantages = compute_advantages(algorithm.estimator, batch).advantages
    assert advantages[0] == advantages[1] < 0 < advantages[2], "equal rewards: the shorter response is better"


def test_correction_kl_and_penalty_are_what_they_say(outside: Path) -> None:
    config = load(outside, "correction", "kl", "penalty")
    algorithm = config.algorithm
    assert set(algorithm.needs) == {Need.GROUPS, Need.REFERENCE}
    difference, owner = torch.tensor([0.1] * 20 + [0.9] * 20), torch.tensor([0] * 20 + [1] * 20)
    sampled = torch.ones(40, dtype=torch.bool)
    found = correct_responses(difference, torch.zeros(40), sampled, owner, 2, algorithm.rollout_correction)
    assert found.keep_mask.tolist() == [True] * 20 + [False] * 20
    torch.testing.assert_close(found.importance_weights, 2 * torch.tanh(1.5 * difference.exp() / 2))
    assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-3.0]), algorithm.kl_penalty).tolist() == [0.875]
    overlong = config.reward.overlong
    penalty = length_penalties.bind(overlong.mode, overlong.kwargs, settings=overlong)
    assert [length_penalty(penalty, tokens, 100) for tokens in (60, 80, 100)] == pytest.approx([0.0, -0.25, -0.5])


def test_a_service_of_ones_own_is_asked(outside: Path) -> None:
    service = Service({"pages": [{"key": "Paris", "title": "Paris", "description": "Capital of France"}]})

    async def scenario() -> str:
        async with service.serving() as base:
            search = load(outside, "search").tools.search
            local = dataclasses.replace(search.service, base_url=base, cache_dir=None)
            config = ToolsConfig(search=dataclasses.replace(search, service=local))
            async with ToolRegistry.from_config(config, ["search"]) as registry:
                session = await registry.open(TrajectoryInfo(0, 0))
                return (await session.call("search", {"query": "capital"})).text

    assert asyncio.run(scenario()) == "[1] (https://en.wikipedia.org/wiki/Paris) Paris\nCapital of France"
    assert service.asked[0][:2] == ("GET", "/w/rest.php/v1/search/page?q=capital&limit=3")


def test_prompts_choose_and_furnish_their_tools(outside: Path) -> None:
    runpy.run_path(str(outside / "my_data.py"))
    config = load(outside, "data", "tool")
    tools = ToolRegistry.from_config(
        config.tools, config.rollout.multi_turn.tools, code_interpreter=CodeInterpreterClient(["http://unused"])
    )
    assert tools.names == ["code_interpreter", "notes", "dictionary"]
    (row, *_) = PromptSource(config.data, markov_policy.build_tokenizer(), tools, seed=0).next_batch(1)

    async def scenario() -> list[ToolResult]:
        opened = await tools.open(TrajectoryInfo(row.group_id, 0, row.extra_info))
        answers = [await opened.call("notes", {"text": "x"}), await opened.call("dictionary", {"term": "x"})]
        everything = await tools.open(TrajectoryInfo(1, 0))
        answers.append(await everything.call("dictionary", {"term": "x"}))
        await opened.close(closed)
        return answers

    closed: dict[str, object] = {}
    notes, chosen_away, dictionary = asyncio.run(scenario())
    first = row.extra_info["tools_kwargs"]["notes"]["create_kwargs"]["first"]
    assert (notes.status, notes.text) == ("ok", f"{first}\nx") and chosen_away.status == "unknown_tool"
    assert dictionary.text == "2 entries about x" and closed == {"notes": 2}
    assert tools.take_metrics()["tool/notes/length"] == 2.0


def test_format_and_engine(outside: Path) -> None:
    config = load(outside, "format", "engine")
    (call,) = make_format(config.rollout.multi_turn).parse("Let me see. <ask>the moon</ask>")
    assert (call.name, call.arguments, call.error) == ("dictionary", {"term": "the moon"}, None)
    engine = make_engine(config)
    server = engine.server(0, model_path="", host="", log_file=Path(), tokenizer=False, weights_from_sync=True,
                           gpu_ids=None)  # fmt: skip

    async def scenario():
        async with engine.client(server.base_url) as client:
            await asyncio.to_thread(engine.weight_sync([server.base_url]).push, [[("w", torch.ones(2))]], 4)
            return await client.generate(GenerateRequest([1], 2, config.rollout.train))

    result = asyncio.run(scenario())
    assert (result.output_ids, result.finish_reason, result.weight_versions) == ([5, 6], "length", [4, 4])


def test_a_model_of_the_family_goes_there_and_back(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = SeedOssForCausalLM(SeedOssConfig(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=96))
    model.save_pretrained("hf")
    save_tokenizer(outside / "hf")
    family = ["--family", "my_family.py:FAMILY"]
    assert hf_to_mcore.main(["--hf-dir", "hf", "--mcore-dir", "mcore", *family]) == 0
    assert mcore_to_hf.main(["--mcore-dir", "mcore", "--hf-dir", "back", *family]) == 0
    back = SeedOssForCausalLM.from_pretrained("back")
    for (name, before), (_, after) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert torch.equal(before, after), name


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.policy_loss=my_loss.py:lost", r"algorithm.policy_loss=.*my_loss.py has no 'lost'"),
        ("algorithm.advantage_kwargs.wieght=1", "algorithm.advantage_kwargs.wieght: brevity has no parameter"),
        ("reward.function=no_module:f", "reward.function=no_module:f: there is no module no_module"),
        ("rollout.multi_turn.tools=[my_tool.py:Note]", "my_tool.py has no 'Note'; did you mean Notes"),
        ("rollout.multi_turn.format=my_loss.py:towards_reference", "rollout.multi_turn.format=.*towards_reference"),
        ("rollout.agent=my_data.py:rows", "rollout.agent=.*: the list .* cannot be called"),
        ("rollout.engine.backend=my_tool.py:Notes", "rollout.engine.backend=.*my_tool.py:Notes"),
        ("model.families=[my_loss.py:towards_reference]", "model.families=.*: it is a function, not a"),
    ],
)
def test_a_wrong_target_ends_the_command_with_one_message(
    outside: Path, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    runpy.run_path(str(outside / "my_data.py"))
    load(outside, "data", "loss", "advantage", "reward", "tool")
    assert command_line.main(["train", "--config", "all.yaml", "model.path=not/fetched", override]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(said, printed) and "Traceback" not in printed and printed.startswith("error: ")
    assert not (outside / "runs").exists()
