"""The learner's policy is the distribution that rollouts are sampled from: temperature, top_p, top_k, min_p."""

import pytest
import torch

from megatron_retool.config import SamplingConfig
from megatron_retool.learner.log_probs import log_probs_and_entropy
from megatron_retool.parity.ranks import run_ranks
from tests.algorithms.sampled_distribution import sampling_log_probs

ROWS, HIDDEN, VOCABULARY, PADDED = 40, 8, 29, 32
SETTINGS = [
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=0.7, top_p=0.8),
    SamplingConfig(top_k=5),
    SamplingConfig(temperature=1.3, top_p=0.95, top_k=12, min_p=0.05),
]


def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    return hidden, weight, generator


def sampled_targets(logits, sampling, generator):
    return torch.multinomial(sampling_log_probs(logits, sampling).exp(), 1, generator=generator).squeeze(1)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_values_and_gradients_are_those_of_the_sampled_distribution(sampling):
    hidden, weight, generator = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight[:VOCABULARY].t()
    targets = sampled_targets(logits.detach(), sampling, generator)
    log_mu = sampling_log_probs(logits, sampling)
    log_probs = log_mu.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_mu.exp() * log_mu.masked_fill(log_mu.isneginf(), 0.0)).sum(1)
    expected = torch.autograd.grad((2 * log_probs + entropy).sum(), (hidden, weight))

    found_log_probs, found_entropy = log_probs_and_entropy(
        hidden, weight, targets, vocab_size=VOCABULARY, sampling=sampling, chunk_tokens=7
    )
    torch.testing.assert_close(found_log_probs, log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found_entropy, entropy, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad((2 * found_log_probs + found_entropy).sum(), (hidden, weight))
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, atol=1e-4, rtol=1e-4)


def test_a_sampled_token_is_never_filtered_out():
    """Where the engine's last digits let a token in at the edge, its ratio is finite and near one."""
    hidden = torch.tensor([[1.0, 0.0]])
    weight = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    log_probs, entropy = log_probs_and_entropy(
        hidden, weight, torch.tensor([1]), vocab_size=3, sampling=SamplingConfig(top_k=1)
    )
    torch.testing.assert_close(log_probs, torch.tensor([2.0, 1.0]).log_softmax(0)[1:])
    assert torch.isfinite(entropy).all()


def on_two_ranks():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    hidden, weight, generator = inputs()
    logits = hidden @ weight[:VOCABULARY].t()
    rank, half = dist.get_rank(), PADDED // 2
    answers = []
    for sampling in SETTINGS:
        targets = sampled_targets(logits, sampling, generator)
        split = log_probs_and_entropy(
            hidden, weight[rank * half : (rank + 1) * half], targets,
            vocab_size=VOCABULARY, sampling=sampling, group=dist.group.WORLD, chunk_tokens=16,
        )  # fmt: skip
        whole = log_probs_and_entropy(hidden, weight, targets, vocab_size=VOCABULARY, sampling=sampling)
        answers.append((torch.stack(split), torch.stack(whole)))
    return answers


def test_a_split_vocabulary_gives_the_same(tmp_path):
    for split, whole in run_ranks(on_two_ranks, 2, tmp_path):
        torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)
