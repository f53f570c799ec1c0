"""log pi(token) and entropy from hidden states, without ever holding the logits of all tokens.

The plain way stores fp32 logits [tokens, vocabulary] and several temporaries of that size: 5 GB each at 8k tokens and
a vocabulary of 152k.  Here the output layer, the softmax and both reductions run chunk by chunk over tokens; the
backward pass computes each chunk's logits again.  The vocabulary may be split over tensor-parallel ranks.

With x = logits / temperature, p = softmax(x), for a token y:

    log_prob = x_y - log sum_j exp x_j            d log_prob / d x_j = [j = y] - p_j
    entropy  = - sum_j p_j log p_j                d entropy  / d x_j = - p_j (log p_j + entropy)

Beside a teacher, the divergence of the two distributions is a third number of each token (``divergence.py``).

Where rollouts are sampled with top_p, top_k or min_p, the policy is the distribution that is left of it: tokens that
the filters remove have x = -inf, and everything above holds for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_retool.algorithms.sampling import is_unfiltered, kept_of_probabilities, kept_tokens
from megatron_retool.algorithms.settings import SamplingSettings
from megatron_retool.learner.divergence import TeacherHead, divergence_of, teacher_log_probs


def head_hidden_states(
    hidden: Tensor, positions: Tensor, sequence_parallel: bool, group: dist.ProcessGroup, replicated_head: bool = False
) -> Tensor:
    """The rows of a packed hidden-state stream that the head reads, ready for ``log_probs_and_entropy``.

    Args:
        hidden: [t, 1, h]; with sequence parallelism this rank's [t / TP, 1, h].
        positions: int64 [n], rows of the whole stream.
        sequence_parallel: whether ``hidden`` is split over ``group``.
        group: the tensor-parallel group.
        replicated_head: True where every rank of ``group`` computes the same head (a value head), False where each
            holds a part of the vocabulary and its gradients have to be summed.

    Returns:
        [n, h].
    """
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=not replicated_head, group=group
        )
        return hidden.squeeze(1).index_select(0, positions)
    selected = hidden.squeeze(1).index_select(0, positions)
    return selected if replicated_head else copy_to_tensor_model_parallel_region(selected, group=group)


def log_probs_and_entropy(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
    """The first two of ``token_scores``, which has the same arguments."""
    log_probs, entropy, *_ = token_scores(*args, **settings)
    return log_probs, entropy


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None = None,
    logits_scaling: float = 1.0,
    temperature: float = 1.0,
    sampling: SamplingSettings | None = None,
    chunk_tokens: int = 1024,
    fp32_head: bool = False,
    main_grad: Tensor | None = None,
    on_main_grad: Callable[[], None] | None = None,
    teacher: TeacherHead | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """log pi(target) and the entropy of the next-token distribution, both differentiable; is the target the best token?

    Args:
        hidden: [n, h], the same on every rank of ``group``. Its gradient is this rank's part of a sum over ``group``:
            take it through ``head_hidden_states``.
        weight: [V / TP, h], this rank's rows of the output layer.
        targets: int64 [n], global token ids; or [n, K], each row read from the same logits.
        vocab_size: tokens of the vocabulary; rows beyond it are padding and get probability 0.
        group: tensor-parallel group over which the vocabulary is split; None or of size 1: not split.
        logits_scaling: what the model divides its logits by.
        temperature: logits are divided by it.
        sampling: its temperature instead, and its filters. The target is never filtered out: it was sampled, and where
            the sampler's logits differ in their last digits a token at the edge may be in on one side only.
        chunk_tokens: rows whose logits exist at one time.
        fp32_head: multiply in fp32 whatever the dtype of ``hidden`` and ``weight``.
        main_grad: where given, the weight's gradient is added to this fp32 buffer (Megatron's main gradient) and not
            returned through autograd, which would hold a second tensor of the weight's size.
        on_main_grad: called in every backward pass when that is done, since no hook of autograd tells.
        teacher: whose distribution the policy's is compared with; without ``sampling``'s filters.
        exact: log_probs are those of an engine with learner.match_engine=exact, to the bit; without TP.

    Returns:
        log_probs: float32 in the shape of ``targets``. entropy: float32 [n].
        best: bool in the shape of ``targets``, whether no token is more probable than the target.
        divergence: float32 [n], differentiable; None without a teacher.
    """
    if group is not None and group.size() == 1:
        group = None
    first = 0 if group is None else group.rank() * weight.size(0)
    settings = _Settings(
        group=group,
        first_row=first,
        padding=min(max(first + weight.size(0) - vocab_size, 0), weight.size(0)),
        inverse_scaling=1.0 / logits_scaling,
        temperature=temperature if sampling is None else sampling.temperature,
        filters=None if sampling is None or is_unfiltered(sampling) else sampling,
        chunk_tokens=chunk_tokens,
        dtype=torch.float32 if fp32_head else hidden.dtype,
        main_grad=main_grad,
        on_main_grad=on_main_grad,
        teacher=teacher,
        exact=exact,
    )
    # A weight that autograd knew and got no gradient for would run its hooks without one.
    return _ChunkedHead.apply(hidden, weight if main_grad is None else weight.detach(), targets, settings)


@dataclass(frozen=True)
class _Settings:
    group: dist.ProcessGroup | None
    first_row: int
    padding: int
    """Rows at the end of this rank's part that are vocabulary padding."""
    inverse_scaling: float
    temperature: float
    filters: SamplingSettings | None
    chunk_tokens: int
    dtype: torch.dtype
    main_grad: Tensor | None
    on_main_grad: Callable[[], None] | None
    teacher: TeacherHead | None
    exact: bool

    def chunks(self, rows: int) -> Iterator[slice]:
        for start in range(0, rows, self.chunk_tokens):
            yield slice(start, min(start + self.chunk_tokens, rows))

    def logits(self, hidden: Tensor, weight: Tensor, local: Tensor, owned: Tensor) -> Tensor:
        """float32 [rows, V / TP], divided by the temperature, -inf on padding and on what the filters remove.

        Of the targets, [rows, K], ``local`` are the rows in this part of the vocabulary, ``owned`` whether they lie in
        it.
        """
        if self.exact:
            from megatron_retool.exact import operators  # numba takes half a second, which others need not wait

            x = operators.linear(hidden, weight, dtype=torch.float32)
        else:
            x = torch.mm(hidden.to(self.dtype), weight.t()).float()
        if self.inverse_scaling != 1.0:
            x.mul_(self.inverse_scaling)  # engines multiply, too
        if self.temperature != 1.0:
            # By a tensor, as engines do: on a GPU torch would multiply by the inverse of a number.
            x.div_(x.new_full((), self.temperature))
        self._fill_padding(x, float("-inf"))
        if self.filters is not None:
            kept = self._kept(x, self.filters)
            for target, own in zip(local.split(1, -1), owned.split(1, -1), strict=True):
                kept.scatter_(-1, target, kept.gather(-1, target) | own)
            x.masked_fill_(~kept, float("-inf"))
        return x

    def exact_normalizer(self, x: Tensor) -> Tensor | None:
        """log sum exp of each row of ``x``, as an exact engine adds it up; None where none is to be matched."""
        if not self.exact:
            return None
        from megatron_retool.exact import operators

        return operators.log_normalizers(x)[1]

    def divergence(self, log_p: Tensor, take: slice, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """See ``divergence_of``, between the policy's ``log_p`` of the rows ``take`` and the teacher's."""
        assert self.teacher is not None
        log_q = teacher_log_probs(self.teacher, take, self.dtype, self.padding, self.group)
        return divergence_of(log_p, log_q, self.teacher.divergence, self.group, with_gradient=with_gradient)

    def without_infinities(self, x: Tensor) -> Tensor:
        """``x`` (in place) with 0 where ``logits`` has -inf, so that it can be multiplied by a probability of 0."""
        if self.filters is not None:
            return x.masked_fill_(x.isneginf(), 0.0)
        self._fill_padding(x, 0.0)
        return x

    def _fill_padding(self, x: Tensor, value: float) -> None:
        if self.padding:
            x[:, x.size(1) - self.padding :] = value

    def _kept(self, x: Tensor, sampling: SamplingSettings) -> Tensor:
        """bool [rows, V / TP]: this rank's part of what top_p, top_k and min_p leave of the whole vocabulary."""
        if self.exact:
            from megatron_retool.exact import operators

            return kept_of_probabilities(operators.probabilities(x), sampling)
        # The logits are divided by the temperature already.
        filters = replace(sampling, temperature=1.0)
        if self.group is None:
            return kept_tokens(x, filters)
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return kept_tokens(torch.cat(parts, -1), filters)[:, self.first_row : self.first_row + x.size(1)].contiguous()


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        n = hidden.size(0)
        # The target's row in this rank's part of the vocabulary; 0, and not owned, where it lies in another's.
        local = (targets if targets.dim() == 2 else targets.unsqueeze(-1)) - settings.first_row  # [n, K]
        owned = (local >= 0) & (local < weight.size(0))
        local = local.masked_fill(~owned, 0)
        head = weight.to(settings.dtype)
        entropy = torch.empty(n, dtype=torch.float32, device=hidden.device)
        log_probs, log_z = entropy.new_empty(local.shape), torch.empty_like(entropy)
        best = torch.empty(local.shape, dtype=torch.bool, device=hidden.device)
        divergence = None if settings.teacher is None else torch.empty_like(entropy)
        for take in settings.chunks(n):
            x = settings.logits(hidden[take], head, local[take], owned[take])
            peak = x.amax(-1)
            if settings.group is not None:
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=settings.group)
            x.sub_(peak.unsqueeze(-1))
            exact_normalizer = settings.exact_normalizer(x)
            sums = x.new_empty(2 + local.size(1), x.size(0))
            sums[2:] = x.gather(-1, local[take]).masked_fill_(~owned[take], 0.0).t()
            p = x.exp()
            torch.sum(p, -1, out=sums[0])
            scaled = x if settings.teacher is None else x.clone()
            torch.sum(p.mul_(settings.without_infinities(scaled)), -1, out=sums[1])
            if settings.group is not None:
                dist.all_reduce(sums, group=settings.group)
            normalizer = sums[0].log() if exact_normalizer is None else exact_normalizer
            log_probs[take] = (sums[2:] - normalizer).t()
            best[take] = (sums[2:] == 0).t()  # the target's logit less the largest
            entropy[take] = normalizer - sums[1] / sums[0]
            log_z[take] = normalizer + peak
            if divergence is not None:
                divergence[take], _ = settings.divergence(x.sub_(normalizer.unsqueeze(-1)), take, with_gradient=False)
        ctx.save_for_backward(hidden, weight, local, owned, log_z, entropy)
        ctx.settings = settings
        log_probs, best = log_probs.view(targets.shape), best.view(targets.shape)
        ctx.mark_non_differentiable(best)
        return log_probs, entropy, best, divergence

    @staticmethod
    def backward(
        ctx: Any,
        grad_log_probs: Tensor | None,
        grad_entropy: Tensor | None,
        _best: None,
        grad_divergence: Tensor | None,
    ) -> Any:
        hidden, weight, local, owned, log_z, entropy = ctx.saved_tensors
        settings: _Settings = ctx.settings
        needs_hidden = ctx.needs_input_grad[0]
        needs_weight = ctx.needs_input_grad[1] or settings.main_grad is not None
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(local.shape, dtype=log_z.dtype, device=log_z.device)
        grad_log_probs = grad_log_probs.view(local.shape)
        row_grad = grad_log_probs.sum(-1)
        head = weight.to(settings.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            # fp32, since bf16 cannot add up many chunks.
            grad_weight = (
                settings.main_grad
                if settings.main_grad is not None
                else torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
            )
        for take in settings.chunks(hidden.size(0)):
            log_p = settings.logits(hidden[take], head, local[take], owned[take]).sub_(log_z[take].unsqueeze(-1))
            p = log_p.exp()
            of_divergence = None
            if grad_divergence is not None:
                _, of_divergence = settings.divergence(log_p, take, with_gradient=True)
            if grad_entropy is not None:
                settings.without_infinities(log_p)
                log_p.add_(entropy[take].unsqueeze(-1)).mul_(grad_entropy[take].unsqueeze(-1))
                p.mul_(log_p.add_(row_grad[take].unsqueeze(-1))).neg_()
            else:
                p.mul_(row_grad[take].neg().unsqueeze(-1))
            del log_p
            p.scatter_add_(-1, local[take], grad_log_probs[take] * owned[take])
            if of_divergence is not None and grad_divergence is not None:
                p.add_(of_divergence.mul_(grad_divergence[take].unsqueeze(-1)))
            if settings.temperature != 1.0:
                p.div_(settings.temperature)
            if settings.inverse_scaling != 1.0:
                p.mul_(settings.inverse_scaling)
            grad_logits = p.to(settings.dtype)
            if grad_hidden is not None:
                grad_hidden[take] = torch.mm(grad_logits, head)
            if grad_weight is not None:
                inputs = hidden[take].to(settings.dtype)
                if settings.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), inputs)
                else:
                    grad_weight.add_(torch.mm(grad_logits.t(), inputs))
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype) if settings.main_grad is None else None
        if settings.on_main_grad is not None:
            settings.on_main_grad()
        return grad_hidden, grad_weight, None, None
