"""A text's log-probs, its likeliest tokens and given targets, from a real engine, against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

from megatron_retool.config import EngineConfig, SamplingConfig
from sglang_rollout.engine import score_pieces
from sglang_rollout.engine.base import EngineRejected, GenerateRequest, ScoredText, ScoreRequest, StopConditions
from sglang_rollout.engine.client import SGLangClient
from sglang_rollout.engine.score_pieces import ScorePiece, pieces
from tests.kit import markov_policy
from tests.kit.forked_engine import ForkedServer

TEXT = [5 + 11 * place % 70 for place in range(60)]
BOUND = 2e-5


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return markov_policy.random_model(tokenizer, seed=3)


@pytest.fixture(scope="module")
def engine(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    root = tmp_path_factory.mktemp("scores")
    directory = markov_policy.save(model, tokenizer, root / "model")
    config = EngineConfig(device="cpu", dtype="float32", max_total_tokens=16384, max_running_requests=16, random_seed=5)
    with ForkedServer(config, model_path=directory, log_file=root / "engine.log", tokenizer=True) as server:
        yield server


def on_client(engine: ForkedServer, scenario: Callable[[SGLangClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with SGLangClient(engine.base_url) as client:
            return await scenario(client)

    return asyncio.run(run())


def scored(engine: ForkedServer, request: ScoreRequest) -> ScoredText:
    answer: ScoredText = on_client(engine, lambda client: client.score_text(request))
    return answer


def all_log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """[n, vocabulary]; row p is of token p + 1."""
    with torch.no_grad():
        log_probs: torch.Tensor = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return log_probs


def check(found: ScoredText, wanted: torch.Tensor, request: ScoreRequest) -> None:
    places = range(request.start, len(request.input_ids))
    assert len(found.log_probs) == len(places)
    for number, place in enumerate(places):
        row = wanted[place - 1]
        assert abs(found.log_probs[number] - float(row[request.input_ids[place]])) < BOUND
        if request.likeliest:
            top = row.topk(request.likeliest)
            assert [token for token, _ in found.likeliest[number]] == top.indices.tolist()
            for (_, value), expected in zip(found.likeliest[number], top.values.tolist(), strict=True):
                assert abs(value - expected) < BOUND
        if request.targets is not None:
            for value, token in zip(found.targets[number], request.targets[number], strict=True):
                assert abs(value - float(row[token])) < BOUND


@pytest.mark.parametrize("start", [1, 17, 59])
def test_log_probs_from_a_place_on_are_those_of_transformers(engine: ForkedServer, model: Any, start: int) -> None:
    request = ScoreRequest(TEXT, start, likeliest=5)
    found = scored(engine, request)
    assert found.targets == []
    check(found, all_log_probs(model, TEXT), request)


@pytest.mark.parametrize("most", [65536, 40, 1])
def test_given_targets_are_scored_in_pieces(
    engine: ForkedServer, model: Any, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Targets differ from place to place, repeat within one, and are missing in some."""
    monkeypatch.setattr(score_pieces, "MOST_CELLS", most)
    start = 9
    targets = [[(place * 7) % 90, 3, (place * 7) % 90][: place % 4] for place in range(len(TEXT) - start)]
    request = ScoreRequest(TEXT, start, likeliest=2, targets=targets)
    assert (len(list(pieces(request))) == 1) == (most == 65536)
    check(scored(engine, request), all_log_probs(model, TEXT), request)


def test_no_piece_is_larger_than_an_answer_may_be() -> None:
    request = ScoreRequest(list(range(3000)), 1, targets=[[place, place + 1, 7] for place in range(2999)])
    found = list(pieces(request))
    assert found[0].start == 1 and found[-1].stop == 3000
    assert [piece.stop for piece in found[:-1]] == [piece.start for piece in found[1:]]
    for piece in found:
        assert (piece.stop - piece.start) * len(piece.ids) <= score_pieces.MOST_CELLS
        wanted = {token for row in request.targets[piece.start - 1 : piece.stop - 1] for token in row}
        assert piece.ids == tuple(sorted(wanted))
    # One more place would be too much.
    assert all((piece.stop - piece.start + 1) * (len(piece.ids) + 1) > score_pieces.MOST_CELLS for piece in found[:-1])
    assert list(pieces(ScoreRequest([1, 2, 3], 2))) == [ScorePiece(2, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": [1]}, "start=1: the text has 1 tokens"),
        ({"input_ids": [1, 2], "start": 0}, "start=0"),
        ({"input_ids": [1, 2, 3], "start": 2, "targets": [[1], [2]]}, "targets=2 lists: the text has 1 places from 2"),
    ],
)
def test_places_that_the_text_lacks_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreRequest(**arguments)


def test_a_target_outside_the_vocabulary_is_refused(engine: ForkedServer) -> None:
    with pytest.raises(EngineRejected, match="out-of-vocabulary token id 99999"):
        scored(engine, ScoreRequest([5, 6, 7], targets=[[99999], [1]]))
    assert len(scored(engine, ScoreRequest([5, 6, 7])).log_probs) == 2


def test_the_likeliest_tokens_of_what_is_sampled_have_their_ids(engine: ForkedServer, model: Any) -> None:
    request = GenerateRequest(TEXT, 12, SamplingConfig(n=1, temperature=0.7), seed=4, top_log_probs=3)
    answer = on_client(engine, lambda client: client.generate(request))
    rows = (all_log_probs(model, [*TEXT, *answer.output_ids])[len(TEXT) - 1 : -1] / 0.7).log_softmax(-1)
    top = rows.topk(3)
    assert answer.top_ids == top.indices.tolist()
    assert (torch.tensor(answer.top_log_probs) - top.values).abs().max() < 5e-5


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(engine: ForkedServer) -> None:
    def request(seed: int) -> GenerateRequest:
        return GenerateRequest(TEXT, 16, SamplingConfig(n=1, temperature=1.0), seed=seed)

    async def scenario(client: SGLangClient) -> Any:
        alone = await client.generate(request(1))
        others = await asyncio.gather(*(client.generate(request(seed)) for seed in (1, 2, 3)))
        return alone, others

    alone, others = on_client(engine, scenario)
    assert alone.output_ids == others[0].output_ids and alone.log_probs == others[0].log_probs
    assert len({tuple(answer.output_ids) for answer in others}) == 3


def test_what_stops_an_answer_is_its_last_token(engine: ForkedServer, model: Any, tokenizer: Any) -> None:
    greedy = SamplingConfig(n=1, temperature=0.0)
    end = tokenizer.eos_token_id
    free = StopConditions(end_of_sequence=False)
    whole = on_client(engine, lambda client: client.generate(GenerateRequest(TEXT, 40, greedy, free)))
    assert whole.finish_reason == "length" and len(whole.output_ids) == 40
    place = next(place for place, token in enumerate(whole.output_ids) if place and token != end)
    token = whole.output_ids[place]
    stop = StopConditions((token,), end_of_sequence=False)
    stopped = on_client(engine, lambda client: client.generate(GenerateRequest(TEXT, 40, greedy, stop)))
    first = whole.output_ids.index(token)
    assert stopped.output_ids == whole.output_ids[: first + 1]
    assert (stopped.finish_reason, stopped.matched_stop) == ("stop", token)


@pytest.mark.slow
def test_the_models_own_end_stops_only_where_it_may(engine: ForkedServer, tokenizer: Any) -> None:
    """Sampled hot, the end comes up sooner or later."""
    hot = SamplingConfig(n=1, temperature=4.0)

    async def scenario(client: SGLangClient) -> Any:
        stops = [StopConditions(end_of_sequence=may) for may in (True, False)]
        return [await client.generate(GenerateRequest(TEXT, 1500, hot, stop, seed=2)) for stop in stops]

    ended, went_on = on_client(engine, scenario)
    end = tokenizer.eos_token_id
    assert ended.finish_reason == "stop" and ended.output_ids.index(end) == len(ended.output_ids) - 1
    assert went_on.finish_reason == "length" and went_on.output_ids[: len(ended.output_ids)] == ended.output_ids
