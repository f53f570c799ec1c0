"""A model directory of each family, as transformers writes it: sharded, with a tokenizer beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_retool.parity.admission.shrink import VOCAB_SIZE
from tests.kit.tiny_models import FAMILIES, hf_model

BLOCKS = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}
"""Sizes of which blocks of 128 x 128 fill every linear layer."""


def save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_directory(family, dtype, **config)``: made once for each combination."""
    made: dict[tuple[object, ...], Path] = {}

    def make(family: str, dtype: torch.dtype = torch.bfloat16, **config: int) -> Path:
        key = (family, dtype, *config.items())
        if key not in made:
            directory = tmp_path_factory.mktemp("models") / f"{family}-{str(dtype).removeprefix('torch.')}"
            hf_model(family, **config).to(dtype).save_pretrained(directory, max_shard_size="30KB")
            save_tokenizer(directory)
            made[key] = directory
        return made[key]

    return make


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory, read by the safetensors library."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def flip(path: Path, generator: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    position = generator.randrange(len(data))
    data[position] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
