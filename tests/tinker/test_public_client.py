"""Every call of the public client (SDK 0.38.0) against the server over an in-process trainer and sampler."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from megatron_retool.config import TinkerConfig
from tests.tinker.in_process import load
from tests.tinker.served import NAME, served

tinker = pytest.importorskip("tinker", reason="the client of Tinker is not installed (pyproject.toml, extra test)")
from tinker import types  # noqa: E402

STEP = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def server(model_directory: Path, tmp_path_factory: pytest.TempPathFactory):
    with served(
        model_directory, tmp_path_factory.mktemp("kept"), TinkerConfig(stable_reinforce="stand_in", max_runs=64)
    ) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    client = connected(server)
    yield client
    client.close("success").result()


@pytest.fixture(scope="module")
def tokenizer(model_directory):
    return AutoTokenizer.from_pretrained(model_directory)


@pytest.fixture(scope="module")
def ids(tokenizer) -> list[int]:
    return tokenizer.encode("What is 2 + 3? The answer is 5.")


def connected(server):
    return tinker.ServiceClient(base_url=server.url, api_key="tml-local", user_metadata={"who": "tests"})


def new_run(client, **options):
    return client.create_lora_training_client(base_model=NAME, **{"rank": 4, "seed": 1, **options})


def lesson(ids):
    """Next-token targets, each of weight 1."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def policy_lesson(ids, q, advantages, **more):
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "logprobs": q, "advantages": advantages, **more},
    )


def loss_of(result) -> float:
    return result.metrics["loss:sum"]


def taught(run, ids, steps: int, learning_rate: float = 1e-2) -> list[float]:
    losses = []
    for _ in range(steps):
        forward = run.forward_backward([lesson(ids)], "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=learning_rate))
        losses.append(loss_of(forward.result()))
    return losses


def log_probs(run, ids) -> np.ndarray:
    return np.array(run.forward([lesson(ids)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data)


def base_log_probs(model, ids) -> np.ndarray:
    with torch.no_grad():
        every = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return every[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def test_what_is_served_and_what_a_run_is(client, tokenizer):
    (first, second) = client.get_server_capabilities().supported_models
    assert (first.model_name, second.model_name, first.max_context_length) == (NAME, "local/tiny", 512)
    run = new_run(client)
    info = run.get_info()
    assert (info.model_id, info.lora_rank, info.model_data.model_name) == (run.model_id, 4, NAME)
    assert run.model_id.endswith(":train:0")
    assert run.get_tokenizer().encode("word") == tokenizer.encode("word")


def test_supervised_steps_lower_the_loss_and_start_at_the_base_model(client, ids, model_directory):
    run = new_run(client)
    reference = base_log_probs(load(model_directory), ids)
    losses = taught(run, ids, 8)
    np.testing.assert_allclose(losses[0], -reference.sum(), rtol=1e-5)
    assert losses[-1] < 0.8 * losses[0]


def test_the_outputs_of_a_call_are_those_of_its_datums(client, ids):
    run = new_run(client)
    short = ids[:5]
    found = run.forward([lesson(ids), lesson(short)], "cross_entropy").result()
    first, second = found.loss_fn_outputs
    assert (first["logprobs"].shape, second["logprobs"].shape) == ([len(ids) - 1], [4])
    np.testing.assert_allclose(first["elementwise_loss"].data, -np.array(first["logprobs"].data))
    np.testing.assert_allclose(loss_of(found), -sum(first["logprobs"].data) - sum(second["logprobs"].data), rtol=1e-5)


def test_gradients_add_up_until_the_optimizer_step_and_forward_leaves_them_alone(client, ids):
    other = ids[::-1]
    together, apart = new_run(client), new_run(client)
    together.forward_backward([lesson(ids), lesson(other)], "cross_entropy")
    apart.forward_backward([lesson(ids)], "cross_entropy")
    apart.forward([lesson(ids)], "cross_entropy")
    apart.forward_backward([lesson(other)], "cross_entropy")
    steps = [run.optim_step(STEP).result().metrics for run in (together, apart)]
    assert steps[0]["unclipped_grad_l2:mean"] == pytest.approx(steps[1]["unclipped_grad_l2:mean"], rel=1e-5)
    np.testing.assert_allclose(log_probs(together, ids), log_probs(apart, ids), atol=1e-6)


def test_parts_of_a_large_call_arrive_backwards_and_are_put_in_order(server, ids):
    """The client sends parts 2 to n of a call before part 1, and the optimizer step right after."""
    server.call(server.trainer.calls.clear)
    client = connected(server)
    client.holder._client_config = client.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    run = new_run(client)
    data = [lesson(ids[: 4 + place]) for place in range(7)]
    forward = run.forward_backward(data, "cross_entropy")
    step = run.optim_step(STEP)
    found = forward.result()
    assert [len(each["logprobs"].data) for each in found.loss_fn_outputs] == [3 + place for place in range(7)]
    step.result()
    own = [method for method, name in server.trainer.calls if name == run.model_id]
    assert own == ["create_run", *["accumulate"] * 4, "apply"]
    client.close("success").result()


POLICY = {
    "importance_sampling": (None, {}),
    "ppo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {}),
    "cispo": ({"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {}),
    "dro": ({"beta": 0.1}, {}),
    "gspo": (None, {"sequence_ratio_mask": 1.0}),
}


@pytest.mark.parametrize("loss_fn", POLICY)
def test_policy_losses_are_sums_of_their_formulas(client, ids, loss_fn):
    config, more = POLICY[loss_fn]
    run = new_run(client)
    p = log_probs(run, ids)
    q = p + np.linspace(-0.4, 0.4, len(p))
    advantages = np.linspace(-1, 1, len(p))
    columns = {name: [value] * len(p) for name, value in more.items()}
    data = [policy_lesson(ids, q.tolist(), advantages.tolist(), **columns)]
    found = run.forward_backward(data, loss_fn, config).result()
    ratio = np.exp(p - q)
    sequence = np.exp((p - q).mean())
    expected = {
        "importance_sampling": -ratio * advantages,
        "ppo": -np.minimum(ratio * advantages, ratio.clip(0.9, 1.1) * advantages),
        "cispo": -ratio.clip(0.9, 1.1) * p * advantages,
        "dro": -(p * advantages - 0.05 * (p - q) ** 2),
        "gspo": -np.minimum(sequence * advantages, np.clip(sequence, 0.8, 1.2) * advantages),
    }[loss_fn]
    assert loss_of(found) == pytest.approx(expected.sum(), rel=1e-4, abs=1e-4)
    np.testing.assert_allclose(found.loss_fn_outputs[0]["logprobs"].data, p, atol=1e-5)
    assert "elementwise_loss" not in found.loss_fn_outputs[0]
    run.optim_step(types.AdamParams(learning_rate=0.0)).result()


def test_thresholds_may_be_given_for_each_token(client, ids):
    run = new_run(client)
    p = log_probs(run, ids)
    q, count = (p - 0.5).tolist(), len(p)
    narrow = {"clip_low_threshold": [1.0] * count, "clip_high_threshold": [1.0] * count}
    found = run.forward_backward([policy_lesson(ids, q, [1.0] * count, **narrow)], "ppo").result()
    assert loss_of(found) == pytest.approx(-count, rel=1e-5)


def test_several_targets_of_a_position_have_weights_of_their_own(client, ids):
    run = new_run(client)
    count = len(ids) - 1
    targets = torch.tensor([[each, 3] for each in ids[1:]])
    both = types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": torch.tensor([[0.75, 0.25]] * count)},
    )
    found = run.forward_backward([both, lesson(ids)], "cross_entropy").result()
    wide = np.array(found.loss_fn_outputs[0]["logprobs"].data).reshape(count, 2)
    narrow = np.array(found.loss_fn_outputs[1]["logprobs"].data)
    np.testing.assert_allclose(wide[:, 0], narrow, atol=1e-6)
    expected = -(wide @ [0.75, 0.25]).sum() - narrow.sum()
    assert loss_of(found) == pytest.approx(expected, rel=1e-5)


def test_a_custom_loss_has_its_gradient(client, ids):
    """The client computes it from log-probs, and sends its gradient as weights of cross_entropy."""
    ours, plain = new_run(client), new_run(client)

    def doubled(data, found):
        loss = -2 * sum(each.sum() for each in found)
        return loss, {"mine": 1.0}

    result = ours.forward_backward_custom([lesson(ids)], doubled).result()
    assert result.metrics["mine"] == 1.0
    plain.forward_backward([lesson(ids)], "cross_entropy")
    plain.forward_backward([lesson(ids)], "cross_entropy")
    norms = [run.optim_step(STEP).result().metrics["unclipped_grad_l2:mean"] for run in (ours, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_an_optimizer_step_has_the_numbers_of_its_call(client, ids):
    run = new_run(client)
    before = log_probs(run, ids)
    run.forward_backward([lesson(ids)], "cross_entropy")
    found = run.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics
    assert found["learning_rate:mean"] == 0.0
    np.testing.assert_array_equal(log_probs(run, ids), before)
    run.forward_backward([lesson(ids)], "cross_entropy")
    run.optim_step(STEP).result()
    assert np.abs(log_probs(run, ids) - before).max() > 1e-3


def test_stable_reinforce_has_a_stand_in_where_the_server_was_told_so(client, ids):
    run = new_run(client)
    sampler = run.save_weights_and_get_sampling_client(record_stability_info=True)
    prompt = types.ModelInput.from_ints(ids[:8])
    (drawn,) = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result().sequences
    whole, own = ids[:8] + drawn.tokens[:-1], len(drawn.tokens)
    lesson_of_it = types.Datum(
        model_input=types.ModelInput.from_ints(whole),
        loss_fn_inputs={
            "target_tokens": [0] * 7 + drawn.tokens,
            "logprobs": [0.0] * 7 + drawn.logprobs,
            "advantages": [0.0] * 7 + [1.0] * own,
        },
    ).with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, length=8),
            types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=own - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=drawn.sequence_id, offset=1, length=7),
            types.SampledProvenanceSpan(sequence_id=drawn.sequence_id, length=own),
        ],
    )
    found = run.forward_backward([lesson_of_it], "stable_reinforce").result()
    # On its own samples the ratio is 1, and the loss that of REINFORCE.
    assert loss_of(found) == pytest.approx(-sum(drawn.logprobs), rel=1e-4)


def test_a_sampler_is_a_snapshot(client, ids, model_directory, server):
    run = new_run(client)
    taught(run, ids, 3)
    path = run.save_weights_for_sampler("first").result().path
    assert path == f"tinker://{run.model_id}/sampler_weights/first"
    before = log_probs(run, ids)
    sampler = client.create_sampling_client(model_path=path)
    prompt = types.ModelInput.from_ints(ids)
    np.testing.assert_allclose(sampler.compute_logprobs(prompt).result()[1:], before, atol=1e-5)
    taught(run, ids, 3)
    assert np.abs(log_probs(run, ids) - before).max() > 1e-2
    np.testing.assert_allclose(sampler.compute_logprobs(prompt).result()[1:], before, atol=1e-5)
    later = run.save_weights_and_get_sampling_client()
    np.testing.assert_allclose(later.compute_logprobs(prompt).result()[1:], log_probs(run, ids), atol=1e-5)
    base = client.create_sampling_client(base_model=NAME)
    reference = base_log_probs(load(model_directory), ids)
    np.testing.assert_allclose(base.compute_logprobs(prompt).result()[1:], reference, atol=1e-5)


def test_an_inflight_sampler_follows_its_run(client, ids):
    run = new_run(client)
    prompt = types.ModelInput.from_ints(ids)
    follower = run.save_weights_and_get_sampling_client(kind="inflight").result()
    fixed = run.save_weights_and_get_sampling_client().result()
    before = log_probs(run, ids)
    taught(run, ids, 3)
    run.save_weights_and_get_sampling_client(kind="inflight").result()
    np.testing.assert_allclose(follower.compute_logprobs(prompt).result()[1:], log_probs(run, ids), atol=1e-5)
    np.testing.assert_allclose(fixed.compute_logprobs(prompt).result()[1:], before, atol=1e-5)


def test_samples_are_many_seeded_and_stopped(client, ids, tokenizer):
    run = new_run(client)
    sampler = run.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints(ids[:8])
    seeded = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    once, again = (sampler.sample(prompt, 3, seeded).result() for _ in range(2))
    texts = [each.tokens for each in once.sequences]
    assert texts == [each.tokens for each in again.sequences]
    assert len({tuple(each) for each in texts}) == 3
    assert len({each.sequence_id for each in [*once.sequences, *again.sequences]}) == 6
    endless = types.SamplingParams(max_tokens=20, temperature=0.0, stop=[])
    (greedy,) = sampler.sample(prompt, 1, endless).result().sequences
    assert (len(greedy.tokens), greedy.stop_reason) == (20, "length")
    for stop in ([greedy.tokens[2]], tokenizer.decode(greedy.tokens[:3])[-1:]):
        params = types.SamplingParams(max_tokens=20, temperature=0.0, stop=stop)
        (stopped,) = sampler.sample(prompt, 1, params).result().sequences
        assert stopped.stop_reason == "stop"
        assert stopped.tokens == greedy.tokens[: len(stopped.tokens)]


def test_log_probs_of_prompts_and_alternatives(client, ids):
    run = new_run(client)
    sampler = run.save_weights_and_get_sampling_client()
    prompt, own = types.ModelInput.from_ints(ids), log_probs(run, ids)
    targets = torch.full((len(ids) - 1, 1), -1)
    targets[4, 0] = ids[5]
    found = sampler.sample(
        prompt,
        1,
        types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(targets),
    ).result()
    assert found.prompt_logprobs[0] is None
    np.testing.assert_allclose(found.prompt_logprobs[1:], own, atol=1e-5)
    assert found.topk_prompt_logprobs[0] is None
    assert [len(each) for each in found.topk_prompt_logprobs[1:]] == [3] * (len(ids) - 1)
    assert len(found.sequences[0].topk_logprobs[0]) == 2
    scored = found.target_prompt_logprobs.to_numpy()
    assert scored[4, 0] == pytest.approx(own[4], abs=1e-5)
    assert np.isnan(np.delete(scored, 4)).all()
    last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * (len(ids) - 2)
    np.testing.assert_allclose(last[-2:], own[-2:], atol=1e-5)


def test_a_pickled_sampler_is_the_same(client, ids):
    sampler = client.create_sampling_client(base_model=NAME)
    prompt = types.ModelInput.from_ints(ids)
    clone = pickle.loads(pickle.dumps(sampler))
    assert clone.compute_logprobs(prompt).result() == sampler.compute_logprobs(prompt).result()


def test_a_saved_state_is_continued_from_exactly(client, ids):
    run = new_run(client)
    taught(run, ids, 2)
    path = run.save_state("middle").result().path
    expected = taught(run, ids, 3)
    run.load_state_with_optimizer(path).result()
    assert taught(run, ids, 3) == expected
    twin = client.create_training_client_from_state_with_optimizer(path)
    assert twin.model_id != run.model_id
    assert taught(twin, ids, 3) == expected
    fresh = client.create_training_client_from_state(path)
    found = taught(fresh, ids, 3)
    assert found[0] == expected[0]
    assert found[1:] != expected[1:]


def test_a_copy_outlives_its_source_and_its_run_takes_no_calls(client, ids):
    rest = client.create_rest_client()
    run = new_run(client)
    taught(run, ids, 2)
    state = run.save_state("middle", user_metadata={"a": "b"}).result().path
    weights = run.save_weights_for_sampler("middle").result().path
    expected = taught(run, ids, 2)
    prompt = types.ModelInput.from_ints(ids)
    sampled = client.create_sampling_client(model_path=weights).result().compute_logprobs(prompt).result()
    copied = rest.copy_weights(state, "any project", ttl_seconds=3600).result()
    copied_weights = rest.copy_weights(weights, "any project").result()
    for path in (state, weights):
        rest.delete_checkpoint_from_tinker_path(path).result()
    assert len({state, copied, copied_weights}) == 3
    assert taught(client.create_training_client_from_state_with_optimizer(copied), ids, 2) == expected
    assert (
        client.create_sampling_client(model_path=copied_weights).result().compute_logprobs(prompt).result() == sampled
    )
    found = rest.get_training_run_by_tinker_path(copied).result()
    (kept,) = rest.list_checkpoints(found.training_run_id).result().checkpoints
    assert (kept.checkpoint_type, kept.user_metadata) == ("training", {"a": "b"})
    assert kept.expires_at is not None


def test_a_name_is_used_once_unless_it_is_to_be_overwritten(client, ids):
    run = new_run(client)
    path = run.save_state("name").result().path
    with pytest.raises(tinker.RequestFailedError, match="exists: choose another name"):
        run.save_state("name").result()
    assert run.save_state("name", overwrite=True, user_metadata={"a": "b"}).result().path == path
    (found,) = client.create_rest_client().list_checkpoints(run.model_id).result().checkpoints
    assert found.user_metadata == {"a": "b"}


def test_runs_on_one_base_model_do_not_meet(client, ids):
    alone, first, second = (new_run(client, seed=seed) for seed in (5, 5, 6))
    expected = taught(alone, ids, 3)
    found, other = [], []
    for _ in range(3):
        forwards = [run.forward_backward([lesson(ids)], "cross_entropy") for run in (first, second)]
        for run in (first, second):
            run.optim_step(STEP)
        found.append(loss_of(forwards[0].result()))
        other.append(loss_of(forwards[1].result()))
    assert found == expected
    assert other != expected


def test_runs_and_checkpoints_are_listed_published_and_deleted(client, ids):
    rest = client.create_rest_client()
    run = new_run(client)
    sampler = run.save_weights_and_get_sampling_client().result()
    state = run.save_state("kept").result().path
    named = run.save_weights_for_sampler("shown").result().path
    assert run.model_id in [each.training_run_id for each in rest.list_training_runs().result().training_runs]
    found = rest.get_training_run(run.model_id).result()
    assert (found.lora_rank, found.base_model, found.corrupted) == (4, NAME, False)
    assert (found.last_checkpoint.tinker_path, found.last_sampler_checkpoint.tinker_path) == (state, named)
    ids_found = [each.checkpoint_id for each in rest.list_checkpoints(run.model_id).result().checkpoints]
    assert ids_found == ["sampler_weights/shown", "weights/kept"]
    assert state in [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
    assert rest.get_training_run_by_tinker_path(state).result().training_run_id == run.model_id
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 4
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
    (_, kept) = rest.list_checkpoints(run.model_id).result().checkpoints
    assert kept.public
    assert kept.expires_at is not None
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, None).result()
    (_, kept) = rest.list_checkpoints(run.model_id).result().checkpoints
    assert (kept.public, kept.expires_at) == (False, None)
    session = rest.get_session(client.holder.get_session_id()).result()
    assert run.model_id in session.training_run_ids
    assert client.holder.get_session_id() in rest.list_sessions().result().sessions
    assert rest.get_sampler(sampler._sampling_session_id).result().base_model == NAME
    rest.delete_checkpoint_from_tinker_path(named).result()
    assert [each.checkpoint_id for each in rest.list_checkpoints(run.model_id).result().checkpoints] == ["weights/kept"]
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.create_sampling_client(model_path=named).result()


def test_external_weights_are_files_that_peft_loads(client, ids, model_directory, tmp_path):
    import urllib.request

    run = new_run(client)
    taught(run, ids, 2)
    path = run.save_weights_external("out").result().path
    urls = client.create_rest_client().get_external_weights_urls(path).result().urls
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(urls)
    for name, url in urls.items():
        (tmp_path / name).write_bytes(urllib.request.urlopen(url).read())
    base = load(model_directory)
    adapted = PeftModel.from_pretrained(base, tmp_path).eval()
    np.testing.assert_allclose(base_log_probs(adapted, ids), log_probs(run, ids), atol=1e-5)


def test_a_closed_client_gives_its_runs_back(server, ids):
    client = connected(server)
    run = new_run(client)
    state = run.save_state("end").result().path
    client.close("success").result()
    other = connected(server)
    resumed = other.create_training_client_from_state_with_optimizer(state)
    taught(resumed, ids, 1)  # the learner does one thing at a time, so the run is gone by now
    assert ("delete_run", run.model_id) in server.trainer.calls
    other.close("success").result()
