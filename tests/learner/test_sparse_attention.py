"""Sparse attention against transformers' modules and plain formulas; tests/parity has models and layouts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from conversion.model.attention_config import IndexerSizes, LatentSizes
from conversion.model.layout import ParallelLayout
from megatron_retool.config import Config, LearnerConfig, OptimizerConfig
from megatron_retool.learner import cpu
from megatron_retool.learner.attention import LocalPackedSequences, RotaryTable
from megatron_retool.learner.attention_pieces import Bucket
from megatron_retool.parity.admission.shrink import shrunk
from megatron_retool.parity.admission.tiny_model import random_batch, random_model, save_model
from megatron_retool.planning.memory import checkpoint_bytes
from megatron_retool.planning.models import MODELS

HIDDEN, HEADS, TOP_K, ROTATED = 32, 4, 5, 8
LENGTHS = (11, 7, 3)
NAMES = {
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
    "core_attention.indexer.linear_wq_b": "indexer.wq_b",
    "core_attention.indexer.linear_wk": "indexer.wk",
    "core_attention.indexer.k_norm": "indexer.k_norm",
    "core_attention.indexer.linear_weights_proj": "indexer.weights_proj",
}


def transformers_attention(family: str) -> tuple[Any, Any]:
    from transformers import AutoConfig
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

    config = AutoConfig.for_model(
        family, num_hidden_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        q_lora_rank=24, kv_lora_rank=20, qk_rope_head_dim=ROTATED, qk_nope_head_dim=16, v_head_dim=12,
        rms_norm_eps=1e-6, index_n_heads=16, index_head_dim=12, index_topk=TOP_K,
    )  # fmt: skip
    config._attn_implementation = "eager"
    if family == "glm_moe_dsa":
        return glm.GlmMoeDsaAttention(config, 0), glm.GlmMoeDsaRotaryEmbedding(config)
    return deepseek.DeepseekV32Attention(config, 0), deepseek.DeepseekV32RotaryEmbedding(config)


def own_attention(layer: int = 1, *, interleaved: bool = False, top_k: int = TOP_K, **more: Any) -> Any:
    cpu.install()
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.latent_attention import LatentAttention

    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    config = TransformerConfig(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, kv_channels=24, use_cpu_initialization=True
    )
    options: dict[str, Any] = {"indexer": IndexerSizes(16, 12, top_k, interleaved), **more}
    return LatentAttention(config, layer, LatentSizes(24, 20, 12), rotated=ROTATED, **options)


def packed(table: RotaryTable, lengths: tuple[int, ...] = LENGTHS) -> LocalPackedSequences:
    """Each text by itself in a bucket of its own."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    cos, sin = table.at(positions, max(lengths), torch.float32)
    buckets = tuple(Bucket(length, 1, length, None, None) for length in lengths)
    return LocalPackedSequences(buckets=buckets, cos=cos, sin=sin)


def fill(module: Any, seed: int = 0) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.2)


def plain_choice(query: Tensor, key: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """bool [L, L]: equation 1 of arXiv:2512.02556, query by query; of equal scores the earlier key's is larger."""
    chosen = torch.zeros(len(query), len(key), dtype=torch.bool)
    for t in range(len(query)):
        scores = [sum(float(w * (q @ key[s]).clamp(min=0)) for w, q in zip(weights[t], query[t], strict=True))
                  for s in range(t + 1)]  # fmt: skip
        best = sorted(range(t + 1), key=lambda s: (-scores[s], s))[:top_k]
        chosen[t, best] = True
    return chosen


def test_the_choice_is_the_papers() -> None:
    from megatron_retool.learner import sparse_attention

    torch.manual_seed(1)
    query, key, weights = torch.randn(2, 9, 3, 4), torch.randn(2, 9, 4), torch.randn(2, 9, 3)
    query[0, 6], key[1, 2:5] = -10 * key[0, :7].mean(0), key[1, 2]  # scores that are 0, or equal
    positions = torch.arange(9)[None]
    found = sparse_attention.largest(query, key, weights, positions, 3)
    for text in range(2):
        expected = plain_choice(query[text].double(), key[text].double(), weights[text].double(), 3)
        assert torch.equal(found[text], expected)
    assert found.sum(-1).tolist() == 2 * [[1, 2, 3, 3, 3, 3, 3, 3, 3]]


def test_the_choice_does_not_depend_on_how_many_scores_there_are_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_retool.learner import sparse_attention

    torch.manual_seed(2)
    query, key, weights = torch.randn(2, 9, 3, 4), torch.randn(2, 9, 4), torch.randn(2, 9, 3)
    whole = sparse_attention.largest(query, key, weights, torch.arange(9)[None], 4)
    part = sparse_attention.largest(query[:, 6:], key, weights[:, 6:], torch.arange(6, 9)[None], 4)
    assert torch.equal(whole[:, 6:], part)
    monkeypatch.setattr(sparse_attention, "SCORES_AT_ONCE", 100)
    assert torch.equal(sparse_attention.largest(query, key, weights, torch.arange(9)[None], 4), whole)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_it_is_transformers_text_by_text(family: str) -> None:
    theirs, rotary = transformers_attention(family)
    ours = own_attention(interleaved=family == "glm_moe_dsa")
    fill(theirs)
    weights = dict(theirs.named_parameters())
    names = {name: f"{NAMES[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}" for name, _ in ours.named_parameters()}
    assert sorted(names.values()) == sorted(weights)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(weights[names[name]])

    hidden = torch.randn(1, sum(LENGTHS), HIDDEN, requires_grad=True)
    found, _ = ours(hidden.transpose(0, 1), packed_seq_params=packed(RotaryTable(rotary.inv_freq)))
    expected = []
    for text in hidden.split(LENGTHS, 1):
        length = text.size(1)
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        expected.append(theirs(text, rotary(text, torch.arange(length)[None]), causal)[0])
    expected = torch.cat(expected, 1)
    torch.testing.assert_close(found.transpose(0, 1), expected)

    trained = [name for name, parameter in ours.named_parameters() if parameter.requires_grad]
    assert sorted(names.keys() - set(trained)) == sorted(name for name in names if ".indexer." in name)
    upstream = torch.randn_like(found.transpose(0, 1))
    gradients = torch.autograd.grad(expected, [hidden, *(weights[names[name]] for name in trained)], upstream)
    own = torch.autograd.grad(
        found.transpose(0, 1), [hidden, *(p for p in ours.parameters() if p.requires_grad)], upstream
    )
    for name, mine, other in zip(["hidden", *trained], own, gradients, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-5, name


@pytest.mark.parametrize("padded", [False, True])
def test_where_all_keys_are_chosen_it_is_dense_attention(padded: bool) -> None:
    """Outputs and gradients, to the bit: texts of up to top_k tokens, and longer ones beside them."""
    sparse, dense = own_attention(top_k=7), own_attention(indexer=None)
    fill(sparse)
    dense.load_state_dict({name: x for name, x in sparse.state_dict().items() if ".indexer." not in name})
    lengths = (7, 3) if padded else (11, 7, 3)
    table = RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03]))
    params = packed(table, lengths)
    if padded:  # both in one bucket, whose grid has four cells too many
        pad = torch.tensor([*range(10), *([0] * 4)])
        params.buckets = (Bucket(10, 2, 7, pad, torch.arange(10)),)
    hidden = torch.randn(sum(lengths), 1, HIDDEN)
    results = []
    for module in (sparse, dense):
        x = hidden.clone().requires_grad_()
        out = module(x, packed_seq_params=params)[0][-10:]  # of the two short texts
        out.square().sum().backward()
        gradients = [p.grad for name, p in module.named_parameters() if ".indexer." not in name]
        results.append([out.detach(), x.grad, *gradients])
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    assert all(p.grad is None for name, p in sparse.named_parameters() if ".indexer." in name)


def test_a_layer_without_an_indexer_sees_the_keys_of_the_layer_before_it() -> None:
    first, second = own_attention(shared_choices=(1,)), own_attention(2, shared_choices=(1,))
    assert second.core_attention.indexer is None
    params = packed(RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03])))
    hidden = torch.randn(sum(LENGTHS), 1, HIDDEN)
    first(hidden, packed_seq_params=params)
    (chosen, *_) = params.key_choices[1]
    assert chosen is not None and int(chosen.sum(-1).max()) == TOP_K

    # Only the keys of the first layer's choice change what the second one says of the last token of a text.
    before = second(hidden, packed_seq_params=params)[0]
    for position in range(LENGTHS[0] - 1):
        changed = hidden.clone()
        changed[position] += 1.0
        after = second(changed, packed_seq_params=params)[0]
        last = LENGTHS[0] - 1
        assert torch.equal(before[last], after[last]) != bool(chosen[0, last, position]), position


def test_a_choice_that_nobody_shares_is_not_kept() -> None:
    module, params = own_attention(), packed(RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03])))
    module(torch.randn(sum(LENGTHS), 1, HIDDEN), packed_seq_params=params)
    assert params.key_choices == {}


def test_the_backward_pass_keeps_a_mask_of_the_pairs_as_the_planner_says() -> None:
    """And nothing else beside dense attention: neither scores nor anything of the indexer."""
    length, sizes = 64, []
    for indexer in (IndexerSizes(16, 12, TOP_K), None):
        module, storages = own_attention(indexer=indexer), dict[int, int]()

        def note(tensor: Tensor, kept: dict[int, int] = storages) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        params = packed(RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03])), (length,))
        hidden = torch.randn(length, 1, HIDDEN, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = module(hidden, packed_seq_params=params)
        sizes.append(sum(storages.values()))
        del out
    assert sizes[0] - sizes[1] == length * length * 4


def test_tokens_of_another_text_change_nothing() -> None:
    module = own_attention()
    params = packed(RotaryTable(torch.tensor([1.0, 0.3, 0.1, 0.03])))
    hidden = torch.randn(sum(LENGTHS), 1, HIDDEN)
    bounds = list(itertools.accumulate(LENGTHS, initial=0))
    before = module(hidden, packed_seq_params=params)[0]
    for start, end in itertools.pairwise(bounds):
        changed = torch.randn_like(hidden)
        changed[start:end] = hidden[start:end]
        assert torch.equal(module(changed, packed_seq_params=params)[0][start:end], before[start:end])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_leaves_an_indexer_as_it_is(tmp_path: Path, optimizer: str) -> None:
    """Weights, which would decay, and a checkpoint, which would have an optimizer's state of them; in bfloat16."""
    cpu.install()
    from megatron_retool.learner.learner import Learner

    hf_config = shrunk(MODELS["glm-5"], 2)
    hf_dir = save_model(random_model(hf_config), tmp_path / "hf", hf_config)
    settings = LearnerConfig(
        dtype="bfloat16", max_tokens_per_micro_batch=112, use_distributed_optimizer=optimizer == "adamw"
    )
    given = OptimizerConfig(name=optimizer, lr=1e-2, weight_decay=0.5)
    learner = Learner(Config(learner=settings), optimizer=given, total_optimizer_steps=9, hf_dir=hf_dir)

    def exported() -> dict[str, Tensor]:
        return {name: tensor.clone() for bucket in learner.export_weights() for name, tensor in bucket}

    before = exported()
    learner.sft_update(random_batch([(5, 30), (9, 3), (4, 22)]))
    kept = {name for name, tensor in exported().items() if torch.equal(tensor, before[name])}
    indexers = {name for name in before if ".indexer." in name}
    assert len(indexers) == 10 and kept == indexers | {name for name in before if "e_score_correction" in name}

    learner.save(tmp_path / "checkpoint")
    stored = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    tensors = {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}
    assert not [name for name in tensors if ".indexer." in name and name.startswith("optimizer")]
    buffers = sum(4 * entry.size.numel() for name, entry in tensors.items() if name.endswith("expert_bias"))
    written = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors.values())
    assert written - buffers == checkpoint_bytes(learner.architecture, optimizer=optimizer)
