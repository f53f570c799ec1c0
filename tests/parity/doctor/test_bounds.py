"""Bounds let rounding through, and no wrong number: one weight that is another is beyond each of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_retool.cluster.log_prob_check import as_batch, fixed_text
from megatron_retool.parity.doctor import engine_steps, kernel_steps, model
from megatron_retool.parity.doctor.learner_steps import BF16, BF16_STATES, FP4, FP8, FP32, TF32, compare
from megatron_retool.parity.doctor.outcome import StepFailed
from megatron_retool.parity.doctor.session import DoctorSession


@pytest.fixture(scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(one_thread):
    return model.compute(model.build(model.DENSE), model.mini_batch(), model.DENSE)


def held(found, reference, bounds) -> list[bool]:
    return [figure.holds for figure in compare("dense", measured(found), reference, bounds)]


def measured(found) -> dict:
    """As a learner finds it: its loss follows from its log-probs."""
    batch = model.mini_batch()
    weighted = batch.columns["loss_weights"] * batch.columns["advantages"]
    return found | {"loss": found.get("measured_loss", float(-weighted.sum()))}


def test_one_tensor_of_other_weights_is_beyond_every_bound(reference):
    wrong = model.build(model.DENSE)
    with torch.no_grad():
        parameter = dict(wrong.named_parameters())["model.layers.2.self_attn.v_proj.weight"]
        parameter.copy_(parameter.flip(0))
    found = model.compute(wrong, model.mini_batch(), model.DENSE)
    for bounds in (FP32, TF32, BF16, BF16_STATES, FP8):
        assert not all(held(found, reference, bounds)), bounds


def test_one_gradient_that_was_not_summed_is_beyond_every_bound(reference):
    gradients = dict(reference["gradients"])
    gradients["model.layers.1.mlp.down_proj.weight"] = gradients["model.layers.1.mlp.down_proj.weight"] / 4
    for bounds in (FP32, TF32, BF16, BF16_STATES, FP8):
        log_probs, loss, _, worst = held(reference | {"gradients": gradients}, reference, bounds)
        assert (log_probs, loss, worst) == (True, True, False)


def test_gradients_that_are_not_there_are_beyond_the_widest_bound(reference):
    missing = {name: torch.zeros_like(gradient) for name, gradient in reference["gradients"].items()}
    assert held(reference | {"gradients": missing}, reference, FP4) == [True, True, False, True]


def test_no_number_is_within_no_bound(reference):
    log_probs = reference["log_probs"].copy()
    log_probs[model.mini_batch().loss_mask.argmax()] = math.nan
    gradients = dict(reference["gradients"])
    gradients["model.norm.weight"] = torch.full_like(gradients["model.norm.weight"], math.nan)
    found = reference | {"log_probs": log_probs, "gradients": gradients, "measured_loss": math.nan}
    assert held(found, reference, FP8) == [False] * 4
    assert held(found, reference, FP4) == [False, False, False, True]  # its worst tensor has no bound
    assert all(held(reference, reference, FP32))


def test_a_kernel_that_is_wrong_or_raises_does_not_hold():
    found = kernel_steps.Comparison("cpu")
    expected = torch.linspace(-2, 2, 64)
    wrong = expected.clone()
    wrong[3] += 0.1
    found.check("right", lambda: expected.bfloat16(), lambda: expected, kernel_steps.BF16)
    found.check("wrong", lambda: wrong, lambda: expected, kernel_steps.BF16)
    found.check("raises", lambda: torch.ones(2) @ torch.ones(3), lambda: expected, kernel_steps.BF16)
    assert [figure.holds for figure in found.figures] == [True, False, False]
    assert "RuntimeError" in str(found.figures[2].value)


def test_plain_attention_sees_its_own_sequence_alone():
    found = kernel_steps.Comparison("cpu")
    query, key, value = kernel_steps.packed_heads(found, torch.float32)
    before = kernel_steps.packed_attention(query, key, value)
    edges = kernel_steps.boundaries()
    value[edges[1] : edges[1] + 1] += 1
    after = kernel_steps.packed_attention(query, key, value)
    changed = (before != after).any(-1).any(-1)
    assert not changed[: edges[1]].any() and changed[edges[1] : edges[2]].all() and not changed[edges[2] :].any()


def test_an_engine_of_other_weights_fails_with_the_diagnosis(reference, monkeypatch, tmp_path):
    """Of the whole text, scored by the learner's model and by one with another tensor."""
    session = DoctorSession(tmp_path, gpus=0)
    right, wrong = model.build(model.DENSE), model.build(model.DENSE)
    with torch.no_grad():
        wrong.model.layers[1].self_attn.o_proj.weight.mul_(0.5)
    right.config.save_pretrained(model.model_directory(session, model.DENSE))
    config = engine_steps.engine_config(session, model.DENSE)
    learner = ModelLearner(right)
    text = as_batch(fixed_text(engine_steps.ByteTokenizer(), model.VOCABULARY, engine_steps.TEXT_TOKENS))

    def served(engine):
        monkeypatch.setattr(engine_steps, "ask", lambda url, question: ModelLearner(engine).score(text))
        return engine_steps.score_figures(config, learner, "http://engine")

    assert served(right)[0].holds and served(right)[0].at_most == 0.005
    with pytest.raises(StepFailed, match="All of the text is concerned"):
        served(wrong)


class ModelLearner:
    def __init__(self, hf_model) -> None:
        self.model = hf_model

    def score(self, batch):
        ids = torch.from_numpy(np.concatenate([batch.prompt_ids, batch.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_probs = self.model(ids[None]).logits[0, :-1].log_softmax(-1)
        return log_probs.gather(-1, ids[1:, None])[:, 0].numpy()

    def log_probs(self, batch, *, sampling):
        return {"log_probs": self.score(batch)}
