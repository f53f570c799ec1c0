"""Layers for multi-token prediction: gradients against transformers in every kind of layout, and a policy that they
only observe."""

import importlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.hf_to_mcore import convert
from conversion.mcore_to_hf import export
from conversion.model.architecture import Architecture
from conversion.model.attention_config import normalise_latents
from megatron_retool.config import (
    Config,
    ConfigError,
    EngineConfig,
    LearnerConfig,
    ModelConfig,
    MtpConfig,
    OptimizerConfig,
    RecomputeConfig,
    RolloutConfig,
)
from megatron_retool.config.rollout import SpeculativeConfig
from megatron_retool.parity.admission.shrink import VOCAB_SIZE
from megatron_retool.parity.admission.tiny_model import random_batch, random_model
from megatron_retool.parity.batches import sequences
from megatron_retool.parity.ranks import run_ranks
from megatron_retool.parity.stored_tensors import stored_gradients
from megatron_retool.planning.memory import rank_parameters
from megatron_retool.routed_experts import RoutedExperts
from tests.kit import tiny_models
from tests.learner import test_muon

LENGTHS = [(5, 30), (9, 3), (1, 22), (13, 41), (6, 1), (2, 17)]
"""With prompts that are too short for a prediction of the first response token."""
OPTIMIZER = OptimizerConfig(lr=1e-2, clip_grad=0.5, eps=1e-6)
PREDICTORS = 2
FACTOR = 0.3
PIPELINE = {"pipeline_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[int, dict[str, Any]] = {
    1: {
        "mimo, one": {},
        "mimo, unpacked, recompute": {
            "max_tokens_per_micro_batch": 56,
            "recompute": RecomputeConfig(granularity="full"),
        },
        "glm4_moe, one": {},
        "deepseek_v3, one": {},
        "glm4_moe_lite, one": {},
        "qwen3_next, one": {},
        "qwen3_5_text, one": {},
    },
    2: {
        "mimo, context": {"context_parallel_size": 2},
        "mimo, pipeline": PIPELINE,
        "mimo, sequence": SEQUENCE,
        "glm4_moe, pipeline": PIPELINE,
        "glm4_moe, experts": {**SEQUENCE, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        "deepseek_v3, sequence": SEQUENCE,
        "qwen3_next, context": {"context_parallel_size": 2},
        "qwen3_5_text, pipeline": PIPELINE,
        "qwen3_5_moe_text, experts": {**SEQUENCE, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    },
}
BESIDE_A_PLAIN_POLICY = ("mimo, one", "mimo, context", "mimo, pipeline", "glm4_moe, one")
BEHIND, BESIDE = "model.layers.{behind}.", "mtp.layers.0."
FORMS = {
    "model.mtp_layers.{number}.": ("hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm"),
    BEHIND: ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    BESIDE: ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
}
"""Prefix of the layer's tensors in a checkpoint -> names of the norms of what is projected first and second, of the
projection, and of the last norm."""
BY_MUON = ("mimo, one", "mimo, pipeline", "glm4_moe, experts")
FAMILIES = {
    "mimo": ("qwen2", "Qwen2", "model.mtp_layers.{number}."),
    "glm4_moe": ("glm4_moe", "Glm4Moe", BEHIND),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3", BEHIND),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", BEHIND),
    "qwen3_next": ("qwen3_next", "Qwen3Next", BESIDE),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5", BESIDE),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5Moe", BESIDE),
}
"""transformers' module of the family, how names of its classes begin, and the form of the layer in a checkpoint."""
DELTA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "pad_token_id": None,
}
LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "rope_theta": 10000.0,
    "pad_token_id": None,
}


class Predictor(torch.nn.Module):
    """A layer for multi-token prediction of transformers' modules, put together as SGLang's class of the family is."""

    def __init__(self, family, config):
        super().__init__()
        module, classes, self.form = FAMILIES[family]
        modelling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        self.family, self.config = family, config
        self.layer = getattr(modelling, f"{classes}DecoderLayer")(config, 1)
        self.projection = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        norm = getattr(modelling, f"{classes}RMSNorm")
        self.first, self.second, self.last = (norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3))
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            is_norm = "norm" in name or name.split(".")[0] in ("first", "second", "last")
            # Norms are around 1, or around 0 where 1 is added to them.
            torch.nn.init.normal_(tensor, float(tensor.detach().mean()) if is_norm else 0.0, 0.15)
        normalise_latents(self)

    def forward(self, hidden, embedded, angles):
        first, second = (hidden, embedded) if self.family == "mimo" else (embedded, hidden)
        projected = self.projection(torch.cat([self.first(first), self.second(second)], -1))
        length = hidden.size(1)
        causal = torch.full((length, length), -torch.inf, dtype=hidden.dtype).triu(1)[None, None]
        output = self.layer(projected, attention_mask=causal, position_embeddings=angles)
        return self.last(output[0] if isinstance(output, tuple) else output)

    def stored(self, number, gradients=False):
        """Tensors, or gradients, by the names of a checkpoint."""
        found = {n: p.grad if gradients else p.detach() for n, p in self.named_parameters()}
        if not gradients:
            found |= dict(self.named_buffers())
        for name in [name for name in found if ".experts." in name and ".shared" not in name]:
            fused, place = found.pop(name), name.removesuffix("gate_up_proj").removesuffix("down_proj")
            for expert, matrix in enumerate(fused):
                parts = {"down_proj": matrix}
                if name.endswith("gate_up_proj"):
                    parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
                found |= {f"{place}{expert}.{part}.weight": rows.clone() for part, rows in parts.items()}
        prefix = self.form.format(number=number, behind=2 + number)
        beside = "mtp." if self.form == BESIDE else prefix
        own = dict(zip(("first", "second", "projection", "last"), FORMS[self.form], strict=True))

        def stored_name(name):
            module, _, rest = name.partition(".")
            return prefix + rest if module == "layer" else f"{beside}{own[module]}.{rest}"

        return {stored_name(name): tensor for name, tensor in found.items()}


def make_model(family, directory, predictors=PREDICTORS):
    """A tiny model in ``directory``; it and its layers for multi-token prediction in transformers."""
    predictors = 1 if FAMILIES[family][2] == BESIDE else predictors
    if family in ("deepseek_v3", "glm4_moe_lite"):
        model = random_model({**LATENT, "model_type": family})
    elif FAMILIES[family][2] == BESIDE:
        model = random_model({**DELTA, "model_type": family})
    else:
        changes = {"num_hidden_layers": 2, "tie_word_embeddings": False}
        model = tiny_models.hf_model("qwen2" if family == "mimo" else family, **changes)
    torch.manual_seed(3)
    layers = [Predictor(family, model.config) for _ in range(predictors)]
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for number, layer in enumerate(layers):
        tensors |= layer.stored(number)
        if layer.form == BEHIND:
            for copy, name in COPIES.items():
                tensors[f"model.layers.{2 + number}.{copy}"] = tensors[name].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    changes = {"model_type": family, **counts(family, predictors)}
    (directory / "config.json").write_text(json.dumps(config | changes))
    return model, layers


COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def counts(family, predictors=PREDICTORS):
    """How config.json counts the layers."""
    if family == "qwen3_next":
        return {}
    return {"mtp_num_hidden_layers": 1} if FAMILIES[family][2] == BESIDE else {"num_nextn_predict_layers": predictors}


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
            hidden = layer(hidden, embedded, tuple(part[:, : len(ids) - depth] for part in rotary))
            logits = torch.nn.functional.linear(hidden, head)[0, :-1]
            targets, wanted = ids[depth + 1 :], torch.from_numpy(learned[depth + 1 :])
            predicted[depth - 1].append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0][wanted])
            best.append((logits.argmax(-1) == targets)[wanted])
    found = [torch.cat(parts) for parts in predicted]
    (policy - FACTOR * torch.stack([part.mean() for part in found]).mean()).backward()
    gradients = stored_gradients(model)
    for number, layer in enumerate(layers):
        gradients |= layer.stored(number, gradients=True)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    for module in (model, *layers):
        module.zero_grad()
    return gradients, -float(torch.cat(found).detach().mean()), float(torch.cat(best).double().mean())


def build(world_size, settings, hf_dir, mtp, mcore_dir=None, engine=None, optimizer=OPTIMIZER):
    from megatron_retool.learner.learner import Learner

    learner = LearnerConfig(
        world_size=world_size,
        dtype="float32",
        **{"max_tokens_per_micro_batch": 112, "log_prob_chunk_tokens": 19, "mtp": mtp, **settings},
    )
    config = Config(
        model=ModelConfig(path=str(hf_dir)), rollout=RolloutConfig(engine=engine or EngineConfig()), learner=learner
    )
    return Learner(config, optimizer=optimizer, total_optimizer_steps=9, hf_dir=hf_dir, mcore_dir=mcore_dir)


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


def learn(world_size, name, directory):
    hf_dir = directory / name.partition(",")[0]
    settings, batch = LAYOUTS[world_size][name], random_batch(LENGTHS)
    found = {}
    for observes in (True, False):
        learner = build(world_size, settings, hf_dir, MtpConfig(True, FACTOR, observes))
        found[observes] = gradients_of(learner, lambda learner=learner: learner.sft_update(batch))
        found["missed"] = missed_parameters(learner)
    if settings is PIPELINE:
        learner.save(saved_beside(hf_dir))
        found["saved"] = all_weights(learner)
        engine = EngineConfig(speculative=SpeculativeConfig("EAGLE", draft_model_path=str(hf_dir)))
        drafted = build(world_size, settings, hf_dir, MtpConfig(train=True), engine=engine)
        found["synced"] = [set(exported(each)) for each in (learner, drafted)]
    if name in BY_MUON:
        found["muon"] = learn_by_muon(world_size, settings, hf_dir)
    if name == "glm4_moe, one":
        replaying = build(world_size, {"routing_replay": "old_log_probs"}, hf_dir, MtpConfig(train=True))
        rows = replaying.log_probs(batch)["routed_experts"]
        lengths = batch.total_lengths.astype(np.int64)
        chosen = replace(batch, routed_experts=RoutedExperts(rows, np.cumsum(lengths) - lengths))
        found["replayed"] = rows.shape[1], replaying.update(columns_of(chosen))
    if name in BESIDE_A_PLAIN_POLICY:
        for beside in (True, False):
            learner = build(world_size, settings, hf_dir, MtpConfig(beside))
            metrics, gradients = gradients_of(learner, lambda learner=learner: learner.update(columns_of(batch)))
            found["beside", beside] = metrics, gradients, exported(learner)
    return found


def learn_by_muon(world_size, settings, hf_dir):
    """All weights after two updates by Muon, and what its formula makes of the first ones and these gradients."""
    mtp = MtpConfig(True, FACTOR, detach_heads=False)  # one norm is clipped
    settings = {**settings, "use_distributed_optimizer": False}
    learner = build(world_size, settings, hf_dir, mtp, optimizer=test_muon.OPTIMIZER)
    weights = all_weights(learner)
    plain = test_muon.PlainMuon({n: w for n, w in weights.items() if "e_score_correction" not in n}, 0)
    for seed in (1, 2):
        _, gradients = gradients_of(learner, lambda seed=seed: learner.sft_update(random_batch(LENGTHS, seed=seed)))
        if gradients:  # on rank 0
            plain.step({name: gradients[name] for name in plain.weights})
    return all_weights(learner), plain.weights


def all_weights(learner):
    from megatron_retool.learner.weights import export_hf_weights

    buckets = export_hf_weights(learner.model_chunks, learner.architecture)
    return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


def saved_beside(hf_dir):
    return hf_dir.with_name(f"{hf_dir.name}_saved")


def learn_in_all(world_size, directory):
    return {name: learn(world_size, name, directory) for name in LAYOUTS[world_size]}


def load_in_one(hf_dir, mcore_dir):
    """Weights of the learner that goes on from the checkpoint of two pipeline stages, and of a converted model."""
    learner = build(1, {}, hf_dir, MtpConfig(train=True))
    learner.load(saved_beside(hf_dir))
    return all_weights(learner), all_weights(build(1, {}, hf_dir, MtpConfig(train=True), mcore_dir))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return directory, {family: make_model(family, directory / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def found(models, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    return {
        name: answer
        for world_size in LAYOUTS
        for name, answer in run_ranks(
            learn_in_all, world_size, directory / str(world_size), world_size, models[0]
        ).items()
    }


@pytest.fixture(scope="module")
def expected(found, models):
    batch = random_batch(LENGTHS)
    return {
        family: {observes: reference(model[0], model[1], batch, observes) for observes in (True, False)}
        for family, model in models[1].items()
    }


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
@pytest.mark.parametrize("observes", [True, False], ids=["observes", "moves the policy"])
def test_gradients_are_those_of_transformers(found, expected, layout, observes):
    metrics, gradients = found[layout][observes]
    wanted, loss, acceptance = expected[layout.partition(",")[0]][observes]
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
    assert gradients.keys() - plain_gradients.keys() == {name for name in gradients if is_predictors(name)}
    assert all(torch.equal(gradients[name], gradient) for name, gradient in plain_gradients.items())
    # An engine gets the policy alone.
    assert weights.keys() == plain_weights.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in plain_weights.items())
    assert metrics["actor/grad_norm"] == plain_metrics["actor/grad_norm"] > OPTIMIZER.clip_grad
    assert metrics["learner/mtp_loss"] == pytest.approx(expected[layout.partition(",")[0]][True][1], rel=1e-5)


@pytest.mark.parametrize("layout", BY_MUON)
def test_muon_steps_their_matrices(found, layout):
    weights, expected = found[layout]["muon"]
    moved = [name for name in expected if is_predictors(name) and weights[name].dim() == 2]
    assert len(moved) > PREDICTORS
    for name, wanted in expected.items():
        torch.testing.assert_close(
            weights[name].double(), wanted, rtol=0, atol=2e-5, msg=lambda said, n=name: f"{n}: {said}"
        )


def test_routing_replay_leaves_their_routers_alone(found):
    layers, metrics = found["glm4_moe, one"]["replayed"]
    plain = found["glm4_moe, one"]["beside", True][0]
    assert layers == 1  # of the model's two one is dense
    assert metrics["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-5)
    assert metrics["learner/mtp_loss"] == pytest.approx(plain["learner/mtp_loss"], rel=1e-5)


def is_predictors(name):
    return name.startswith(("model.mtp_layers.", "model.layers.2.", "model.layers.3.", "mtp."))


@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "qwen3_5_text"])
def test_engines_get_them_for_their_draft(found, family):
    policy, with_draft = found[f"{family}, pipeline"]["synced"]
    assert with_draft - policy == {name for name in found[f"{family}, pipeline"]["saved"] if is_predictors(name)}
    assert policy < with_draft


@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "qwen3_5_text"])
def test_a_checkpoint_carries_them_to_another_layout_and_to_hugging_face(found, models, tmp_path, family):
    hf_dir = models[0] / family
    convert(hf_dir, tmp_path / "mcore", workers=1, require_tokenizer=False)
    loaded, converted = run_ranks(load_in_one, 1, tmp_path / "ranks", hf_dir, tmp_path / "mcore")
    saved, first = found[f"{family}, pipeline"]["saved"], load_file(hf_dir / "model.safetensors")
    copies = {name for name in first if name.endswith(tuple(f".{copy}" for copy in COPIES)) and is_predictors(name)}
    assert len(copies) == (4 if family == "glm4_moe" else 0) and saved.keys() == first.keys() - copies
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert all(torch.equal(converted[name], first[name]) for name in saved)
    trained = [name for name in saved if is_predictors(name) and not name.endswith("e_score_correction_bias")]
    assert trained and not any(torch.equal(saved[name], first[name]) for name in trained)

    # What the model began with is carried along only where it was not trained.
    export(saved_beside(hf_dir), tmp_path / "hf", workers=1, require_tokenizer=False, predictors_from=hf_dir)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == first.keys() and all(torch.equal(written[name], saved[name]) for name in saved)
    for name in copies:
        source = COPIES[name.split(".", 3)[3]]
        assert torch.equal(written[name], saved[source]) and not torch.equal(written[name], first[name])
    assert json.loads((tmp_path / "hf" / "config.json").read_text()).items() >= counts(family).items()
    export(saved_beside(hf_dir), tmp_path / "without", workers=1, require_tokenizer=False, predictors=False)
    assert not any(is_predictors(name) for name in load_file(tmp_path / "without" / "model.safetensors"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share_prefixes": True}, "does not go with learner.share_prefixes=true"),
        ({"overlap_grad_reduce": True}, "does not go with learner.overlap_grad_reduce=true"),
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
    ("changes", "message"),
    [
        ({"num_nextn_predict_layers": 0}, "config.json has no layers for multi-token prediction"),
        ({"model_type": "llama"}, "of family llama are carried along and not trained"),
        (
            {**DELTA, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2},
            "2 layers for multi-token prediction of family qwen3_5_text share their projection",
        ),
        ({**DELTA, "model_type": "qwen3_next", "mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ({"tie_word_embeddings": True}, "needs learner.pipeline_model_parallel_size=1"),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 8}, "with a sliding window"),
    ],
)
def test_models_that_are_refused(models, changes, message):
    config = json.loads((models[0] / "mimo" / "config.json").read_text())
    config.pop("layer_types")
    architecture = Architecture.from_hf_config(config | changes)
    learner = LearnerConfig(world_size=2, pipeline_model_parallel_size=2, mtp=MtpConfig(train=True))
    with pytest.raises(ConfigError, match=message):
        learner.layout(architecture)
    assert replace(learner, mtp=MtpConfig()).layout(architecture).pipeline == 2
