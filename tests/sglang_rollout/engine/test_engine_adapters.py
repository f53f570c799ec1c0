"""Adapters in a real engine, against peft on the same model in transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from megatron_retool.config import EngineConfig, SamplingConfig
from megatron_retool.config.rollout import EngineAdaptersConfig
from sglang_rollout.engine.base import EngineRejected, GenerateRequest
from sglang_rollout.engine.client import SGLangClient
from tests.kit import markov_policy
from tests.kit.forked_engine import ForkedServer

GREEDY = SamplingConfig(n=1, temperature=0.0)
PROMPT = [5 + 7 * place % 60 for place in range(40)]
BOUND = 2e-5
RANKS = {"four": 4, "eight": 8}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def engine_config(**settings: Any) -> EngineConfig:
    adapters = EngineAdaptersConfig(max_rank=8, per_batch=4)
    sizes: dict[str, Any] = {"max_total_tokens": 16384, "max_running_requests": 16}
    return EngineConfig(device="cpu", dtype="float32", adapters=adapters, **sizes, **settings)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """base, a model, and an adapter for each of RANKS."""
    root = tmp_path_factory.mktemp("adapters")
    markov_policy.save(markov_policy.random_model(tokenizer, seed=1), tokenizer, root / "base")
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(root, name, rank, seed)
    return root


def write_adapter(root: Path, name: str, rank: int, seed: int) -> Path:
    base = Qwen2ForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    model = get_peft_model(base, PeftConfig(r=rank, lora_alpha=16, target_modules=PROJECTIONS))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, factor in model.named_parameters():
            if "lora_B" in key:
                factor.normal_(0, 0.05, generator=generator)
    model.save_pretrained(str(root / name))
    return root / name


@pytest.fixture(scope="module")
def engine(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    log = tmp_path_factory.mktemp("logs") / "engine.log"
    with ForkedServer(engine_config(random_seed=5), model_path=directory / "base", log_file=log) as server:
        yield server


def on_client(engine: ForkedServer, scenario: Callable[[SGLangClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with SGLangClient(engine.base_url) as client:
            return await scenario(client)

    return asyncio.run(run())


def expected(directory: Path, name: str | None, ids: list[int]) -> torch.Tensor:
    """[n - 1] log-probs of all ids but the first."""
    model: Any = Qwen2ForCausalLM.from_pretrained(directory / "base", dtype=torch.float32).eval()
    if name is not None:
        model = PeftModel.from_pretrained(model, directory / name).eval()
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def difference(found: list[float], wanted: torch.Tensor) -> float:
    return float((torch.tensor(found) - wanted).abs().max())


async def loaded(client: SGLangClient, directory: Path) -> None:
    for name in RANKS:
        await client.load_adapter(name, directory / name)


async def unloaded(client: SGLangClient) -> None:
    for name in RANKS:
        await client.unload_adapter(name)


def test_the_base_and_two_ranks_are_computed_in_one_batch(engine: ForkedServer, directory: Path) -> None:
    names = [None, *RANKS]

    async def scenario(client: SGLangClient) -> Any:
        await loaded(client, directory)
        requests = [GenerateRequest(PROMPT, 32, GREEDY, adapter=name) for name in names]
        sampled = await asyncio.gather(*(client.generate(request) for request in requests))
        scores = [await client.score(PROMPT, adapter=name) for name in names]
        likeliest = [await client.rank(PROMPT, 2, adapter=name) for name in names]
        await unloaded(client)
        return sampled, scores, likeliest

    sampled, scores, likeliest = on_client(engine, scenario)
    for name, answer, score, ranked in zip(names, sampled, scores, likeliest, strict=True):
        wanted = expected(directory, name, [*PROMPT, *answer.output_ids])
        assert len(answer.output_ids) == 32
        assert difference(answer.log_probs, wanted[len(PROMPT) - 1 :]) < BOUND, name
        assert difference(score, wanted[: len(PROMPT) - 1]) < BOUND, name
        assert difference(ranked.log_probs, wanted[: len(PROMPT) - 1]) < BOUND, name
    # Adapters change the model by far more than the bound.
    assert difference(scores[1], torch.tensor(scores[0])) > 0.01 < difference(scores[2], torch.tensor(scores[1]))


def test_a_seed_gives_the_same_tokens_of_an_adapter_in_any_company(engine: ForkedServer, directory: Path) -> None:
    def request(name: str, seed: int) -> GenerateRequest:
        return GenerateRequest(PROMPT, 24, SamplingConfig(n=1), seed=seed, adapter=name)

    async def scenario(client: SGLangClient) -> Any:
        await loaded(client, directory)
        alone = await client.generate(request("four", 1))
        company = [request(name, seed) for name in ("eight", "four") for seed in (1, 2)]
        others = await asyncio.gather(*(client.generate(each) for each in company))
        await unloaded(client)
        return alone, others

    alone, others = on_client(engine, scenario)
    assert alone.output_ids == others[2].output_ids
    # Not bit for bit: SGLang adds an adapter's products up by which requests stand beside one another.
    assert difference(alone.log_probs, torch.tensor(others[2].log_probs)) < BOUND
    assert len({tuple(answer.output_ids) for answer in others}) == 4


def test_a_name_serves_other_factors_after_it_was_unloaded(engine: ForkedServer, directory: Path) -> None:
    async def scenario(client: SGLangClient) -> list[list[float]]:
        found = []
        for source in RANKS:
            await client.load_adapter("policy@1", directory / source)
            found.append(await client.score(PROMPT, adapter="policy@1"))
            await client.unload_adapter("policy@1")
        return found

    for name, score in zip(RANKS, on_client(engine, scenario), strict=True):
        assert difference(score, expected(directory, name, PROMPT)) < BOUND


def test_more_adapters_than_a_batch_takes_wait_for_one_another(engine: ForkedServer, directory: Path) -> None:
    names = [f"{source}-{copy}" for source in RANKS for copy in range(3)]

    async def scenario(client: SGLangClient) -> Any:
        for name in names:
            await client.load_adapter(name, directory / name.partition("-")[0])
        requests = [GenerateRequest(PROMPT, 8, GREEDY, adapter=name) for name in names]
        answers = await asyncio.gather(*(client.generate(request) for request in requests))
        for name in names:
            await client.unload_adapter(name)
        return answers

    for name, answer in zip(names, on_client(engine, scenario), strict=True):
        wanted = expected(directory, name.partition("-")[0], [*PROMPT, *answer.output_ids])
        assert difference(answer.log_probs, wanted[len(PROMPT) - 1 :]) < BOUND


def test_a_request_ends_on_the_adapter_that_is_unloaded_meanwhile(engine: ForkedServer, directory: Path) -> None:
    async def scenario(client: SGLangClient) -> Any:
        await loaded(client, directory)
        request = GenerateRequest(PROMPT, 200, GREEDY, adapter="four")
        running = asyncio.create_task(client.generate(request))
        await asyncio.sleep(0.2)
        assert not running.done()
        unloading = asyncio.create_task(client.unload_adapter("four"))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineRejected, match="four"):
            await client.score(PROMPT, adapter="four")
        assert not running.done()
        answer = await running
        await unloading
        await client.unload_adapter("eight")
        return answer

    answer = on_client(engine, scenario)
    assert len(answer.output_ids) == 200
    wanted = expected(directory, "four", [*PROMPT, *answer.output_ids])
    assert difference(answer.log_probs, wanted[len(PROMPT) - 1 :]) < BOUND


def broken_adapters(directory: Path, tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Directories that hold no adapter of the model, and what the engine says of each."""
    cut = shutil.copytree(directory / "four", tmp_path / "cut")
    factors = load_file(cut / "adapter_model.safetensors")
    name = next(name for name in factors if "down_proj.lora_A" in name)
    save_file(factors | {name: factors[name][:, 1:].contiguous()}, cut / "adapter_model.safetensors")
    named = shutil.copytree(directory / "four", tmp_path / "named")
    renamed = {name.replace("o_proj", "out_proj"): factor for name, factor in factors.items()}
    save_file(renamed, named / "adapter_model.safetensors")
    torn = shutil.copytree(directory / "four", tmp_path / "torn")
    (torn / "adapter_model.safetensors").write_bytes(b"\0" * 100)
    empty = shutil.copytree(directory / "four", tmp_path / "empty")
    save_file({"x": torch.zeros(1)}, empty / "adapter_model.safetensors")
    wide = write_adapter(directory, "sixteen", 16, 0)
    other = shutil.copytree(directory / "four", tmp_path / "other")
    settings = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(settings | {"target_modules": ["lm_head"]}))
    return {
        "cut": (cut, r"down_proj.lora_A.weight has shape \[4, \d+\] where this rank needs \[4, \d+\]"),
        "named": (named, "out_proj"),
        "torn": (torn, "(?i)header"),
        "empty": (empty, "it has no factors"),
        "wide": (wide, "rank 16"),
        "other": (other, "target modules"),
    }


def test_what_is_no_adapter_of_the_model_is_refused_and_the_engine_goes_on(
    engine: ForkedServer, directory: Path, tmp_path: Path
) -> None:
    async def scenario(client: SGLangClient) -> None:
        with pytest.raises(EngineRejected, match="nobody"):
            await client.score(PROMPT, adapter="nobody")
        with pytest.raises(EngineRejected, match="nobody"):
            await client.unload_adapter("nobody")
        for name, (place, message) in broken_adapters(directory, tmp_path).items():
            with pytest.raises(EngineRejected, match=message):
                await client.load_adapter(name, place)
            with pytest.raises(EngineRejected, match=name):
                await client.score(PROMPT, adapter=name)
        await client.load_adapter("four", directory / "four")
        with pytest.raises(EngineRejected, match="already loaded"):
            await client.load_adapter("four", directory / "eight")
        assert difference(await client.score(PROMPT, adapter="four"), expected(directory, "four", PROMPT)) < BOUND
        await client.unload_adapter("four")
        # Its files are still there.
        with pytest.raises(EngineRejected, match="four"):
            await client.score(PROMPT, adapter="four")

    on_client(engine, scenario)


@pytest.mark.slow
def test_ranks_of_a_tensor_parallel_engine_take_their_parts(directory: Path, tmp_path: Path) -> None:
    config = engine_config(tensor_parallel_size=2)
    with ForkedServer(config, model_path=directory / "base", log_file=tmp_path / "engine.log") as server:

        async def scenario(client: SGLangClient) -> list[list[float]]:
            await loaded(client, directory)
            return [await client.score(PROMPT, adapter=name) for name in (None, *RANKS)]

        for name, score in zip((None, *RANKS), on_client(server, scenario), strict=True):
            assert difference(score, expected(directory, name, PROMPT)) < BOUND
