"""Requests in JSON: what a field may hold, and what is said where it holds something else."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_retool.target_sequences import OptimizerStep, RequestRefused
from megatron_retool.tinker import requests
from megatron_retool.tinker.requests import CheckpointPath
from megatron_retool.tinker.sample_requests import read_sample
from sglang_rollout.gateway.errors import ApiError

VOCABULARY, CONTEXT = 100, 32


def sample(**changes):
    body = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"type": "encoded_text", "tokens": [3]}]},
        "sampling_params": changes.pop("sampling_params", {}),
        **changes,
    }
    return read_sample(body, VOCABULARY, CONTEXT).request


def test_a_sample_with_nothing_but_a_prompt():
    found = sample()
    assert found.prompt.tolist() == [1, 2, 3]
    assert (found.samples, found.max_tokens, found.temperature, found.top_k, found.top_p) == (1, None, 1.0, -1, 1.0)
    assert (found.stop_ids, found.stop_strings, found.scores_prompt) == (None, (), False)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, (None, ())),
        ([], ((), ())),
        ("end", ((), ("end",))),
        (["a", "b"], ((), ("a", "b"))),
        ([5, 6], ((5, 6), ())),
    ],
)
def test_stops(stop, expected):
    found = sample(sampling_params={"stop": stop})
    assert (found.stop_ids, found.stop_strings) == expected


def test_the_last_prompt_tokens_are_scored():
    assert sample(prompt_logprobs=True, prompt_logprobs_last_n=1).scored_from == 2
    with pytest.raises(ApiError, match="prompt_logprobs_last_n: needs prompt_logprobs, and at most 2"):
        sample(prompt_logprobs=True, prompt_logprobs_last_n=3)


def test_targets_dense_and_sparse():
    dense = sample(target_prompt_logprobs={"data": [1, -1, 2, 3], "shape": [2, 2], "dtype": "int64"}).targets
    sparse = sample(
        target_prompt_logprobs={
            "data": [1, 2, 3],
            "shape": [2, 2],
            "sparse_crow_indices": [0, 1, 3],
            "sparse_col_indices": [0, 0, 1],
        }
    ).targets
    np.testing.assert_array_equal(dense, [[1, -1], [2, 3]])
    np.testing.assert_array_equal(sparse, dense)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": {"chunks": []}}, "prompt: it has no tokens"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, r"prompt.chunks\[0\].type='image' is not supported"),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, r"prompt.chunks\[0\].tokens: expected an array of token ids"),
        ({"prompt": {"chunks": [{"tokens": [100]}]}}, "100 is no token of the model, which has ids 0 to 99"),
        ({"prompt": {"chunks": [{"tokens": [1] * 32}]}}, "prompt: 32 tokens of the prompt .* context window of 32"),
        ({"seq_id": None}, "seq_id: it is missing"),
        ({"sampling_session_id": None}, "sampling_session_id: it is missing"),
        ({"sampling_params": {"top_p": 0.0}}, "sampling_params.top_p: expected a number from 1e-06 to 1"),
        ({"sampling_params": {"stop": [""]}}, "sampling_params.stop: expected texts of 1 to 1000"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [3, 1]}}, r"shape: expected \[2, K\] for a prompt of 3"),
        ({"target_prompt_logprobs": {"data": [1], "shape": [2, 1]}}, "data: expected 2 token ids, got 1"),
    ],
)
def test_what_is_wrong_with_a_sample_is_named(changes, message):
    with pytest.raises(ApiError, match=message) as raised:
        sample(**changes)
    assert raised.value.status == 400


def test_optimizer_steps():
    assert requests.read_optimizer_step({"adam_params": {}}) == OptimizerStep(1e-4)
    given = {"learning_rate": 1e-3, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "grad_clip_norm": 2}
    assert requests.read_optimizer_step({"adam_params": given}) == OptimizerStep(1e-3, 0.8, 0.9, 1e-8, 0.1, 2.0)
    assert requests.read_optimizer_step({"adam_params": {"grad_clip_norm": -1}}).grad_clip_norm == 0.0
    with pytest.raises(RequestRefused, match="adam_params.beta1=1.0: give a number below 1"):
        requests.read_optimizer_step({"adam_params": {"beta1": 1.0}})
    with pytest.raises(ApiError, match="optimizer_params.type='dimuon' is not supported here: the server has adamw"):
        requests.read_optimizer_step({"optimizer_params": {"type": "dimuon"}})


@pytest.mark.parametrize(
    "path", ["tinker://s:train:0/weights/../../x", "tinker://r/weights/.x", "http://r/weights/x", "tinker://r/other/x"]
)
def test_a_path_names_no_other_file(path):
    with pytest.raises(ApiError, match="is no path of a checkpoint"):
        requests.checkpoint_path({"path": path}, "path")


def test_paths_and_names():
    found = requests.checkpoint_path({"path": "tinker://s:train:0/weights/step-1.a"}, "path")
    assert found == CheckpointPath("s:train:0", "weights", "step-1.a")
    assert str(found) == "tinker://s:train:0/weights/step-1.a"
    for name in ("a/b", "..", "", "a" * 129, "-x"):
        with pytest.raises(ApiError, match="path: expected up to 128 letters"):
            requests.checkpoint_name({"path": name}, "path")


def test_loading_needs_one_address():
    path = "tinker://r/weights/x"
    assert requests.read_load_weights({"path": path, "model_id": "m", "seq_id": 1}).model_id == "m"
    for more in ({}, {"model_id": "m", "session_id": "s", "model_seq_id": 0}):
        with pytest.raises(ApiError, match="expected either model_id with seq_id, or session_id with model_seq_id"):
            requests.read_load_weights({"path": path, **more})
