"""A trainer and a sampler in this process: transformers and peft in float32, with losses written down once more.

They are also the reference for what learner and engines do: nothing here is shared with either.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_retool.target_sequences import RequestRefused, TokenOutputs
from megatron_retool.tinker.sampler import LikeliestTokens, SampledTokens, SampleResult
from megatron_retool.tinker.wire import MASKED

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


# While it loads, transformers replaces torch's initialisation and its own tie_weights for the whole process. Of two
# loads at a time the one that ends last puts the other's replacements back for good.
_LOADING = threading.Lock()


def load(path: Path):
    with _LOADING:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class InProcessTrainer:
    """``tinker.trainer.Trainer``.

    Attributes:
        calls: (method, run) in the order in which they were carried out.
        broken: raised by the next accumulate.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models: dict[str, PeftModel] = {}
        self._optimizers: dict[str, torch.optim.AdamW] = {}
        self.calls: list[tuple[str, str]] = []
        self.broken: Exception | None = None

    async def _do(self, method: str, run: str, work):
        self.calls.append((method, run))
        return await asyncio.to_thread(work)

    async def create_run(self, run, *, rank, alpha, seed):
        def work():
            torch.manual_seed(seed)
            config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS)
            self._models[run] = get_peft_model(load(self._path), config).eval()
            self._new_optimizer(run)

        await self._do("create_run", run, work)

    def _parameters(self, run):
        return [each for each in self._models[run].parameters() if each.requires_grad]

    def _new_optimizer(self, run):
        self._optimizers[run] = torch.optim.AdamW(self._parameters(run), lr=0.0)

    async def delete_run(self, run):
        self.calls.append(("delete_run", run))
        del self._models[run], self._optimizers[run]

    async def accumulate(self, run, sequences, loss, *, forward_only=False):
        def work():
            if self.broken is not None:
                error, self.broken = self.broken, None
                raise error
            log_probs, elements = [], []
            with torch.set_grad_enabled(not forward_only):
                for each in sequences:
                    every = self._models[run](torch.tensor(each.tokens)[None]).logits[0].float().log_softmax(-1)
                    targets = torch.tensor(each.targets)
                    own = every.gather(1, targets.reshape(len(targets), -1)).reshape(targets.shape)
                    columns = {name: torch.tensor(column) for name, column in each.columns.items()}
                    element = losses(loss.name, own, columns, loss.arguments)
                    if not forward_only:
                        element.sum().backward()
                    log_probs.append(own.detach().numpy())
                    elements.append(element.detach().numpy())
            return TokenOutputs(log_probs, elements, {"loss": float(sum(each.sum() for each in elements))})

        return await self._do("forward" if forward_only else "accumulate", run, work)

    async def apply(self, run, step):
        def work():
            parameters = self._parameters(run)
            for each in parameters:
                each.grad = torch.zeros_like(each) if each.grad is None else each.grad
            norm = torch.nn.utils.clip_grad_norm_(parameters, step.grad_clip_norm or float("inf"))
            for group in self._optimizers[run].param_groups:
                group.update(
                    lr=step.learning_rate,
                    betas=(step.beta1, step.beta2),
                    eps=step.eps,
                    weight_decay=step.weight_decay,
                )
            self._optimizers[run].step()
            self._optimizers[run].zero_grad()
            return {"grad_norm": float(norm), "lr": step.learning_rate}

        return await self._do("apply", run, work)

    async def save_run(self, run, directory, *, with_optimizer):
        def work():
            factors = {name: each.clone() for name, each in get_peft_model_state_dict(self._models[run]).items()}
            save_file(factors, directory / "factors.safetensors")
            if with_optimizer:
                torch.save(self._optimizers[run].state_dict(), directory / "optimizer.pt")

        await self._do("save_run", run, work)

    async def load_run(self, run, directory, *, with_optimizer):
        def work():
            set_peft_model_state_dict(self._models[run], load_file(directory / "factors.safetensors"))
            self._new_optimizer(run)
            self._optimizers[run].zero_grad()
            if with_optimizer:
                self._optimizers[run].load_state_dict(copy.deepcopy(torch.load(directory / "optimizer.pt")))

        await self._do("load_run", run, work)

    async def write_adapter(self, run, directory):
        await self._do("write_adapter", run, lambda: self._models[run].save_pretrained(directory))


def losses(name, p, columns, arguments):
    """The table of docs/tinker.md, an element for each target."""
    if name == "cross_entropy":
        return -columns["weights"] * p
    q, advantages = columns["rollout_log_probs"], columns["advantages"]
    ratio = (p - q).exp()
    low = columns.get("clip_low", torch.tensor(arguments.get("clip_low", 0.8)))
    high = columns.get("clip_high", torch.tensor(arguments.get("clip_high", 1.2)))
    if name == "importance_sampling":
        return -ratio * advantages
    if name == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if name == "cispo":
        return -ratio.detach().clamp(low, high) * p * advantages
    if name == "dro":
        return -(p * advantages - arguments.get("beta", 0.05) / 2 * (p - q) ** 2)
    assert name == "gspo"
    counted = columns["sequence_ratio_mask"] != 0
    ratio = ((p.detach() - q)[counted].mean() + p - p.detach()).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)


class InProcessSampler:
    """``tinker.sampler.Sampler``.

    Attributes:
        loaded: names of adapters.
        held: samples wait while it is set.
        cancelled: samples that ended so.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._models = {None: load(path)}
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._lock = threading.Lock()
        self.held: asyncio.Event | None = None
        self.cancelled = 0
        self.loads: list[str] = []

    @property
    def loaded(self) -> set[str]:
        return {name for name in self._models if name is not None}

    async def load_adapter(self, name, directory):
        assert name not in self._models
        self.loads.append(name)
        self._models[name] = await asyncio.to_thread(
            lambda: PeftModel.from_pretrained(load(self._path), directory).eval()
        )

    async def unload_adapter(self, name):
        del self._models[name]

    async def sample(self, adapter, request):
        if self.held is not None:
            try:
                await self.held.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return await asyncio.to_thread(self._sample, adapter, request)

    @torch.no_grad()
    def _sample(self, adapter, request):
        with self._lock:
            model = self._models[adapter]
            prompt = torch.tensor(request.prompt)
            found = {}
            if request.scores_prompt:
                found = scored(model(prompt[None]).logits[0].float().log_softmax(-1), request)
            drawn = [self._drawn(model, prompt, request, index) for index in range(request.samples)]
            return SampleResult(drawn, **found)

    def _drawn(self, model, prompt, request, index):
        if request.temperature and request.top_k != -1:
            raise RequestRefused("sampling_params.top_k: this sampler has none")
        generator = torch.Generator()
        if request.seed is None:
            generator.seed()
        else:
            generator.manual_seed(request.seed * 1000 + index)
        ends = {self._tokenizer.eos_token_id} if request.stop_ids is None else set(request.stop_ids)
        tokens, log_probs, tops, stopped = [], [], [], False
        while not stopped and len(tokens) < (request.max_tokens or 16):
            context = torch.cat([prompt, torch.tensor(tokens, dtype=torch.int64)])
            logits = model(context[None]).logits[0, -1].float()
            every = (logits / (request.temperature or 1.0)).log_softmax(-1)
            chosen = (
                every.argmax() if not request.temperature else torch.multinomial(every.exp(), 1, generator=generator)
            )
            tokens.append(int(chosen))
            log_probs.append(float(every[tokens[-1]]))
            tops.append(every.topk(max(request.top_sampled, 1)))
            text = self._tokenizer.decode(tokens)
            stopped = tokens[-1] in ends or any(each in text for each in request.stop_strings)
        top = None
        if request.top_sampled and tops:
            top = LikeliestTokens(
                np.stack([each[1].numpy() for each in tops]), np.stack([each[0].numpy() for each in tops])
            )
        return SampledTokens(np.array(tokens, np.int64), np.array(log_probs, np.float32), stopped, top)


def scored(every, request):
    prompt, found = torch.tensor(request.prompt), {}
    if request.prompt_log_probs:
        own = np.full(len(prompt), np.nan, np.float32)
        own[1:] = every[:-1].gather(1, prompt[1:, None])[:, 0].numpy()
        own[: request.scored_from] = np.nan
        found["prompt_log_probs"] = own
    if request.top_prompt:
        top = every[:-1].topk(request.top_prompt)
        ids = np.concatenate([np.zeros((1, request.top_prompt), np.int64), top[1].numpy()])
        values = np.concatenate([np.full((1, request.top_prompt), MASKED, np.float32), top[0].numpy()])
        values[: request.scored_from] = MASKED
        found["top_prompt"] = LikeliestTokens(ids, values)
    if request.targets is not None:
        ids = torch.tensor(request.targets)
        found["target_log_probs"] = torch.where(ids < 0, torch.nan, every[:-1].gather(1, ids.clamp_min(0))).numpy()
    return found
