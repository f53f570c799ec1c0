"""What is known of a text's tokens without tokenising it is true, and spares the tokenizer enormous prompts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_retool.data import prompts as prompts_module
from megatron_retool.data.chat_template import tokenize
from megatron_retool.data.files import DataError
from megatron_retool.data.prompts import PromptSource
from megatron_retool.data.token_bounds import TokenBound
from tests.data.test_prompts import TOOLBOX, data_config, verl_row, write

ALPHABET = "ab \n\u00e9e\u0301\u1f82\u1100\u1161\u11a8\u65e5\U0001f600"


def made(pre_tokenizer, normalizer=None, **added) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["ab" * 20, " " * 64, "the cat sat on the mat " * 9, "\u00e9" * 30], trainer)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens([AddedToken("<|a-rather-long-control-token|>", special=True, **added)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(behavior: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), behavior), byte_level()])


KNOWN = {
    "bytes": made(byte_level()),
    "NFC": made(byte_level(), normalizers.NFC()),
    "split": made(split("isolated"), normalizers.NFC()),
}


@settings(deadline=None)
@given(
    st.sampled_from(list(KNOWN)),
    st.lists(st.text(ALPHABET) | st.sampled_from(["ab" * 30, " " * 90, "<|a-rather-long-control-token|>"])).map(
        "".join
    ),
)
def test_no_text_has_fewer_tokens_than_the_bound(name, text):
    tokenizer = KNOWN[name]
    bound = TokenBound(tokenizer)
    assert bound.fewest(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert (bound.fewest(text) > 0) == bool(text)


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(split("removed")),
        made(pre_tokenizers.Whitespace()),
        made(byte_level(), normalizers.Strip()),
        made(byte_level(), lstrip=True),
        object(),
    ],
)
def test_nothing_is_said_of_tokenizers_that_leave_text_out(tokenizer):
    assert TokenBound(tokenizer).fewest("a" * 10_000) == 0


def test_enormous_prompts_are_overlong_without_being_tokenised(tmp_path, tokenizer, monkeypatch):
    lengths = []

    def counting(tokenizer, texts):
        lengths.extend(map(len, texts))
        return real(tokenizer, texts)

    real = tokenize
    monkeypatch.setattr(prompts_module, "tokenize", counting)
    path = write(tmp_path / "p.parquet", [verl_row("first"), verl_row("word " * 2_000_000), verl_row("last")])
    source = PromptSource(data_config(path, max_prompt_length=1000, shuffle=False), tokenizer, TOOLBOX, seed=0)
    assert max(lengths) < 10_000 and len(lengths) == 2
    assert [row.messages[0]["content"] for row in source.next_batch(2)] == ["first", "last"]
    assert (source.counts.overlong, source.counts.kept) == (1, 2)
    with pytest.raises(DataError, match=r"p.parquet, row 1, column 'prompt': at least \d+ tokens, more than data.max_"):
        PromptSource(data_config(path, max_prompt_length=1000, overlong_prompts="error"), tokenizer, TOOLBOX, seed=0)
