"""A real Qwen2 checkpoint whose next-token distribution is a table: a policy that calls tools with known probability.

Embeddings are one-hot, attention and MLP write zero, and the output layer holds the logarithms of the table, so that
p(next | all tokens) = table[last][next]. SGLang serves it like any other model. Whole tool calls are single tokens of
the tokenizer, which makes a tool-calling policy a few lines of probabilities.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def hermes_call(code: str, name: str = "code_interpreter") -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": {"code": code}}) + "\n</tool_call>"


CALL = hermes_call("print(6*7)")
CALL_LONG = hermes_call("print('x'*900)")
CALL_UNKNOWN = hermes_call("1", name="no_such_tool")
CALL_BROKEN = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "\\d"}}\n</tool_call>'
WORD, WORDS, ANSWER = "word", "words", "\\boxed{42}"
# The closing tag lies across two tokens, and the second one goes on after it.
CODE, CODE_END = "<code>\n```python\nprint(6*7)\n```\n</co", "de>\n"
PHRASES = [CALL, CALL_LONG, CALL_UNKNOWN, CALL_BROKEN, WORD, WORDS, ANSWER, CODE, CODE_END]
VOCABULARY = 320

Table = dict[str, dict[str, float]]

# After the header of a turn ("\n"): think, call a tool in one of four ways, or answer.
TOOL_POLICY: Table = {
    "\n": {WORD: 0.3, CALL: 0.25, CALL_LONG: 0.1, CALL_UNKNOWN: 0.1, CALL_BROKEN: 0.1, ANSWER: 0.15},
    WORD: {WORD: 0.6, WORDS: 0.2, CALL: 0.1, ANSWER: 0.1},
    WORDS: {WORD: 0.7, ANSWER: 0.3},
    CALL: {"<|im_end|>": 0.9, CALL: 0.1},
    CALL_LONG: {"<|im_end|>": 1.0},
    CALL_UNKNOWN: {"<|im_end|>": 1.0},
    CALL_BROKEN: {"<|im_end|>": 1.0},
    ANSWER: {"<|im_end|>": 1.0},
}
RETOOL_POLICY: Table = {
    "\n": {WORD: 0.4, CODE: 0.4, ANSWER: 0.2},
    WORD: {WORD: 0.5, CODE: 0.5},
    CODE: {CODE_END: 1.0},
    CODE_END: {WORD: 1.0},
    ANSWER: {"<|im_end|>": 1.0},
}
ENDLESS_POLICY: Table = {"\n": {WORD: 1.0}, WORD: {WORD: 0.5, WORDS: 0.5}, WORDS: {WORD: 1.0}}


def build_tokenizer(template: str = "qwen2.5.jinja") -> PreTrainedTokenizerFast:
    """Bytes, control tokens, tool tags and the policy's phrases; no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL])
    core.add_tokens([AddedToken(token, normalized=False, special=False) for token in [*TAGS, *PHRASES]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = (TEMPLATES / template).read_text()
    return tokenizer


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def random_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = build_config(tokenizer)
    config.initializer_range = 0.08
    return Qwen2ForCausalLM(config).float().eval()


def table_model(tokenizer: PreTrainedTokenizerFast, table: Table, floor: float = 1e-9) -> Qwen2ForCausalLM:
    """The model that samples by ``table`` (texts of single tokens); other transitions have probability ``floor``."""
    model = random_model(tokenizer, seed=0)
    logits = table_logits(tokenizer, table, floor)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(VOCABULARY))
        model.model.norm.weight.fill_(1.0)
        # RMSNorm turns a one-hot vector of length H into one of height sqrt(H).
        model.lm_head.weight.copy_(logits.T / VOCABULARY**0.5)
    return model


def table_logits(tokenizer: PreTrainedTokenizerFast, table: Table, floor: float) -> torch.Tensor:
    """Log-probs [last token, next token] of ``table``, and those of ``floor`` elsewhere."""
    logits = torch.full((VOCABULARY, VOCABULARY), floor).log()
    for last, row in table.items():
        for following, probability in row.items():
            logits[single(tokenizer, last), single(tokenizer, following)] = torch.tensor(probability).log()
    return logits


def single(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 1, (text, ids)
    return ids[0]


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def named_weights(model: Qwen2ForCausalLM) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach()) for name, tensor in model.state_dict().items()]


def buckets(model: Qwen2ForCausalLM, size: int = 6) -> list[list[tuple[str, torch.Tensor]]]:
    weights = named_weights(model)
    return [weights[start : start + size] for start in range(0, len(weights), size)]
