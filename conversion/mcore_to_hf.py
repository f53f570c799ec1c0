"""A Megatron-Core distributed checkpoint back to a Hugging Face directory.

    python conversion/mcore_to_hf.py --mcore-dir runs/r1/checkpoints/global_step_30 --hf-dir export [--fp8 blockwise]

Reads what ``hf_to_mcore.py`` wrote and what the learner saves while it trains, in any layout.  Tensors keep the dtype
in which the checkpoint stores them.  Each byte is read once, written once and hashed on the way, in blocks; where they
are quantised or the checkpoint is compressed, one parameter at a time is in memory per worker.

Exit status: 0 done, 1 an error, which one line on standard error says, 2 the command line is not understood.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds or are not there
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron_retool.installation import require_packages
    from megatron_retool.interruption import end_when_interrupted

    require_packages("python conversion/mcore_to_hf.py")
    end_when_interrupted()
    from conversion.files.command_lines import refuse_early

    refuse_early("mcore_to_hf", __doc__)

import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conversion import fp8_export
from conversion.files import command_lines
from conversion.files.adapter_checkpoint import PEFT_DIRECTORY, MergedCheckpoint, read_record
from conversion.files.checksums import COMPLETE_NAME, FilePart, FileRecord, verified_meanwhile
from conversion.files.companions import check_tokenizer
from conversion.files.directory import check_target, local_directory, new_directory
from conversion.files.dist_checkpoint import DistCheckpoint, DistCheckpointError
from conversion.files.export_companions import companion_directory, write_companions
from conversion.files.hf_checkpoint import FileWriter, TensorSpec, check_finite, is_finite, plan_files, write_index
from conversion.files.predictors import PREFIX, Predictors, of_checkpoint, of_directory
from conversion.files.weights_alone import WEIGHTS_PART
from conversion.files.workers import counted, default_workers, even_ranges, progress_bar, run_jobs
from conversion.hf_to_mcore import print_report
from conversion.model.architecture import Architecture
from conversion.model.block_fp8 import (
    Form,
    form_of,
    is_quantized,
    quantize_named,
    quantized_names,
    takes_power_of_two,
)
from conversion.model.mapping import Mapping, to_hf
from conversion.model.stacked import part_of, stacked_shapes, tensor_of
from conversion.model.weight_map import PREDICTOR_PREFIX, WeightMap, checkpoint_place
from megatron_retool.errors import InputError, UserError
from megatron_retool.interruption import run_interruptible


def export(
    mcore_dir: str | Path,
    hf_dir: str | Path,
    *,
    hf_config_dir: str | Path | None = None,
    dtype: torch.dtype | None = None,
    fp8: bool = False,
    fp8_scales: str = "auto",
    families: Sequence[str] = (),
    workers: int | None = None,
    max_file_bytes: int = command_lines.MAX_FILE_BYTES,
    verify: bool = False,
    tolerance: float | None = None,
    overwrite: bool = False,
    require_tokenizer: bool = True,
    predictors: bool = True,
    predictors_from: str | Path | None = None,
    base_dir: str | Path | None = None,
    checksums: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the Hugging Face directory ``hf_dir``, which appears when it is complete.

    Args:
        mcore_dir: output of ``hf_to_mcore.py``, a learner checkpoint, or the global_step_N directory that holds one.
        hf_config_dir: where config.json and the tokenizer are; None: ``mcore_dir``/hf.
        dtype: cast to it; None: keep what is stored.
        fp8: quantise the linear layers in blocks of 128 x 128, see ``fp8_export``. Layers whose sizes are not multiples
            of 128 stay as they are; a model that has no others is a ValueError.
        fp8_scales: kind of the blocks' scales, of ``block_fp8.SCALES``; "auto": by this host's GPU.
        families: model families beside the built-in ones, see ``model.family``.
        verify: compare the logits of both models on random tokens before the directory appears.
        workers: as of ``hf_to_mcore.convert``; several may write one file at a time.
        predictors: False, or with ``fp8``: without layers for multi-token prediction, and config.json says so.
            Otherwise those that the learner trained are written, and those that were carried along.
        predictors_from: model directory, or what ``hf_to_mcore.py`` made of one, whose layers for multi-token
            prediction the export gets as they are; None: those that ``mcore_dir`` carries, which learner checkpoints
            do not.
        base_dir: model that the adapters of ``mcore_dir`` were trained on, where it holds only adapters; None: where
            it was then. The merged model is written, and the adapters in PEFT's files in ``hf_dir``/adapter.
        checksums: hold ``mcore_dir`` against its own meanwhile, where it has some (``files.checksums``); of the files
            that hold optimizer state, existence and size alone.

    Returns:
        As ``hf_to_mcore.convert``.

    Raises:
        DistCheckpointError: ``mcore_dir`` is no complete checkpoint of the model that config.json describes.
        HFCheckpointError, UnsupportedArchitecture: config.json or the tokenizer is missing or unfit.
        DamagedError: a file of ``mcore_dir`` is not what it was when it was written.
        ExtensionError, FileExistsError, VerificationError, OSError: as ``hf_to_mcore.convert``.
    """
    began = time.monotonic()
    mcore_dir, hf_dir = checkpoint_directory(mcore_dir), Path(hf_dir)
    sources = [mcore_dir, *([] if hf_config_dir is None else [Path(hf_config_dir)])]
    check_target(hf_dir.absolute(), sources, overwrite=overwrite)
    with verified_meanwhile(mcore_dir, _is_read) if checksums else nullcontext(lambda wait: None) as check_source:
        companions = companion_directory(mcore_dir, hf_config_dir)
        architecture = Architecture.from_pretrained(companions, families)
        if require_tokenizer:
            check_tokenizer(companions)
        checkpoint = _opened(mcore_dir, WeightMap(architecture), base_dir, verify=checksums)
        if verify and isinstance(checkpoint, MergedCheckpoint):
            raise InputError(f"--verify does not know adapters, which {mcore_dir} holds: leave it out")
        predictors = predictors and not fp8
        trained = predictors and any(key.startswith(PREDICTOR_PREFIX) for key in checkpoint.tensors)
        weight_map = WeightMap(architecture.with_predictors() if trained else architecture)
        form, power_of_two = _quantized_form(weight_map, fp8_scales) if fp8 else (None, False)
        carried = _carried(checkpoint, weight_map, architecture, predictors_from)
        carried = carried if predictors else Predictors(checkpoint, ())
        parameters, files, sizes = _planned(checkpoint, carried, weight_map, dtype, form, max_file_bytes)
        report_bytes = counted(on_progress, sum(sizes), lambda: check_source(False))
        records: dict[str, FileRecord] = {}
        with new_directory(
            hf_dir, sources=sources, overwrite=overwrite, needed_bytes=sum(sizes), records=records
        ) as temporary:
            work = _Job(checkpoint, carried, weight_map.architecture, (), files, dtype, form, power_of_two, temporary)
            ranges = even_ranges(sizes, default_workers(sum(sizes)) if workers is None else workers)
            jobs = [replace(work, parameters=parameters[start:stop]) for start, stop in ranges]
            written = run_jobs(_run_job, jobs, report_bytes)
            records |= _joined([parts for parts, _ in written])
            check_source(True)
            check_finite(set().union(*(broken for _, broken in written)), mcore_dir, dtype)
            write_index(temporary, files)
            if isinstance(checkpoint, MergedCheckpoint):
                checkpoint.write_peft(temporary / PEFT_DIRECTORY)
            write_companions(companions, temporary, weight_map, dtype, fp8=fp8, predictors=predictors)
            report: dict[str, Any] = {
                "family": architecture.family,
                "tensors": sum(len(specs) for _, specs in files) - len(carried.mappings),
                "predictors": len(carried.mappings),
                "bytes": sum(sizes),
            }
            if verify:
                from conversion.verify import verify_logits

                report["largest_logit_difference"] = verify_logits(
                    architecture, temporary, mcore_dir, dtype, tolerance, fp8=fp8
                )
    return {**report, "seconds": time.monotonic() - began}


def _opened(mcore_dir: Path, weight_map: WeightMap, base_dir: str | Path | None, verify: bool) -> DistCheckpoint:
    record = read_record(mcore_dir)
    if record is not None:
        return MergedCheckpoint(mcore_dir, record, weight_map, base_dir, verify)
    if base_dir is not None:
        raise InputError(f"--base-dir {base_dir} is for adapters, and {mcore_dir} holds a whole model: leave it out")
    return DistCheckpoint(mcore_dir)


def checkpoint_directory(directory: str | Path) -> Path:
    """``directory``, or the ``learner`` directory inside it, whichever is a distributed checkpoint.

    Raises:
        DistCheckpointError: neither is complete.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise DistCheckpointError(f"{directory} does not exist")
    for candidate in (directory, directory / "learner"):
        if (candidate / "metadata.json").is_file():
            if not (candidate / COMPLETE_NAME).is_file() and not (directory / COMPLETE_NAME).is_file():
                raise DistCheckpointError(f"{candidate} has no {COMPLETE_NAME} marker: its writing was interrupted")
            return candidate
    raise DistCheckpointError(f"{directory} is no distributed checkpoint: metadata.json is missing")


def _is_read(path: Path) -> bool:
    """Whether an export needs a file's contents: the learner keeps weights and optimizer state in different files."""
    weights = any(WEIGHTS_PART in other.name for other in path.parent.glob("*.distcp"))
    return path.suffix != ".distcp" or not weights or WEIGHTS_PART in path.name


def _quantized_form(weight_map: WeightMap, scales: str) -> tuple[Form, bool]:
    """How blocks are written, and whether their scales are powers of two. Raises ValueError where there are none."""
    quantized_names(weight_map)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return form_of(weight_map), takes_power_of_two(scales, device)


def _carried(
    checkpoint: DistCheckpoint, weight_map: WeightMap, architecture: Architecture, source: str | Path | None
) -> Predictors:
    """Layers for multi-token prediction that ``weight_map`` leaves out: the checkpoint's, or those of ``source``."""
    carried = of_checkpoint(checkpoint)
    if source is not None:
        carried = of_directory(source, architecture)
        if not carried.mappings:
            raise InputError(f"--predictors-from {source} has no layers for multi-token prediction: leave it out")
    copied = {name for copy in weight_map.predictor_copies() for name in copy.hf_names}
    return carried.without(weight_map.hf_names | copied)


def _planned(
    checkpoint: DistCheckpoint,
    carried: Predictors,
    weight_map: WeightMap,
    dtype: torch.dtype | None,
    form: Form | None,
    max_file_bytes: int,
) -> tuple[list[_Placed], _Files, list[int]]:
    """Parameters in the order in which they are written, the files, and how many bytes each parameter becomes."""
    mappings = [group for _, group in weight_map.exported_groups()]
    mappings += [(mapping,) for mapping in weight_map.predictor_copies()]
    groups = [_specs(checkpoint, group, weight_map, dtype, form) for group in mappings]
    mappings += [(mapping,) for mapping in carried.mappings]
    groups += [_carried_specs(carried, mapping, dtype) for mapping in carried.mappings]
    files = plan_files(groups, max_file_bytes)
    return _placed(mappings, groups, files), files, [sum(spec.nbytes for spec in specs) for specs in groups]


def _specs(
    checkpoint: DistCheckpoint,
    group: Sequence[Mapping],
    weight_map: WeightMap,
    dtype: torch.dtype | None,
    form: Form | None,
) -> list[TensorSpec]:
    """The tensors to write of a group. Raises DistCheckpointError where the checkpoint does not fit."""
    mapping = group[0]  # the others lie in the same tensor of the checkpoint
    place = checkpoint_place(mapping, weight_map.architecture)
    stored = mapping.cast_to(dtype) or checkpoint.dtype(place)
    shape = checkpoint.shape(place)
    if shape[1:] != mapping.mcore_shape[1:] or shape[0] < mapping.mcore_shape[0]:
        raise DistCheckpointError(
            f"{checkpoint.directory}: {place.key} has shape {shape}, config.json implies {mapping.mcore_shape}"
        )
    named_shapes = stacked_shapes(
        part for each in group for part in zip(each.hf_names, each.hf_shapes, strict=True)
    ).items()
    specs = [TensorSpec(name, shape, stored) for name, shape in named_shapes]
    if form is None or not is_quantized(mapping):
        return specs
    return [quantized for spec in specs for quantized in fp8_export.quantized_specs(spec, form)]


def _carried_specs(carried: Predictors, mapping: Mapping, dtype: torch.dtype | None) -> list[TensorSpec]:
    stored = getattr(torch, carried.dtype(mapping))
    return [TensorSpec(mapping.hf_names[0], mapping.mcore_shape, mapping.cast_to(dtype) or stored)]


@dataclass(frozen=True)
class _Placed:
    """A parameter, or several that lie in one tensor, as ``specs[start:stop]`` of file number ``file``."""

    group: tuple[Mapping, ...]
    file: int
    start: int
    stop: int


_Files = Sequence[tuple[str, list[TensorSpec]]]


def _placed(
    mappings: Sequence[tuple[Mapping, ...]], groups: Sequence[Sequence[TensorSpec]], files: _Files
) -> list[_Placed]:
    places = ((file, number) for file, (_, specs) in enumerate(files) for number in range(len(specs)))
    placed = []
    for group, specs in zip(mappings, groups, strict=True):
        (file, start), *_ = itertools.islice(places, len(specs))
        placed.append(_Placed(group, file, start, start + len(specs)))
    return placed


@dataclass(frozen=True)
class _Job:
    """Consecutive parameters that one worker writes: where they begin or end amid a file, another has the rest.

    Attributes:
        form: of block-quantised weights; None: they are not quantised.
    """

    checkpoint: DistCheckpoint
    predictors: Predictors
    architecture: Architecture
    parameters: Sequence[_Placed]
    files: _Files
    dtype: torch.dtype | None
    form: Form | None
    power_of_two: bool
    directory: Path


_Written = tuple[list[tuple[str, FilePart]], set[str]]


def _run_job(job: _Job, report: Callable[[int], None]) -> _Written:
    """The files that were written with the part of each that this worker wrote, and the tensors with NaN or infinite
    values."""
    parts, broken = list[tuple[str, FilePart]](), set[str]()
    for number, group in itertools.groupby(job.parameters, key=lambda parameter: parameter.file):
        file, specs = job.files[number]
        parameters = list(group)
        with FileWriter(job.directory / file, specs, parameters[0].start, parameters[-1].stop) as writer:
            for parameter in parameters:
                for name, blocks in _contents(parameter.group, job):
                    writer.write(name, _looked_at(name, _reported(blocks, report), broken))
            parts.append((file, writer.part))
    return parts, broken


def _looked_at(name: str, blocks: Iterable[Tensor], broken: set[str]) -> Iterator[Tensor]:
    for block in blocks:
        if not is_finite(block):
            broken.add(name)
        yield block


def _reported(blocks: Iterable[Tensor], report: Callable[[int], None]) -> Iterator[Tensor]:
    for block in blocks:
        yield block
        report(block.nbytes)


def _joined(written: Sequence[Sequence[tuple[str, FilePart]]]) -> dict[str, FileRecord]:
    """Files whose parts several workers wrote, in the workers' order."""
    records: dict[str, FileRecord] = {}
    for file, part in (item for parts in written for item in parts):
        records[file] = FileRecord((*(records[file].parts if file in records else ()), part))
    return records


def _contents(group: Sequence[Mapping], job: _Job) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """The tensors that a group becomes, each as blocks of its elements in order."""
    mapping = group[0]
    if mapping.mcore_name.startswith(PREFIX):
        cast, blocks = mapping.cast_to(job.dtype), job.predictors.blocks(mapping)
        yield mapping.hf_names[0], (block if cast is None else block.to(cast) for block in blocks)
        return
    if mapping.is_stacked:
        yield tensor_of(mapping.hf_names[0]), (_element(each, job) for each in group)
        return
    place = checkpoint_place(mapping, job.architecture)
    form = job.form if is_quantized(mapping) else None
    dtype = mapping.cast_to(job.dtype)
    if form is None and job.checkpoint.lies_in_order(place):
        for source, name in enumerate(mapping.hf_names):
            yield name, _blocks(mapping, source, job)
        return
    for name, tensor in to_hf(mapping, job.checkpoint.read(place, mapping.mcore_shape)).items():
        tensor = tensor if dtype is None else tensor.to(dtype)
        if form is None:
            yield name, [tensor]
        else:
            for part_name, part in quantize_named(name, tensor, form, power_of_two=job.power_of_two):
                yield part_name, [part]


def _element(mapping: Mapping, job: _Job) -> Tensor:
    """The element of a stack that a parameter makes up: [in, out], [out, in], or [out] of a bias."""
    full = job.checkpoint.read(checkpoint_place(mapping, job.architecture), mapping.mcore_shape)
    dtype = mapping.cast_to(job.dtype)
    full = full if dtype is None else full.to(dtype)
    rows, *others = mapping.mcore_shape
    parts = {name: part_of(name) for name in mapping.hf_names}
    in_rows = any(part is not None and part.in_rows for part in parts.values())
    element = full.new_empty((rows, *others) if in_rows else (*others, rows))
    for name, tensor in to_hf(mapping, full).items():
        part = parts[name]
        assert part is not None
        part.of(element).copy_(tensor)
    return element


def _blocks(mapping: Mapping, source: int, job: _Job) -> Iterator[Tensor]:
    place, dtype = checkpoint_place(mapping, job.architecture), mapping.cast_to(job.dtype)
    for _, start, rows in mapping.hf_runs(source):
        for block in job.checkpoint.row_blocks(place, mapping.mcore_shape, start, start + rows):
            yield block if dtype is None else block.to(dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 done, 1 with one line on standard error that says why not."""
    options = command_lines.mcore_to_hf(arguments, __doc__)
    with_modelopt = options.fp8 in command_lines.MODELOPT_SCHEMES
    predictors_from = options.predictors_from
    try:
        source = checkpoint_directory(options.mcore_dir)
        config_dir = None if options.hf_config_dir is None else local_directory(options.hf_config_dir)
        with ExitStack() as stack:
            full_precision = options.hf_dir
            if with_modelopt:
                options.hf_dir.absolute().parent.mkdir(parents=True, exist_ok=True)
                scratch = tempfile.TemporaryDirectory(dir=options.hf_dir.absolute().parent, prefix=".full-precision.")
                full_precision = Path(stack.enter_context(scratch))
            with progress_bar(f"{source.name} to Hugging Face") as on_progress:
                report = export(
                    source,
                    full_precision,
                    hf_config_dir=config_dir,
                    dtype=options.dtype and getattr(torch, options.dtype),
                    fp8=options.fp8 == "blockwise",
                    fp8_scales=options.fp8_scales,
                    families=options.family,
                    workers=options.workers,
                    max_file_bytes=options.max_file_bytes,
                    verify=options.verify,
                    tolerance=options.tolerance,
                    overwrite=options.overwrite,
                    require_tokenizer=not options.allow_missing_tokenizer,
                    predictors=not with_modelopt,
                    predictors_from=None if predictors_from is None else local_directory(predictors_from),
                    base_dir=None if options.base_dir is None else local_directory(options.base_dir),
                    checksums=not options.no_checksums,
                    on_progress=on_progress,
                )
            if with_modelopt:
                fp8_export.export_with_modelopt(
                    full_precision,
                    options.hf_dir,
                    command_lines.MODELOPT_SCHEMES[options.fp8],
                    fp8_export.read_calibration(options.calibration, full_precision),
                    overwrite=options.overwrite,
                )
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_report(report, options.hf_dir)
    return 0


if __name__ == "__main__":
    sys.exit(run_interruptible(main))
