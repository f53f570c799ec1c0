"""The CPU engine's compiled layers, against the chains of torch's operators that SGLang has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from sglang_cpu_engine import compiled, layers, plugin

SHAPES = [(1, 128), (7, 33), (5, 3, 16), (0, 24)]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight.double()).float()


def rotated(
    x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, size: int, interleaved: bool
) -> torch.Tensor:
    """As SGLang's rotary_embedding/base.py."""
    heads = x.reshape(len(x), -1, size)
    turning, rest = heads.split([cos_sin.shape[1], size - cos_sin.shape[1]], -1)
    cos, sin = cos_sin[positions][:, None].chunk(2, -1)
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1).reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, ...]) -> None:
    x, residual, weight = drawn(*shape), 3 * drawn(*shape, 2)[..., 1], drawn(shape[-1])
    torch.testing.assert_close(layers.rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6))
    found, total = layers.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(found, normed(x + residual, weight, 1e-5))


@pytest.mark.parametrize("shape", SHAPES)
def test_activation(shape: tuple[int, ...]) -> None:
    x = 20 * drawn(*shape[:-1], 2 * shape[-1])
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(layers.silu_and_mul(x), silu(gate) * up, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("features", [12, 8])  # of 12
def test_rotary_embedding_of_rows_that_lie_apart(features: int, interleaved: bool) -> None:
    whole, cos_sin = drawn(9, 5 * 12), drawn(40, features)
    positions = torch.tensor([0, 39, 3, 3, 7, 12, 1, 20, 5])
    for x in whole.split([36, 24], -1):
        found = layers.rotate(x, cos_sin, positions, 12, interleaved)
        torch.testing.assert_close(found, rotated(x, cos_sin, positions, 12, interleaved))


def test_what_lies_in_pieces_and_no_rows_at_all() -> None:
    weight = drawn(16)
    x = drawn(16, 6).T
    torch.testing.assert_close(layers.rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6))
    torch.testing.assert_close(layers.silu_and_mul(x), silu(x[:, :8]) * x[:, 8:], rtol=1e-6, atol=1e-6)
    none = torch.empty(0, dtype=torch.int64)
    assert layers.rotate(torch.empty(0, 24), drawn(40, 8), none, 12, False).shape == (0, 24)
    assert layers.sample(torch.empty(0, 7)).shape == (0,)


def test_a_row_has_the_same_bits_whatever_is_beside_it() -> None:
    x, residual, weight = drawn(50, 100), drawn(50, 100, 1)[..., 0], drawn(100)
    normed_rows, activated = layers.add_rms_norm(x, residual, weight, 1e-6)[0], layers.silu_and_mul(x)
    for row in (0, 17, 49):
        one = slice(row, row + 1)
        assert torch.equal(normed_rows[one], layers.add_rms_norm(x[one], residual[one], weight, 1e-6)[0])
        assert torch.equal(activated[one], layers.silu_and_mul(x[one]))


def test_numbers_that_are_none_are_not_hidden() -> None:
    x, weight = drawn(3, 16), torch.ones(16)
    x[1, 2] = torch.nan
    assert layers.rms_norm(x, weight, 1e-6)[1].isnan().all()
    assert layers.add_rms_norm(x, x, weight, 1e-6)[0][1].isnan().all()
    assert layers.silu_and_mul(x)[1, 2].isnan() and layers.silu_and_mul(x)[0].isfinite().all()


def test_exp() -> None:
    x = np.concatenate([np.linspace(-87, 88, 5001), [-1e9, 1e9]]).astype(np.float32)
    found = np.array([compiled.exp(each) for each in x[:-2]])
    assert np.abs(found / np.exp(x[:-2].astype(np.float64)) - 1).max() < 3.2e-7
    assert (
        compiled.exp(x[-2]) == found[0]
        and np.isfinite(compiled.exp(x[-1]))
        and np.isnan(compiled.exp(np.float32(np.nan)))
    )


def test_tokens_are_drawn_by_their_probabilities() -> None:
    """Every one within 5 standard deviations of what is expected, rare ones and such that cannot be among them."""
    torch.manual_seed(0)
    probabilities = torch.softmax(3 * drawn(300), 0)
    probabilities[[0, 40, 299]] = 0.0
    draws = 400_000
    tokens = torch.cat([layers.sample(probabilities.expand(20_000, -1)) for _ in range(draws // 20_000)])
    assert tokens.dtype == torch.int32
    counts = torch.bincount(tokens, minlength=300).double()
    share = probabilities.double() / probabilities.double().sum()
    assert ((counts - draws * share).abs() <= 5 * (draws * share * (1 - share)).sqrt() + 1e-9).all()


def test_every_row_has_a_token_that_can_be() -> None:
    torch.manual_seed(0)
    only = torch.arange(50)
    assert torch.equal(layers.sample(torch.eye(50)).long(), only)
    assert torch.equal(layers.sample(1e-30 * torch.eye(50)).long(), only)
    two = torch.zeros(10_000, 9)
    two[:, [3, 6]] = torch.tensor([1e-8, 1.0])
    assert set(layers.sample(two).tolist()) <= {3, 6}


@pytest.mark.usefixtures("one_thread")
def test_the_engine_takes_them_where_they_are_the_same() -> None:
    """And leaves to SGLang what they are not for: other dtypes, several threads, options, seeds."""

    def original(*arguments: Any, **kwargs: Any) -> str:
        return "SGLang's"

    norm = SimpleNamespace(
        weight=drawn(16), variance_epsilon=1e-6, variance_size_override=None, override_orig_dtype=None
    )
    x = drawn(3, 16)
    assert torch.equal(plugin.rms_norm(original, norm, x), layers.rms_norm(x, norm.weight, 1e-6))
    both = plugin.rms_norm(original, norm, x, x, post_residual_addition=None)
    assert torch.equal(both[1], 2 * x)
    assert plugin.rms_norm(original, norm, x, x, x) == "SGLang's"
    assert plugin.rms_norm(original, norm, x.bfloat16()) == "SGLang's"
    assert plugin.rms_norm(original, norm, x, x.bfloat16()) == "SGLang's"
    for option in ({"variance_size_override": 8}, {"override_orig_dtype": torch.bfloat16}):
        assert plugin.rms_norm(original, SimpleNamespace(**{**vars(norm), **option}), x) == "SGLang's"

    assert torch.equal(plugin.silu_and_mul(original, None, x), layers.silu_and_mul(x))
    assert plugin.silu_and_mul(original, None, x.half()) == "SGLang's"

    rotary = SimpleNamespace(cos_sin_cache=drawn(10, 8), head_size=8, is_neox_style=True)
    positions = torch.tensor([1, 2, 3])
    query, key = plugin.rotary_embedding(original, rotary, positions, x, x[:, :8])
    torch.testing.assert_close(query, rotated(x, rotary.cos_sin_cache, positions, 8, False))
    torch.testing.assert_close(key, rotated(x[:, :8], rotary.cos_sin_cache, positions, 8, False))
    assert plugin.rotary_embedding(original, rotary, positions, x, x, offsets=positions) == "SGLang's"
    assert plugin.rotary_embedding(original, rotary, positions.int(), x, x) == "SGLang's"
    assert plugin.rotary_embedding(original, rotary, positions, x.view(3, 2, 8), x) == "SGLang's"

    probabilities = torch.full((2, 5), 0.2)
    assert plugin.sample(original, probabilities).shape == (2,)
    assert plugin.sample(original, probabilities, torch.tensor([1, 2]), positions[:2]) == "SGLang's"


def test_several_threads_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert compiled.takes(x, x) and not compiled.takes(x, x.bfloat16())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not compiled.takes(x)


def test_sglang_calls_what_the_plugin_stands_for() -> None:
    """In the places and with the arguments that the plugin knows."""
    layers = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "layers"  # type: ignore[union-attr, index]
    for file, signature in (
        ("layernorm.py", "x: torch.Tensor,\n        residual: Optional[torch.Tensor] = None,"),
        ("activation.py", "class SiluAndMul(BaseFusedOp):"),
        (
            "rotary_embedding/base.py",
            "positions: torch.Tensor,\n        query: torch.Tensor,\n        key: torch.Tensor,",
        ),
        ("sampler.py", "def sampling_from_probs_torch(\n    probs: torch.Tensor,\n    sampling_seed:"),
    ):
        assert signature in (layers / file).read_text(), file
