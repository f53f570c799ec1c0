"""A run's files: peft's two, which describe the adapter, and beside them what continues its training in any layout.

    adapter_config.json, adapter_model.safetensors      for ``peft`` and engines
    adapters.json                                       of which base model it is
    optimizer.safetensors                               main parameters and Adam's moments, float32, whole

Tensors have the run's own rank. A directory is built under another name and renamed when it is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.nn import Parameter

from conversion.files.adapter_checkpoint import record_of
from conversion.files.directory import publish
from conversion.files.dist_checkpoint import DistCheckpointError
from conversion.files.peft_files import PeftFiles, factor_shapes, write_peft
from conversion.model.adapter_map import factor_mappings, peft_tensor
from conversion.model.mapping import Mapping, shard
from conversion.model.peft_config import PeftFilesError
from conversion.model.weight_map import WeightMap
from megatron_retool.config import LoraConfig
from megatron_retool.learner import data_parallel
from megatron_retool.learner.adapter_slot import AdapterSlot, padded
from megatron_retool.learner.adapters import Adapter, adapters, gather_factors, stored_factors
from megatron_retool.learner.checkpoint.state import adapter_record, optimizer_step
from megatron_retool.learner.weights import all_gather_gradient_shards, gradient_value
from megatron_retool.runs.checkpoints import SaveError
from megatron_retool.target_sequences import RequestRefused
from run_files.atomic_files import atomic_write

OPTIMIZER_NAME = "optimizer.safetensors"
_STATES = ("param", "exp_avg", "exp_avg_sq")
Tensors = dict[str, Tensor]


def write_adapter(slot: AdapterSlot, run: str, directory: str | Path) -> None:
    """Write only a run's factors, as peft's files. Every rank calls it; ``directory`` is replaced if it is there.

    Raises:
        RequestRefused: there is no such run.
        SaveError: writing failed; raised on every rank.
    """
    settings = slot.activate(run).settings
    tensors = _factors(slot, settings)
    _write(Path(directory), lambda place: _write_peft(slot, settings, tensors, place))


def save_run(slot: AdapterSlot, run: str, directory: str | Path, *, with_optimizer: bool) -> None:
    """Write what ``load_run`` continues from. What the run has accumulated since its last step is not written.

    Raises:
        RequestRefused: there is no such run.
        SaveError: writing failed; raised on every rank.
    """
    settings = slot.activate(run).settings
    record = adapter_record(slot.learner)
    assert record is not None
    tensors = _factors(slot, settings)
    states = _optimizer_states(slot, run, settings) if with_optimizer else {}
    step = optimizer_step(slot.learner.optimizer)

    def write(place: Path) -> None:
        _write_peft(slot, settings, tensors, place)
        replace(record, rank=settings.rank, alpha=settings.alpha).write(place)
        if with_optimizer:
            with atomic_write(place / OPTIMIZER_NAME) as file:
                file.write(save(states, metadata={"format": "pt", "step": str(step)}))

    _write(Path(directory), write)


def load_run(slot: AdapterSlot, run: str, directory: str | Path, *, with_optimizer: bool) -> None:
    """Give a run what ``save_run`` wrote, or an adapter that peft did; what it has accumulated is dropped.

    Args:
        with_optimizer: continue with the moments and the number of steps; without it they begin at zero.

    Raises:
        RequestRefused: there is no such run, a file cannot be read, or it is of another rank, alpha, base model or
            other targets. Raised on every rank; the run is as it was.
    """
    settings = slot.activate(run).settings
    place, record = Path(directory), adapter_record(slot.learner)
    assert record is not None

    def read() -> tuple[dict[int, list[Tensor]], list[_Held], int]:
        files = PeftFiles(place)
        _check_same(files, settings)
        stored = record_of(place)
        if stored is not None and stored.base_checksum != record.base_checksum:
            raise RequestRefused(
                f"{place} is an adapter of the model in {stored.base}, and the weights in {record.base} are others: "
                "load it into a learner of the same model"
            )
        weight_map = WeightMap(slot.learner.architecture)
        files.check(weight_map, settings.targets)
        factors = {id(adapter): stored_factors(adapter, files) for adapter in adapters(slot.learner.model_chunks)}
        held, step = _read_optimizer(slot, settings, place) if with_optimizer else ([], 0)
        return factors, held, step

    factors, held, step = _together(read)
    slot.begin(settings, lambda adapter: factors[id(adapter)])
    for each in held:
        each.put(step)
    slot.set_steps(step)


def _check_same(files: PeftFiles, settings: LoraConfig) -> None:
    for name in ("rank", "alpha"):
        theirs, own = getattr(files, name), getattr(settings, name)
        if theirs != own:
            raise RequestRefused(
                f"{files.directory} has {name} {theirs:g}, and the run has {own:g}: create the run with "
                f"{name}={theirs:g}"
            )


def _write_peft(slot: AdapterSlot, settings: LoraConfig, tensors: Tensors, place: Path) -> None:
    base = slot.learner.base
    write_peft(place, tensors, settings.rank, settings.alpha, "" if base is None else str(base.absolute()))


def _write(directory: Path, write: Callable[[Path], None]) -> None:
    """Make ``directory`` on rank 0, where ``write`` fills another that is renamed then.

    Raises:
        SaveError: it failed; raised on every rank.
    """
    error: OSError | None = None
    if dist.get_rank() == 0:
        temporary = directory.with_name(f".{directory.name}.incomplete")
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            write(temporary)
            publish(temporary, directory)
        except OSError as caught:
            error = caught
            shutil.rmtree(temporary, ignore_errors=True)
    said = [None if error is None else str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise SaveError(f"{directory} was not written: {said[0]}") from error


def _together[T](read: Callable[[], T]) -> T:
    """What ``read`` returns, where it succeeds on every rank.

    Raises:
        RequestRefused: it failed on some rank; raised on every rank.
    """
    result, error = None, None
    try:
        result = read()
    except (RequestRefused, PeftFilesError, DistCheckpointError, SafetensorError, OSError) as caught:
        error = caught
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, None if error is None else str(error))
    failed = [message for message in said if message is not None]
    if failed:
        raise RequestRefused(failed[0]) from error
    assert result is not None
    return result


def _factors(slot: AdapterSlot, settings: LoraConfig) -> Tensors:
    """Whole factors of the run's rank, by their names in peft's files; empty on ranks other than 0."""
    data_parallel.finish_gathering(slot.learner.model_chunks)
    return _gathered(slot, settings, torch.Tensor.detach)


def _gathered(slot: AdapterSlot, settings: LoraConfig, value: Callable[[Tensor], Tensor]) -> Tensors:
    """``gather_factors`` of the run's rank, in host memory."""

    def of_the_run(name: str, tensor: Tensor) -> Tensor:
        kept = tensor[: settings.rank] if ".lora_A." in name else tensor[:, : settings.rank]
        return kept.to("cpu", copy=True)

    return gather_factors(slot.learner.model_chunks, slot.learner.architecture, slot.settings, value, of_the_run)


# --- the optimizer's state ----------------------------------------------------------------------------------------


@dataclass
class _Held:
    """The part of a parameter whose main parameter and moments this rank has.

    Attributes:
        optimizer: Megatron's.
        parameter: the model's.
        part: of its elements.
        states: param (the main parameter) and the optimizer's state of it.
        wanted: what they are to be, whole, by the names of ``_STATES``.
    """

    optimizer: Any
    parameter: Parameter
    part: slice
    states: dict[str, Any]
    wanted: Tensors = field(default_factory=dict)

    @torch.no_grad()
    def put(self, step: int) -> None:
        """Make them what is wanted, and count the steps."""
        like = self.states["param"]
        states = {name: self.wanted[name].view(-1)[self.part].view_as(like).to(like.device) for name in _STATES}
        if isinstance(self.states.get("step"), Tensor):
            states["step"] = torch.full_like(self.states["step"], step)
        if hasattr(self.optimizer, "model_param_group_index_map"):
            self.optimizer._set_main_param_and_optimizer_states(self.parameter, {**self.states, **states})
            return
        for name, tensor in states.items():
            self.states[name].copy_(tensor)


def _held(slot: AdapterSlot) -> Iterator[_Held]:
    for part in slot.optimizers():
        if hasattr(part, "model_param_group_index_map"):  # the distributed optimizer, which has parts of parameters
            for parameter in part.model_param_group_index_map:
                place = part._get_model_param_range_map(parameter)["param"]
                states = part._get_main_param_and_optimizer_states(parameter)
                yield _Held(part, parameter, slice(place.start, place.end), states)
        else:
            for parameter, main in _main_parameters(part):
                yield _Held(part, parameter, slice(None), {"param": main, **part.optimizer.state[main]})


def _main_parameters(part: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """(model's, main) parameters of an optimizer that is whole on every rank."""
    if not hasattr(part, "float16_groups"):
        for group in part.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    for model, main in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from zip(model, main, strict=True)
    for group in part.fp32_from_fp32_groups:
        yield from ((parameter, parameter) for parameter in group)


@torch.no_grad()
def _optimizer_states(slot: AdapterSlot, run: str, settings: LoraConfig) -> Tensors:
    """Whole main parameters and moments of the run's rank: float32 by "exp_avg.<name>"; empty on ranks other than 0.

    A rank of a distributed optimizer has parts of parameters. Their place in the gradients' buffers is the same, so
    these carry one state after the other to the ranks, and get the run's gradients back afterwards.
    """
    chunks = slot.learner.model_chunks
    result: Tensors = {}
    with slot.gradients_kept(run):
        for name in _STATES:
            for chunk in chunks:
                for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                    buffer.grad_data.zero_()
            for held in _held(slot):
                place: Any = gradient_value(held.parameter)
                place.view(-1)[held.part].copy_(held.states[name].view(-1))
            for chunk in chunks:
                all_gather_gradient_shards(chunk)
            gathered = _gathered(slot, settings, gradient_value)
            result |= {f"{name}.{each}": tensor.float() for each, tensor in gathered.items()}
    return result


def _read_optimizer(slot: AdapterSlot, settings: LoraConfig, place: Path) -> tuple[list[_Held], int]:
    path = place / OPTIMIZER_NAME
    if not path.is_file():
        raise RequestRefused(f"{place} has no {OPTIMIZER_NAME}: load it without the optimizer")
    shapes = factor_shapes(WeightMap(slot.learner.architecture), settings.targets, settings.rank)
    file: Any = safe_open(path, "pt")
    metadata, names = file.metadata() or {}, set(file.keys())
    step = str(metadata.get("step", ""))
    if names != {f"{state}.{name}" for state in _STATES for name in shapes} or not step.isdecimal():
        raise RequestRefused(f"{path} is not of this run's adapter: load it without the optimizer")
    by_parameter = {id(parameter): (adapter, factor) for adapter, factor, parameter in _places(slot, settings)}
    result = []
    for held in _held(slot):
        adapter, factor = by_parameter[id(held.parameter)]
        name, first = peft_tensor(factor.hf_names[0])
        for state in _STATES:
            stored = file.get_slice(f"{state}.{name}")
            if tuple(stored.get_shape()) != shapes[name]:
                raise RequestRefused(f"{path}: {state}.{name} has shape {stored.get_shape()}, not {list(shapes[name])}")
            whole = stored[first : first + factor.hf_shapes[0][0]].float()
            local = shard(factor, whole, adapter.tp_size, adapter.tp_rank)
            held.wanted[state] = padded(local, held.parameter.shape).contiguous()
        result.append(held)
    return result, int(step)


def _places(slot: AdapterSlot, settings: LoraConfig) -> Iterator[tuple[Adapter, Mapping, Parameter]]:
    """Each of this rank's parameters with its adapter and the mapping of its factor in the run's rank."""
    for adapter in adapters(slot.learner.model_chunks):
        parameters = (*adapter.a, *adapter.b)
        for factor, parameter in zip(factor_mappings(adapter.mapping, settings.rank), parameters, strict=True):
            yield adapter, factor, parameter
