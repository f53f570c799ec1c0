"""What is wrong is said in the protocol's form, with the field's name: never a 500, which clients would repeat."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_retool.config import TinkerConfig
from megatron_retool.tinker.messages import MESSAGES
from megatron_retool.tinker.wire import tensor_message
from tests.tinker.served import NAME, served

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed (pyproject.toml, extra test)")
from tinker import types  # noqa: E402

from tests.tinker.test_public_client import connected, lesson, new_run, policy_lesson  # noqa: E402

IDS = list(range(40, 52))
COUNT = len(IDS) - 1


@pytest.fixture(scope="module")
def server(model_directory: Path, tmp_path_factory: pytest.TempPathFactory):
    with served(model_directory, tmp_path_factory.mktemp("kept"), TinkerConfig(max_runs=64)) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    client = connected(server)
    yield client
    client.close("success").result()


def answered(url: str, body=None, headers=None, method=None) -> tuple[int, dict]:
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, raw, {"X-API-Key": "tml-local", **(headers or {})}, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=30) as found:
            return found.status, json.loads(found.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def datum(**inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(IDS[:-1]), loss_fn_inputs=inputs)


@pytest.mark.parametrize(
    ("data", "loss_fn", "config", "message"),
    [
        (lesson(IDS), "hinge", None, r"loss_fn='hinge': there is no such loss: this server has cross_entropy, "),
        (lesson(IDS), "stable_reinforce", None, "set loss_fn=importance_sampling .* tinker.stable_reinforce=stand_in"),
        (lesson(IDS), "ppo", None, r"data\[0\].loss_fn_inputs\['weights'\]: loss_fn=ppo has no such input, it takes "),
        (datum(target_tokens=IDS[1:]), "ppo", None, r"loss_fn_inputs\['logprobs'\]: is missing: loss_fn=ppo needs it"),
        (datum(weights=[1.0]), "cross_entropy", None, r"loss_fn_inputs\['target_tokens'\]: is missing"),
        (datum(target_tokens=IDS), "cross_entropy", None, r"targets: has shape \[12\] for 11 tokens"),
        (datum(target_tokens=[999] * COUNT), "cross_entropy", None, "999 is no token of the model, .* ids 0 to 319"),
        (
            datum(target_tokens=IDS[1:], weights=[1.0]),
            "cross_entropy",
            None,
            r"\['weights'\]: has shape \[1\]: give it that of target_tokens, \[11\]",
        ),
        (
            policy_lesson(IDS, [float("nan")] * COUNT, [1.0] * COUNT),
            "ppo",
            None,
            r"\['logprobs'\]: holds a number that",
        ),
        (
            policy_lesson(IDS, [0.0] * COUNT, [1.0] * COUNT),
            "ppo",
            {"beta": 1.0},
            r"loss_fn_config\['beta'\]: loss_fn=ppo",
        ),
        (policy_lesson(IDS, [0.0] * COUNT, [1.0] * COUNT), "dro", {"beta": "x"}, r"loss_fn_config\['beta'\]: is 'x'"),
        (lesson([7] * 600), "cross_entropy", None, r"data\[0\].model_input: has 599 tokens: .* at most 512"),
    ],
)
def test_a_wrong_datum_is_an_error_of_the_user_and_the_run_goes_on(client, data, loss_fn, config, message):
    run = new_run(client)
    with pytest.raises(tinker.RequestFailedError, match=message) as raised:
        run.forward_backward([data], loss_fn, config).result()
    assert raised.value.category.value == "user"
    next_run = new_run(client)
    assert next_run.forward([lesson(IDS)], "cross_entropy").result().metrics["loss:sum"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_model": "org/other"}, "base_model: 'org/other' is not served: this server has Qwen/Qwen3-8B"),
        ({"rank": 9}, "lora_config.rank: 9 is above the server's 8"),
        ({"train_mlp": False}, "lora_config.train_mlp: expected true"),
        ({"user_metadata": {"a": "b" * 5000}}, "user_metadata: expected values of at most 4096 characters"),
    ],
)
def test_a_run_that_cannot_be_is_refused_at_once(client, options, message):
    with pytest.raises(tinker.BadRequestError, match=message):
        client.create_lora_training_client(**{"base_model": NAME, "rank": 4, **options}).result()


@pytest.mark.parametrize(
    ("params", "more", "message"),
    [
        ({"max_tokens": 600}, {}, "sampling_params.max_tokens: 12 tokens .* exceed the context window of 512"),
        ({"temperature": -1.0}, {}, "sampling_params.temperature: expected a number from 0 to 100"),
        ({"stop": [400]}, {}, "sampling_params.stop: 400 is no token of the model"),
        ({"max_tokens": 1}, {"num_samples": 2000}, "num_samples: expected at most 1024, got 2000"),
        ({"max_tokens": 1}, {"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported here"),
        ({"max_tokens": 1}, {"topk_prompt_logprobs": 101}, "topk_prompt_logprobs: expected at most 100"),
    ],
)
def test_a_sample_that_cannot_be_is_refused_at_once(client, params, more, message):
    sampler = client.create_sampling_client(base_model=NAME).result()
    options = {"num_samples": 1, **more}
    with pytest.raises(tinker.BadRequestError, match=message):
        sampler.sample(
            types.ModelInput.from_ints(IDS), sampling_params=types.SamplingParams(**params), **options
        ).result()


def test_an_error_of_the_sampler_is_told_to_the_user(client):
    sampler = client.create_sampling_client(base_model=NAME).result()
    with pytest.raises(tinker.RequestFailedError, match="sampling_params.top_k: this sampler has none"):
        sampler.sample(types.ModelInput.from_ints(IDS), 1, types.SamplingParams(max_tokens=1, top_k=3)).result()


def test_an_error_of_the_learner_is_the_servers(client, server):
    run = new_run(client)
    run.get_info()
    server.trainer.broken = RuntimeError("out of memory")
    with pytest.raises(tinker.RequestFailedError, match="RuntimeError: out of memory") as raised:
        run.forward_backward([lesson(IDS)], "cross_entropy").result()
    assert raised.value.category.value == "server"


def test_a_training_checkpoint_is_no_sampler_and_the_other_way_round(client):
    run = new_run(client)
    state, weights = run.save_state("a").result().path, run.save_weights_for_sampler("b").result().path
    with pytest.raises(
        tinker.BadRequestError, match="cannot be sampled: take a checkpoint of save_weights_for_sampler"
    ):
        client.create_sampling_client(model_path=state).result()
    with pytest.raises(tinker.BadRequestError, match="is no training checkpoint: take one of save_state"):
        client.create_training_client_from_state(weights).result()


def test_keys_hosts_and_bodies(server):
    url = f"{server.url}/api/v1/create_session"
    assert answered(url, {}, {"X-API-Key": "sk-1"})[0] == 401
    status, body = answered(url, {}, {"Host": "evil.example"})
    assert (status, "evil.example" in body["detail"]) == (403, True)
    assert answered(url, {}, {"Origin": "http://evil.example"})[0] == 403
    assert answered(url, b"{")[1]["detail"].startswith("body: no JSON")
    assert answered(url, b"[]") == (400, {"detail": "body: expected an object"})
    assert answered(url, b"[" + b"0," * 5_000_000 + b"0]")[1]["detail"] == "body: it has more than 4000000 values"
    assert answered(f"{server.url}/api/v1/nothing", {})[0] == 404
    assert answered(f"{server.url}/api/v1/healthz", {}, method="POST")[0] == 405
    large = answered(url, b"x", {"Content-Length": str(1 << 30)})
    assert (large[0], large[1]["detail"]) == (413, "the body has more than 32 MiB")
    assert answered(f"{server.url}/files/token/adapter_config.json", headers={"X-API-Key": ""})[0] == 404


def test_a_key_that_is_set_must_be_shown(model_directory, tmp_path):
    with served(model_directory, tmp_path, TinkerConfig(api_key="tml-secret")) as found:
        url = f"{found.url}/api/v1/healthz"
        assert answered(url)[0] == 401
        assert answered(url, headers={"X-API-Key": "tml-secret"}) == (200, {"status": "ok"})
        # Whoever shows the key may call the machine as it likes.
        assert answered(url, headers={"X-API-Key": "tml-secret", "Host": "gpu.example"})[0] == 200


def test_a_forward_backward_that_is_none(server):
    url = f"{server.url}/api/v1/forward_backward"
    protobuf = {"Content-Type": "application/x-protobuf"}
    assert answered(url, b"\xff" * 9, protobuf)[1]["detail"].startswith("body: no ForwardBackwardRequest of protobuf")
    assert answered(url, b"", protobuf) == (400, {"detail": "model_id: it is missing"})
    assert answered(url, {}, {"Content-Type": "application/json"})[0] == 400
    unknown = MESSAGES["ForwardBackwardRequest"](model_id="x", seq_id=1).SerializeToString()
    assert answered(url, unknown, protobuf)[0] == 404
    negative = MESSAGES["ForwardBackwardRequest"](model_id="x", seq_id=-1).SerializeToString()
    assert answered(url, negative, protobuf) == (400, {"detail": "seq_id: expected a number from 1 on, got -1"})


def test_a_wrong_call_keeps_its_place(server, client):
    """Those after it would wait for it for ever."""
    run = new_run(client)
    model_id = run.model_id
    url = f"{server.url}/api/v1"
    wrong = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": "fast"}}
    status, first = answered(f"{url}/optim_step", wrong)
    assert status == 200
    request = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=2, loss_fn="cross_entropy")
    added = request.data.add()
    added.model_input.add().text.tokens = np.array(IDS, np.int32).tobytes()
    added.loss_fn_inputs["target_tokens"].CopyFrom(tensor_message(np.array(IDS)))
    protobuf = {"Content-Type": "application/x-protobuf"}
    assert answered(f"{url}/forward_backward", request.SerializeToString(), protobuf)[0] == 200
    _, third = answered(f"{url}/optim_step", {"model_id": model_id, "seq_id": 3, "adam_params": {}})
    failed = answered(f"{url}/retrieve_future", {"request_id": first["request_id"]})
    message = "adam_params.learning_rate: expected a number, got 'fast'"
    assert failed == (200, {"error": message, "category": "user"})
    status, done = answered(f"{url}/retrieve_future", {"request_id": third["request_id"]})
    assert (status, done["type"]) == (200, "optim_step")


def test_a_retry_is_answered_alike_and_done_once(server, client):
    run = new_run(client)
    model_id = run.model_id
    url = f"{server.url}/api/v1"
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
    answers = [answered(f"{url}/optim_step", body) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    results = [answered(f"{url}/retrieve_future", {"request_id": answers[0][1]["request_id"]}) for _ in range(2)]
    assert results[0] == results[1]
    assert [call for call in server.trainer.calls if call == ("apply", model_id)] == [("apply", model_id)]
    key = {"X-Idempotency-Key": "once"}
    sessions = [answered(f"{url}/create_session", {}, key)[1]["session_id"] for _ in range(2)]
    assert sessions[0] == sessions[1]
    copied = {"source_path": new_run(client).save_state("kept").result().path, "destination_project_id": "mine"}
    key = {"X-Idempotency-Key": "one copy"}
    copies = [answered(f"{url}/copy_weights", copied, key) for _ in range(2)]
    assert copies[0] == copies[1]
    assert copies[0] != answered(f"{url}/copy_weights", copied, {"X-Idempotency-Key": "another"})


def test_a_copy_that_cannot_be_is_refused(server, client):
    run = new_run(client)
    path = run.save_state("kept").result().path
    session = client.holder.get_session_id()
    taken = int(run.model_id.rpartition(":")[2])
    for body, status, said in (
        ({}, 400, "source_path"),
        ({"source_path": path + "2"}, 404, "there is no checkpoint"),
        ({"source_path": path, "ttl_seconds": 5}, 400, "ttl_seconds"),
        ({"source_path": path, "session_id": session}, 400, "model_seq_id"),
        ({"source_path": path, "session_id": "none", "model_seq_id": 9}, 404, "session_id: there is no such session"),
        ({"source_path": path, "session_id": session, "model_seq_id": taken}, 400, f"the run {run.model_id} exists"),
    ):
        found, answer = answered(f"{server.url}/api/v1/copy_weights", body)
        assert (found, said in str(answer)) == (status, True), (body, answer)


def test_an_unknown_request_is_gone(server):
    status, body = answered(f"{server.url}/api/v1/retrieve_future", {"request_id": "x"})
    assert (status, "server was restarted" in body["detail"]) == (410, True)


def test_a_cancelled_sample_ends(server, client):
    import asyncio
    import time

    sampler = client.create_sampling_client(base_model=NAME).result()
    url = f"{server.url}/api/v1"
    server.sampler.held = server.call(asyncio.Event)
    try:
        body = {
            "sampling_session_id": sampler._sampling_session_id,
            "seq_id": 77,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS}]},
            "sampling_params": {"max_tokens": 1},
        }
        _, promise = answered(f"{url}/asample", body)
        assert len(promise["sample_sequence_ids"]) == 1
        waited = answered(f"{url}/retrieve_future", {"request_id": promise["request_id"]})
        assert (waited[0], waited[1]["type"]) == (408, "try_again")
        assert answered(f"{url}/cancel_future", {"request_id": promise["request_id"]})[0] == 204
        deadline = time.monotonic() + 10
        while not server.sampler.cancelled and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.sampler.cancelled == 1
    finally:
        server.sampler.held = None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "session_id",
    "model_id",
    "model_seq_id",
    "seq_id",
    "base_model",
    "lora_config",
    "path",
    "optimizer",
    "adam_params",
    "sampling_session_id",
    "prompt",
    "sampling_params",
    "num_samples",
    "tags",
    "user_metadata",
    "request_id",
    "ttl_seconds",
    "kind",
    "tinker_path",
    "model_path",
    "target_prompt_logprobs",
    "sampling_session_seq_id",
    "age_encryption_recipients",
    "allow_metadata_only",
    "optimizer_config",
    "source_path",
    "destination_project_id",
]
ROUTES = [
    "create_session",
    "create_model",
    "get_info",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "load_weights",
    "copy_weights",
    "create_sampling_session",
    "asample",
    "retrieve_future",
    "cancel_future",
    "weights_info",
    "session_heartbeat",
    "telemetry",
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    route=st.sampled_from(ROUTES),
    body=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8),
    known=st.booleans(),
)
def test_no_json_makes_the_server_fail(server, client, route, body, known):
    if known:
        run = getattr(client, "fuzzed", None) or new_run(client).result()
        client.fuzzed = run
        session = client.holder.get_session_id()
        body |= {"model_id": run.model_id, "session_id": session, "base_model": NAME}
        if route == "create_model":
            body["lora_config"] = body.get("lora_config", {"rank": 10**6})  # never one that is made
            if isinstance(body["lora_config"], dict):
                body["lora_config"]["rank"] = 10**6
    status, _ = answered(f"{server.url}/api/v1/{route}", body)
    assert status < 500
