"""Routed experts on the wire, and which of an answer's rows are of the weights that sampled."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from conversion.model.architecture import Architecture
from megatron_retool.config import SamplingConfig
from sglang_rollout.engine.base import EngineFailed, GenerateRequest
from sglang_rollout.engine.routed_experts import RoutingShape, trusted_rows
from tests.kit import traced_rows
from tests.sglang_rollout.engine.test_client import answer, generate


def encoded(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


@pytest.mark.parametrize(("experts", "dtype"), [(255, np.uint8), (256, np.int16)])
@pytest.mark.parametrize("wire", ["own", np.int32])
def test_rows_are_read_in_the_columns_type_and_in_sglangs(experts, dtype, wire):
    rows = np.random.default_rng(0).integers(0, experts, (5, 2, 3))
    found = RoutingShape(2, 3, experts).decode(encoded(rows.astype(dtype if wire == "own" else wire)), 5)
    assert found.dtype == dtype and np.array_equal(found, rows)


def test_dense_layers_have_no_rows():
    rows = np.random.default_rng(0).integers(0, 8, (5, 4, 3)).astype(np.int32)
    rows[:, [0, 2]] = 99  # whatever an engine leaves there
    found = RoutingShape(4, 3, 8, without_experts=(0, 2)).decode(encoded(rows), 5)
    assert np.array_equal(found, rows[:, [1, 3]])


def test_an_answer_without_a_new_row():
    assert RoutingShape(2, 3, 8).decode("", 0).shape == (0, 2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            encoded(np.zeros(29, np.uint8)),
            "29 bytes of routed experts, where 5 rows of 2 layers x 3 experts are 30 bytes",
        ),
        (encoded(np.full(30, 8, np.uint8)), "from 8 to 8 of a model that has 8"),
        (encoded(np.full(30, -1, np.int32)), "from -1 to -1 of a model that has 8"),
        ("no base64!", "are no base64"),
    ],
)
def test_what_cannot_be_rows_of_this_answer_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        RoutingShape(2, 3, 8).decode(text, 5)


def test_the_shape_is_the_models():
    hf_config = {"model_type": "qwen2", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    hf_config |= {"intermediate_size": 8, "vocab_size": 8, "hidden_act": "silu"}
    with pytest.raises(ValueError, match="a dense model"):
        RoutingShape.of(Architecture.from_hf_config(hf_config))
    traced = Architecture.from_pretrained(Path(traced_rows.__file__).parent / "traced_model")
    assert RoutingShape.of(traced) == RoutingShape(traced_rows.LAYERS, traced_rows.K, traced_rows.EXPERTS)


def asked(text: str | None, reason: str = "stop", start: int | None = 1):
    """The client's answer to a request for the rows of tokens 1 to 2 of [1, 2] + [7, 8]."""

    async def behaviour(count, request):
        meta = {} if text is None else {"routed_experts": text}
        return web.json_response(answer(reason=reason, **meta))

    request = GenerateRequest([1, 2], 5, SamplingConfig(), routed_experts_start=start)
    return generate(behaviour, request=request, routing=lambda: RoutingShape(2, 3, 8))


def test_the_client_asks_for_rows_from_the_first_unknown_on():
    server, result = asked(encoded(np.ones(12, np.uint8)))
    assert server.bodies[0]["return_routed_experts"] and server.bodies[0]["routed_experts_start_len"] == 1
    assert result.routed_experts.tolist() == np.ones((2, 2, 3)).tolist()
    server, result = asked(encoded(np.ones(12, np.uint8)), start=None)
    assert "return_routed_experts" not in server.bodies[0] and result.routed_experts is None


def test_rows_that_do_not_fit_are_the_engines_failure_but_in_an_answer_that_was_cut_off():
    _, error = asked(encoded(np.ones(13, np.uint8)))
    assert isinstance(error, EngineFailed) and "12 bytes in uint8 or 48 in int32" in str(error)
    assert asked(encoded(np.ones(13, np.uint8)), "abort")[1].routed_experts is None


N = -1


@pytest.mark.parametrize(
    ("versions", "known"),
    [
        ([N, N, N, 1, 1, 1], "kkkkk"),
        ([N, N, 1, 1, 2, 2], "---kk"),  # held after two tokens: the input of the first new one is of the new weights
        ([N, 1, 2, 3, 3, 3], "--kkk"),
        ([1, 1, N, N, 2, 2], "-kkkk"),  # an earlier call's last token and tool results, read by the new weights
        ([1, 1, 2, 1, 1, 2], "-k--k"),
        ([N, 2], "k"),
        ([N], ""),
    ],
)
def test_a_row_is_of_the_weights_that_sampled_the_next_token(versions, known):
    rows = traced_rows.rows_of(range(len(versions)), 1)
    found = trusted_rows(rows, versions)
    assert "".join("-" if (row == 255).all() else "k" for row in found) == known
    assert all(np.array_equal(a, b) for a, b, kept in zip(found, rows, known, strict=True) if kept == "k")
    assert not (rows == 255).any(), "the answer itself stays as it is"


def test_rows_and_versions_must_line_up():
    with pytest.raises(ValueError, match="3 rows of routed experts up to the last of 3 tokens"):
        trusted_rows(traced_rows.rows_of(range(4), 1), [1, 1, 1])
