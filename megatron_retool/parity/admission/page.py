"""docs/models.md from what ``megatron-retool admit --every-family --layouts named`` wrote into docs/models.json.

python -m megatron_retool.parity.admission.page > docs/models.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_retool.installation import shipped
from megatron_retool.parity.admission.layouts import FEW, NAMED
from megatron_retool.parity.admission.outcome import AdmissionVerdict

FOUND = shipped("docs/models.json")
_SIGNS = {AdmissionVerdict.PASS: "✓", AdmissionVerdict.FAIL: "✗", AdmissionVerdict.NOT_APPLICABLE: "–"}

_HEAD = """\
# Models

A model family is admitted by one function: `megatron-retool admit HF_DIR_OR_CONFIG`. It shrinks the configuration to a
few thousand parameters in four layers of the same kinds, makes random weights with transformers, and holds the learner
against transformers in every layout: log-probs, entropy, the loss's metrics, every gradient, the gradient norm and the
weights after one update, in float32. A check fails beyond 1e-5 (entropy, and SGLang's log-probs: 2e-5); of a gradient
that is the norm of the difference, relative to its own (of a key's bias, whose gradient is what is left of a sum that
cancels, to its matrix's). A model that no family covers is refused by the name of the
part that is missing.

```bash
megatron-retool admit qwen3-8b --layouts few --without-engine
```

`--layouts few` starts up to two processes, `named`, the default, up to four, `all` also goes through every product of
the kinds of parallelism on up to four. The tests run the same function for the models below in few layouts, and for two
of them, which stand for dense models and for experts, in all that have a name, with the eight layers (`--layers 8`)
that virtual pipelines need. This page is made of its JSON file, of all models in all layouts that have a name:

```bash
megatron-retool admit --every-family --layouts named --json docs/models.json
python -m megatron_retool.parity.admission.page > docs/models.md
```

✓ passed · ✗ failed · – does not apply to the family · empty: not part of this run. Processes are gloo's on a CPU,
layers Megatron-Core's local ones.
"""

_TAIL = """\
**round trip**: to Megatron-Core, laid out for TP 2 and PP 2, and back, to the same bits. **unpacked**: one sequence in
a micro-batch, where the other layouts pack several. **saved by …**: a checkpoint of one layout loads into another, and
the converted checkpoint is loaded. **routing replay**: routers forced to given experts, and to their own choice as the
learner recorded it. **parameters, FLOPs**: the planner's counts against the built model's and torch's.
**SGLang's class** loads the weights under the names of the weight sync, and nothing of it stays unwritten. **SGLang's
engine** then computes log-probs of a batch of texts, which transformers' are held against: of prompts, of what comes
behind a cached prefix, and of tokens that are decoded one by one. It is the runner of a CPU engine in float32, with
`torch_native` attention and what this project puts in the place of kernels that need a GPU. Texts are longer than a
window; where SGLang's class knows no window (Mistral) they end within it, as a run's have to. The check does not apply
where SGLang does not serve the family on a CPU: multi-head latent attention, attention sinks,
MiniMax-M2. GPUs, bfloat16 and Transformer Engine's layers are not part of it.

In every family positions may be stretched as `linear`, `llama3` and `yarn` do, and as `longrope` does where all layers
have the same. Only some layers may have a window (`layer_types`, `max_window_layers`); common prefixes are not shared
where any layer has one.

`longrope` (Phi-3 128k, Phi-3.5-mini, Phi-4-mini) has two sets of factors: `short_factor`, and `long_factor` for texts
of more than `original_max_position_embeddings` tokens. Engines change to the long ones in the middle of a text, and
keep the keys that they have rotated by the short ones; SGLang does so for all that it computes together. No weights
have such log-probs. So every text of a run has the short factors, and a run whose `data.max_prompt_length` +
`data.max_response_length` (or `sft.stages[…].max_length`) is more than `original_max_position_embeddings` is refused.
For longer texts have all of them computed by the long factors, in config.json: `short_factor` as `long_factor`,
`original_max_position_embeddings` as `max_position_embeddings`, and in the positions' own keys `attention_factor`,
`short_mscale` and `long_mscale`, of which the refusal says the number. Learner, transformers and SGLang then compute
the same at any length. SGLang's class of Phi-3 reads `partial_rotary_factor` only outside of `rope_parameters`: where
only the latter has it, the run is refused.

Mixtures of experts may have dense layers (`mlp_only_layers`, `decoder_sparse_step`). SGLang's classes of Qwen2-MoE and
Qwen3-MoE have experts in every layer all the same: such a model is refused with them, and sampled from with
`rollout.engine.backend=transformers`. Routers' biases for the choice of experts (GLM-4.5) stay as they are pretrained,
in float32, unless `learner.moe_router_bias_update_rate` moves them.

Layers for multi-token prediction, behind the model's own (DeepSeek-V3, GLM-4.5, Qwen3.5, MiMo), are carried along as
they are: `conversion/hf_to_mcore.py` stores them beside the model's tensors (`--without-predictors` leaves them out),
and `conversion/mcore_to_hf.py` writes them again. For a learner's checkpoint it needs `--predictors-from` with the
model that training began with; a run's own export has it. Those of DeepSeek-V3, GLM-4.5, GLM-4.7-Flash, Qwen3-Next,
Qwen3.5 and MiMo can be trained ([algorithms.md](algorithms.md#multi-token-prediction)); then the learner's checkpoint
has them, and an export writes those. An export in FP8 has no such layers, and its config.json says so. That
MiniMax-M2's configuration announces some (`num_mtp_modules`) does not matter, since its checkpoints hold none. MiMo
(`model_type` `mimo`) is of the family `qwen2` otherwise.

SGLang's class of MiniMax-M2 needs a GPU. It leaves out what config.json does not ask for (`use_qk_norm`,
`use_routing_bias`) and reads only `rotary_dim`: a configuration without them, as transformers writes its defaults, is
refused with it.

Multi-head latent attention (DeepSeek-V2, V3, R1, Kimi K2) is computed in torch, as are the attention sinks and the
states below. On a GPU the linear layers around them, the norms, MLPs and experts are Transformer Engine's, with
`learner.fp8.recipe` in FP8 too; the projections down to the latents stay in the model's dtype. Tested on the emulated
device, not run on a card yet. SGLang on a CPU computes other log-probs for latent attention, so that a run with such an
engine is refused. Kimi K2's `model_type`, `kimi_k2`, is the same family, and the tests admit it beside DeepSeek-V3;
what is converted says `deepseek_v3`, which SGLang and transformers know without code from the hub; so are Moonlight,
and GLM-4.7-Flash (`glm4_moe_lite`). Weights that are published only in low precision (block FP8, and the INT4 of Kimi
K2 Thinking) are [made bfloat16 first](cluster.md#2-models-and-data), by the conversion.

Latents are normalised with `rms_norm_eps`. SGLang and vLLM do so, and so does Megatron-Core; transformers takes 1e-6
whatever config.json says, as DeepSeek's own code does, whose models declare 1e-6. Moonlight and GLM-4.7-Flash declare
1e-5. The policy is what the engine samples from, so the learner follows engines there, and wherever this project
computes with transformers (admission, `--verify`, the referee, `rollout.engine.backend=transformers`) it sets the
number in its modules. Whoever loads such a model only with transformers gets 1e-6.

DeepSeek-V3.2 (`deepseek_v32`) and GLM-5 (`glm_moe_dsa`) have sparse attention on top of latents: in each layer an
indexer scores all tokens before a query, and attention sees the `index_topk` tokens with the largest scores. A text of
up to `index_topk` tokens sees all of them: the learner computes dense attention and skips the indexer. In a longer text
it computes every pair and drops those that were not chosen. The result is exact, but takes as long as dense attention,
and each layer keeps a mask with a number for each pair until the backward pass, unless it is recomputed. Kernels that
compute only chosen pairs need a GPU, and the learner does not use them. Of equal scores the earlier token's counts as
larger. Packing, tensor, sequence, pipeline, context and expert parallelism and recomputation give the same numbers.
Shared prefixes are refused by name; so is, as for all latents, SGLang on a CPU.

The indexer is frozen. Attention uses only its choice, which has no gradient, so that the policy's gradients are those
of attention over the chosen tokens. The indexer's weights have no gradient, no weight decay and no optimizer state, and
engines and exports get them as they were loaded. Training an indexer by a loss of its own is not offered. SGLang
computes its scores in FP8 on a GPU, and the learner in float32 from activations of its own dtype: where scores are
close they choose other tokens, which shows as a mismatch of log-probs ([mismatch.md](mismatch.md)).

DeepSeek-V3.2's indexer rotates features that lie half of the rotated ones apart, GLM-5's features side by side.
transformers does so whatever config.json says; SGLang follows `indexer_rope_interleave`, which has to be true for GLM-5
and absent for DeepSeek-V3.2. In a `glm_moe_dsa` model some layers may see the tokens that the layer before them has
chosen (`indexer_types`, `index_topk_pattern` or `index_topk_freq`). They are trained too, but a pipeline stage cannot
begin with one. Layers for multi-token prediction of both families are carried along and not trained.

ERNIE-4.5's dense models (`ernie4_5`) rotate features side by side. SmolLM3 (`smollm3`) has no positions in every
fourth layer (`no_rope_layers`). SGLang has no class of its own for SmolLM3 and dots.llm1 (`dots1`), and runs
transformers' code of them; so it does for ERNIE-4.5, unless `architectures` says `Ernie4_5_ForCausalLM`. Ministral 3
(`ministral3`) multiplies queries by 1 + `llama_4_scaling_beta` log(1 + ⌊position /
`original_max_position_embeddings`⌋). OLMoE (`olmoe`) is refused with other values of `rms_norm_eps` and
`norm_topk_prob` than 1e-5 and false, which SGLang takes whatever config.json says.

DeepSeek-V2's router (`deepseek_v2`: V2, V2-Lite, Coder-V2) gives each chosen expert its softmax score times
`routed_scaling_factor`, and chooses groups of experts by their best one (`topk_method=group_limited_greedy`), or none
(`greedy`). Megatron-Core adds up several scores of a group, so the learner has a choice of its own, which routing
replay knows too; `learner.moe_router_fusion` is refused with it. `norm_topk_prob=true` is refused, since transformers
leaves it out; so is `greedy` with groups, which SGLang would choose. SGLang needs `scoring_func`, `moe_layer_freq`,
`n_group` and `topk_group` in config.json, as the published ones have them.

gpt-oss has attention sinks, biases on all matrices of attention and experts, and a clamped SwiGLU. On a GPU torch's
memory-efficient attention computes what the sinks take their share from. `learner.expert_tensor_parallel_size` above 1
is refused; common prefixes are not shared. Its published experts are MXFP4, which `conversion/hf_to_mcore.py` makes
bfloat16 and `conversion/mcore_to_hf.py` then writes as a model directory. SGLang's attention on a CPU has no sinks, so
that a run with such an engine is refused; of engines on GPUs so are `weight_sync.verify`, `weight_sync.round_to` and
FP8, which do not know experts in one tensor. Its own format of tool calls is `rollout.multi_turn.format: harmony`.

Gated delta nets, the linear attention of Qwen3-Next and Qwen3.5, are computed in torch: sequences are packed, each
begins with an empty state, and tensor parallelism splits key heads with their value heads. So does context parallelism,
within a tensor-parallel rank: the ranks exchange their tokens for heads around the state and back, so that TP x CP has
to divide the key heads. Shared prefixes are refused by name. SGLang's operators for a CPU want AMX; engines here have
others in their place, with prefixes cached (`tools/sglang_cpu_engine`). The reference of an admission computes the
delta rule token by token, in float64: transformers' own is float32 whatever the model is, and where decays are fast its
chunks lose digits (gradients of the rule off by 7e-6, the learner's by 1e-7). A tiny model begins with slower decays
than a new one of transformers, with which float32 of either is off by 4e-5.

Granite 3 (`granite`, and `granitemoe` with experts) and Granite 4 (`granitemoehybrid`) multiply embeddings, attention
scores and what layers add, and divide logits, by factors of config.json. Granite 4's h models (350M, 1B, Micro, Tiny,
Small) have Mamba-2 in most layers; the others have attention in all. Mamba-2 trains as gated delta nets do: in plain
torch, over packed sequences that each begin with an empty state. Context parallelism exchanges tokens for heads, so
that TP x CP has to divide `mamba_n_heads`; all heads share one group of vectors, and ranks take copies of them. Tensor
parallelism splits groups, as in Megatron-Core, so that Granite 4's h models, which have one, take none
(`learner.tensor_model_parallel_size: 1`): pipeline, context, expert and data parallelism are theirs. More than one
group is refused: transformers normalises all heads together there, and SGLang each group. Shared prefixes are refused
by name. SGLang's operators need a GPU; engines on a CPU have others in their place (`tools/sglang_cpu_engine`). Experts
lie in one tensor, as gpt-oss's do: `weight_sync.verify`, `weight_sync.round_to`, FP8 and `weight_sync.method=sharded`
are refused for them; `weight_sync.verify` and `weight_sync.delta` are for all h models, because SGLang keeps
-exp(A_log) in the place of A_log.

In Nemotron-H, Nemotron Nano 2 and Nemotron 3 (`nemotron_h`) a layer is only one half of a usual one: Mamba-2, attention
without positions, an MLP or experts, as `hybrid_override_pattern` says. MLPs and experts have no gate and square their
ReLU; the router is DeepSeek-V3's. Experts of Nemotron 3 Super and Ultra work on a latent vector (`moe_latent_size`);
layers for multi-token prediction of these models are carried along. A layer of the learner is a layer of config.json,
so that pipeline stages get as many layers each, and not as much work. Mamba-2 has eight groups, which tensor
parallelism splits. What Granite 4's Mamba-2 does not go with is refused here too; so are `learner.match_engine=exact`,
`weight_sync.method=sharded` with `learner.tensor_model_parallel_size` above 1, and engines in FP8 that would quantise
Mamba-2's projections. SGLang reads `mamba_n_groups` and `mamba_d_conv`, and `layers_block_type` by other words than
transformers 5 writes: where it would build another model, the run is refused with the key to set. transformers raises
Mamba-2's steps to `time_step_min`; SGLang and the learner do not, as `time_step_limit` says.

Qwen3.5 (`qwen3_5`, `qwen3_5_moe`), Qwen3-VL, Gemma 3 from 4B on, Mistral Small 3 and Ministral 3 are published with a
tower for images, which is not trained. Such a directory is refused with a command that saves only its language model
(`qwen3_5_text`, `qwen3_5_moe_text`, `qwen3`, `qwen3_moe`, `gemma3_text`, `mistral`, `ministral3`), as which SGLang
serves it too; that command leaves layers for multi-token prediction behind.
"""

_MISSING = """\
## What has no family yet

A model is refused by the names of the parts that the learner lacks, such as soft-capped logits (Gemma 2), a vision
tower or an encoder. Parts that show in no tensor are found in transformers' source of the model, which is read and
not run: keys of config.json that it reads and no family here does, and functions that no family here has. A family like
Llama takes one file: [extending.md](extending.md).
"""


def page(found: Mapping[str, Any]) -> str:
    """Markdown: a row for each check, a column for each family."""
    models: Sequence[Mapping[str, Any]] = found["models"]
    verdicts = [{check["name"]: check for check in model["checks"]} for model in models]
    rows = list(dict.fromkeys((check["kind"], check["name"]) for model in models for check in model["checks"]))
    order = {name: number for number, name in enumerate(dict.fromkeys((*NAMED[:3], *FEW, *NAMED)))}
    rows.sort(key=lambda row: (row[0] != "weights", row[0] != "layout", order.get(row[1], 0)))
    lines = [
        _HEAD,
        "| check | " + " | ".join(f"`{model['family']}`" for model in models) + " |",
        "|---|" + "---|" * len(models),
        "| as | " + " | ".join(str(model["model"]) for model in models) + " |",
    ]
    for kind, name in rows:
        if kind != "chat":
            lines.append(f"| {name} | " + " | ".join(_cell(each.get(name)) for each in verdicts) + " |")
    largest = [_largest(model) for model in models]
    lines += [
        "| largest error of a gradient | " + " | ".join(largest) + " |",
        "",
        _TAIL,
        "Found with " + ", ".join(f"{package} {number}" for package, number in found["packages"].items()) + ".",
        "",
        _MISSING,
    ]
    return "\n".join(lines)


def _cell(check: Mapping[str, Any] | None) -> str:
    return "" if check is None else _SIGNS[AdmissionVerdict(check["verdict"])]


def _largest(model: Mapping[str, Any]) -> str:
    return f"{max(check['figures'].get('gradient', 0.0) for check in model['checks']):.0e}"


if __name__ == "__main__":
    print(page(json.loads(FOUND.read_text(encoding="utf-8"))), end="")
