"""Layers for multi-token prediction: gradients against transformers in every kind of layout, and a policy that they
only observe."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.hf_to_mcore import convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from megatron_retool.admission.ranks import run_ranks
from megatron_retool.admission.tiny_model import random_batch
from megatron_retool.config import (
    Config,
    ConfigError,
    Fp8Config,
    LearnerConfig,
    ModelConfig,
    MtpConfig,
    OptimizerConfig,
    RecomputeConfig,
)
from megatron_retool.doctor.model import sequences
from megatron_retool.planning.memory import rank_parameters
from tests.learner import tiny_models

LENGTHS = [(5, 30), (9, 3), (1, 22), (13, 41), (6, 1), (2, 17)]
"""With prompts that are too short for a prediction of the first response token."""
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, eps=1e-6)
PREDICTORS = 2
FACTOR = 0.3
LAYOUTS = {
    1: {
        "one": {},
        "unpacked, recompute": {
            "max_tokens_per_micro_batch": 56,
            "recompute": RecomputeConfig(granularity="full"),
        },
    },
    2: {
        "context": {"context_parallel_size": 2},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    },
}
BESIDE_A_PLAIN_POLICY = ("one", "context", "pipeline")


def predictor(config):
    """MiMo's layer for multi-token prediction, of transformers' modules; input_proj as in SGLang's mimo_mtp.py."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

    layer = Qwen2DecoderLayer(config, 0)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        setattr(layer, name, Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps))
    layer.input_proj = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    for name, parameter in layer.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return layer


def make_model(directory):
    """A tiny MiMo in ``directory``; the model and its layers for multi-token prediction in transformers."""
    model = tiny_models.hf_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    torch.manual_seed(3)
    layers = [predictor(model.config) for _ in range(PREDICTORS)]
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for number, layer in enumerate(layers):
        tensors |= {f"model.mtp_layers.{number}.{name}": p.detach() for name, p in layer.named_parameters()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    changes = {"model_type": "mimo", "num_nextn_predict_layers": PREDICTORS}
    (directory / "config.json").write_text(json.dumps(config | changes))
    return model, layers


def reference(model, layers, batch, observes):
    """In float64: gradients by name, the mean cross-entropy of the predictions, and the share that is greedy."""
    model, layers = model.double(), [layer.double() for layer in layers]
    count = int(batch.loss_mask.sum())
    mask = np.split(batch.loss_mask, np.cumsum(batch.response_lengths)[:-1])
    policy, predicted, best = torch.zeros((), dtype=torch.float64), [[] for _ in layers], []
    for (prompt, response), own in zip(sequences(batch), mask, strict=True):
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
        learned = np.concatenate([np.zeros(len(prompt), bool), own])
        hidden = model.model(ids[None]).last_hidden_state
        log_probs = model.lm_head(hidden)[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        policy = policy - log_probs[torch.from_numpy(learned[1:])].sum() / count
        told, head = model.model.embed_tokens, model.lm_head.weight
        if observes:
            hidden, head = hidden.detach(), head.detach()
        rotary = model.model.rotary_emb(hidden, torch.arange(len(ids))[None])
        for depth, layer in enumerate(layers, 1):
            if len(ids) <= depth + 1:
                break
            embedded = told(ids[None, depth:])
            embedded = embedded.detach() if observes else embedded
            hidden = hidden[:, : len(ids) - depth]
            both = [layer.hidden_layernorm(hidden), layer.token_layernorm(embedded)]
            length = len(ids) - depth
            causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            angles = tuple(part[:, :length] for part in rotary)
            hidden = layer(layer.input_proj(torch.cat(both, -1)), attention_mask=causal, position_embeddings=angles)
            hidden = layer.final_layernorm(hidden[0] if isinstance(hidden, tuple) else hidden)
            logits = torch.nn.functional.linear(hidden, head)[0, :-1]
            targets, wanted = ids[depth + 1 :], torch.from_numpy(learned[depth + 1 :])
            predicted[depth - 1].append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0][wanted])
            best.append((logits.argmax(-1) == targets)[wanted])
    found = [torch.cat(parts) for parts in predicted]
    (policy - FACTOR * torch.stack([part.mean() for part in found]).mean()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for number, layer in enumerate(layers):
        gradients |= {f"model.mtp_layers.{number}.{name}": p.grad for name, p in layer.named_parameters()}
    for module in (model, *layers):
        module.zero_grad()
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    return gradients, -float(torch.cat(found).detach().mean()), float(torch.cat(best).double().mean())


def build(world_size, settings, hf_dir, mtp, mcore_dir=None):
    from megatron_retool.learner.learner import Learner

    learner = LearnerConfig(
        world_size=world_size,
        dtype="float32",
        **{"max_tokens_per_micro_batch": 112, "log_prob_chunk_tokens": 19, "mtp": mtp, **settings},
    )
    config = Config(model=ModelConfig(path=str(hf_dir)), learner=learner)
    return Learner(config, optimizer=OPTIMIZER, total_optimizer_steps=9, hf_dir=hf_dir, mcore_dir=mcore_dir)


def gradients_of(learner, update):
    """The update's metrics, and gradients before they are clipped."""
    from megatron_retool.learner.weights import gradients_by_hf_name

    step, gradients = learner._step, {}

    def step_after_a_look():
        named = gradients_by_hf_name(learner.model_chunks, learner.architecture)
        gradients.update({name: gradient.clone() for name, gradient in named.items()})
        return step()

    learner._step = step_after_a_look
    return update(), gradients


def columns_of(batch):
    rng = np.random.default_rng(2)
    count = batch.num_response_tokens
    return batch.with_columns(
        old_log_probs=rng.normal(-4, 0.1, count),
        advantages=rng.normal(0, 1, count),
        loss_weights=batch.loss_mask / batch.loss_mask.sum(),
    )


def missed_parameters(learner):
    """How many this rank has beside those that the planner says."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    own = sum(parameter.numel() for chunk in learner.model_chunks for parameter in chunk.parameters())
    return own - rank_parameters(learner.architecture, learner.layout, stage)


def exported(learner):
    return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}


def learn(world_size, name, hf_dir):
    settings, batch = LAYOUTS[world_size][name], random_batch(LENGTHS)
    found = {}
    for observes in (True, False):
        learner = build(world_size, settings, hf_dir, MtpConfig(True, FACTOR, observes))
        found[observes] = gradients_of(learner, lambda learner=learner: learner.sft_update(batch))
        found["missed"] = missed_parameters(learner)
    if name == "pipeline":
        learner.save(hf_dir.with_name("saved"))
        found["saved"] = all_weights(learner)
    if name in BESIDE_A_PLAIN_POLICY:
        for beside in (True, False):
            learner = build(world_size, settings, hf_dir, MtpConfig(beside))
            metrics, gradients = gradients_of(learner, lambda learner=learner: learner.update(columns_of(batch)))
            found["beside", beside] = metrics, gradients, exported(learner)
    return found


def all_weights(learner):
    from megatron_retool.learner.weights import export_hf_weights

    buckets = export_hf_weights(learner.model_chunks, learner.architecture)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def learn_in_all(world_size, hf_dir):
    return {name: learn(world_size, name, hf_dir) for name in LAYOUTS[world_size]}


def load_in_one(hf_dir, mcore_dir):
    """Weights of the learner that goes on from the checkpoint of two pipeline stages, and of a converted model."""
    learner = build(1, {}, hf_dir, MtpConfig(train=True))
    learner.load(hf_dir.with_name("saved"))
    return all_weights(learner), all_weights(build(1, {}, hf_dir, MtpConfig(train=True), mcore_dir))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mimo") / "hf"
    return directory, make_model(directory)


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    return {
        name: answer
        for world_size in LAYOUTS
        for name, answer in run_ranks(
            learn_in_all, world_size, directory / str(world_size), world_size, model[0]
        ).items()
    }


@pytest.fixture(scope="module")
def expected(found, model):
    batch = random_batch(LENGTHS)
    return {observes: reference(*model[1], batch, observes) for observes in (True, False)}


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
@pytest.mark.parametrize("observes", [True, False], ids=["observes", "moves the policy"])
def test_gradients_are_those_of_transformers(found, expected, layout, observes):
    metrics, gradients = found[layout][observes]
    wanted, loss, acceptance = expected[observes]
    assert gradients.keys() == wanted.keys()
    off = {name: float((gradients[name] - grad).abs().max() / grad.abs().max()) for name, grad in wanted.items()}
    assert max(off.values()) < 1e-5, max(off, key=off.get)
    assert metrics["learner/mtp_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["learner/mtp_acceptance"] == pytest.approx(acceptance)
    assert found[layout]["missed"] == 0


@pytest.mark.parametrize("layout", BESIDE_A_PLAIN_POLICY)
def test_an_observer_changes_no_bit_of_the_policy(found, expected, layout):
    metrics, gradients, weights = found[layout]["beside", True]
    plain_metrics, plain_gradients, plain_weights = found[layout]["beside", False]
    assert gradients.keys() - plain_gradients.keys() == {name for name in gradients if "mtp_layers" in name}
    assert all(torch.equal(gradients[name], gradient) for name, gradient in plain_gradients.items())
    # An engine gets the policy alone.
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in plain_weights.items())
    assert metrics["actor/grad_norm"] == plain_metrics["actor/grad_norm"] > OPTIMIZER.clip_grad
    assert metrics["learner/mtp_loss"] == pytest.approx(expected[True][1], rel=1e-5)


def test_a_checkpoint_carries_them_to_another_layout_and_to_hugging_face(found, model, tmp_path):
    hf_dir = model[0]
    convert(hf_dir, tmp_path / "mcore", workers=1, require_tokenizer=False)
    loaded, converted = run_ranks(load_in_one, 1, tmp_path / "ranks", hf_dir, tmp_path / "mcore")
    saved, first = found["pipeline"]["saved"], load_file(hf_dir / "model.safetensors")
    assert saved.keys() == first.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert all(torch.equal(converted[name], first[name]) for name in first)
    name = "model.mtp_layers.1.input_proj.weight"
    assert not torch.equal(saved[name], first[name])

    # What the model began with is carried along only where it was not trained.
    export(hf_dir.with_name("saved"), tmp_path / "hf", workers=1, require_tokenizer=False, predictors_from=hf_dir)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == saved.keys() and all(torch.equal(written[name], saved[name]) for name in saved)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_nextn_predict_layers"] == PREDICTORS
    export(hf_dir.with_name("saved"), tmp_path / "without", workers=1, require_tokenizer=False, predictors=False)
    assert name not in load_file(tmp_path / "without" / "model.safetensors")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"share_prefixes": True}, "does not go with learner.share_prefixes=true"),
        ({"overlap_grad_reduce": True}, "does not go with learner.overlap_grad_reduce=true"),
        ({"fp8": Fp8Config(recipe="blockwise")}, "does not go with learner.fp8.recipe=blockwise"),
        ({"cpu_offloading_num_layers": 1}, "does not go with learner.cpu_offloading_num_layers=1"),
        (
            {"recompute": RecomputeConfig("full", "uniform", 2)},
            "does not go with learner.recompute.num_layers=2",
        ),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(mtp=MtpConfig(train=True), **settings).check()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_nextn_predict_layers": 0}, "config.json has no layers for multi-token prediction"),
        ({"model_type": "llama"}, "of family llama are carried along and not trained"),
        ({"tie_word_embeddings": True}, "needs learner.pipeline_model_parallel_size=1"),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "with a sliding window"),
    ],
)
def test_models_that_are_refused(model, changes, message):
    config = json.loads((model[0] / "config.json").read_text())
    config.pop("layer_types")
    architecture = Architecture.from_hf_config(config | changes)
    learner = LearnerConfig(world_size=2, pipeline_model_parallel_size=2, mtp=MtpConfig(train=True))
    with pytest.raises(ConfigError, match=message):
        learner.layout(architecture)
    assert replace(learner, mtp=MtpConfig()).layout(architecture).pipeline == 2
