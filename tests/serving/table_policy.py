"""A small model that calls the code interpreter in half of its turns, and else answers."""

from __future__ import annotations

from pathlib import Path

from tests.kit.markov_policy import ANSWER, CALL, WORD, Table, build_tokenizer, save, table_model

POLICY: Table = {
    "\n": {CALL: 0.5, WORD: 0.5},
    WORD: {WORD: 0.9, ANSWER: 0.1},
    CALL: {"<|im_end|>": 1.0},
    ANSWER: {"<|im_end|>": 1.0},
}
SETTINGS = (
    "rollout.engine.backend=transformers",
    "rollout.engine.device=cpu",
    "rollout.val.top_p=1.0",
    "tools.code_interpreter.workers=1",
    "tools.code_interpreter.preimport=[]",
)


def make_model(directory: Path) -> Path:
    tokenizer = build_tokenizer()
    return save(table_model(tokenizer, POLICY), tokenizer, directory)
