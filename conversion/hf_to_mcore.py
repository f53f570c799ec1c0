"""Hugging Face weights to a Megatron-Core distributed checkpoint.

    python conversion/hf_to_mcore.py --hf-dir Qwen2.5-32B --mcore-dir Qwen2.5-32B-mcore [--tp 8 --pp 2] [--verify]

The result loads into any TP/PP/VPP/EP layout.  ``--tp``, ``--pp``, ``--vpp`` and ``--ep`` name the layout that is going
to read it: tensors are then cut as its ranks hold them and each rank's parts lie in files of their own, so that no rank
reads a byte for another.  Each byte is read once, written once and hashed on the way, in blocks.  Config, tokenizer and
the like are kept in ``hf/`` for the way back.

Weights in FP8 in blocks of 128 x 128 (DeepSeek's release format), in MXFP4 (gpt-oss) and in what compressed-tensors and
ModelOpt write (FP8, NVFP4, MXFP4, INT8, INT4) become the bfloat16 weights that they stand for, and the config in
``hf/`` is that of the bfloat16 model.

Exit status: 0 done, 1 an error, which one line on standard error says, 2 the command line is not understood.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take seconds or are not there
    import sys
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from megatron_retool.installation import require_packages
    from megatron_retool.interruption import end_when_interrupted

    require_packages("python conversion/hf_to_mcore.py")
    end_when_interrupted()
    from conversion.files.command_lines import refuse_early

    refuse_early("hf_to_mcore", __doc__)

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from conversion.files import command_lines
from conversion.files.checksums import COMPLETE_NAME, FileRecord, verified_meanwhile
from conversion.files.companions import check_tokenizer, copy_companions
from conversion.files.directory import COMPANIONS, REPORT_NAME, check_target, local_directory, new_directory
from conversion.files.dist_checkpoint import Chunk, ChunkWriter, write_metadata
from conversion.files.hf_checkpoint import HFCheckpoint, Mxfp4Stack, StoredTensor, check_finite, is_finite
from conversion.files.predictors import of_model
from conversion.files.quantized_checkpoint import FULL_PRECISION, QuantizedCheckpoint, open_source
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.files.workers import counted, default_workers, even_ranges, progress_bar, run_jobs
from conversion.model.architecture import Architecture
from conversion.model.layout import LayoutError, cuts
from conversion.model.low_precision import DECLARED_BESIDE
from conversion.model.mapping import Mapping
from conversion.model.rules import Arrangement
from conversion.model.stacked import tensor_of
from conversion.model.weight_map import WeightMap, checkpoint_place
from megatron_retool.errors import UserError
from megatron_retool.interruption import run_interruptible
from run_files.atomic_files import write_text


@dataclass(frozen=True)
class TargetLayout:
    """The layout whose ranks' reads the files are laid out for. Any other layout can load them all the same."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1

    def check(self, architecture: Architecture) -> None:
        """Raise LayoutError naming the option that does not divide the model, or that the learner would refuse."""
        if self.vpp != 1 and self.pp < 2:
            raise LayoutError(f"--vpp {self.vpp} needs --pp > 1")
        options = {"expert_tensor": "--tp", "expert": "--ep", "pipeline": "--pp", "virtual_pipeline": "--vpp"}
        for cut in cuts(
            architecture,
            tensor=self.tp,
            pipeline=self.pp,
            virtual_pipeline=self.vpp,
            expert=self.ep,
            expert_tensor=self.expert_tensor(architecture),
        ):
            if not cut.fits:
                option = options.get(cut.dimension, "--tp")
                raise LayoutError(f"{option}: {cut.parts} parts do not divide {cut.what}={cut.size}")

    def expert_tensor(self, architecture: Architecture) -> int:
        """Parts that each expert is cut into: the learner takes those with biases whole."""
        return 1 if architecture.linear_bias else self.tp

    def parts_of(self, mapping: Mapping, architecture: Architecture) -> int:
        """Parts that a parameter is cut into, where tensor parallelism cuts it."""
        return self.tp if mapping.expert is None else self.expert_tensor(architecture)

    def rank(self, mapping: Mapping, architecture: Architecture, tp_rank: int) -> int:
        """Number of the group of files that holds a part: one for each combination of PP, EP and TP rank."""
        if mapping.layer is None:
            pp_rank = 0 if mapping.mcore_name.startswith("embedding.") else self.pp - 1
        else:
            pp_rank = mapping.layer // (architecture.num_layers // (self.pp * self.vpp)) % self.pp
        ep_rank = 0
        if mapping.expert is not None and architecture.num_experts is not None:
            ep_rank = mapping.expert // (architecture.num_experts // self.ep)
        return (pp_rank * self.ep + ep_rank) * self.tp + tp_rank


def convert(
    hf_dir: str | Path,
    mcore_dir: str | Path,
    *,
    layout: TargetLayout | None = None,
    dtype: torch.dtype | None = None,
    families: Sequence[str] = (),
    workers: int | None = None,
    verify: bool = False,
    tolerance: float | None = None,
    overwrite: bool = False,
    require_tokenizer: bool = True,
    predictors: bool = True,
    checksums: bool = True,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Convert ``hf_dir`` into ``mcore_dir``, which appears when it is complete.

    Args:
        layout: see ``TargetLayout``; None: whole tensors.
        dtype: cast to it; None: keep what is stored, or of quantised weights what they were before (bfloat16, float16).
        families: model families beside the built-in ones, see ``model.family``.
        workers: how many threads; None: one for each GiB, at most the machine's cores and 8.
        verify: compare the logits of both models on random tokens before the directory appears.
        tolerance: largest logit difference that ``verify`` accepts; None: see ``verify.verify_logits``.
        predictors: False: leave out layers for multi-token prediction, which are carried along otherwise.
        checksums: hold ``hf_dir`` against its own meanwhile, where it has some (``files.checksums``).
        on_progress: called with the source bytes that are converted, and all there are.

    Returns:
        What was done: family, tensors, bytes, seconds and, with ``verify``, the largest difference.

    Raises:
        HFCheckpointError, WeightMapError, UnsupportedArchitecture: the source does not fit, or has NaN or infinite
            weights; nothing is left behind.
        DamagedError: a file of ``hf_dir`` is not what it was when it was written.
        ExtensionError: one of ``families`` cannot be used.
        FileExistsError: ``mcore_dir`` overlaps ``hf_dir`` or may not be replaced, see ``check_target``.
        VerificationError: the logits differ by more than ``tolerance``; nothing is left behind.
        OSError: too little room on the disk, or writing failed; nothing is left behind.
    """
    began = time.monotonic()
    hf_dir, mcore_dir = Path(hf_dir), Path(mcore_dir)
    check_target(mcore_dir.absolute(), [hf_dir], overwrite=overwrite)
    with verified_meanwhile(hf_dir) if checksums else nullcontext(lambda wait: None) as check_source:
        architecture = Architecture.from_pretrained(hf_dir, families, dequantized=True)
        layout = layout or TargetLayout()
        layout.check(architecture)
        checkpoint = open_source(hf_dir)
        dequantized_to = _dequantized_to(checkpoint, verify)
        dequantized = dequantized_to is not None
        counted_by = None if predictors else checkpoint.predictors_key
        weight_map = WeightMap(architecture)
        checkpoint.check(weight_map)
        carried = of_model(checkpoint, architecture).mappings if predictors else ()
        mappings = (*weight_map.exported(), *carried)
        for mapping in weight_map:  # a size that the layout does not divide is found before anything is written
            list(_parts(mapping, layout.parts_of(mapping, architecture)))
        if dtype is None:
            _check_stacks(checkpoint, weight_map)
        if require_tokenizer:
            check_tokenizer(hf_dir)

        source_bytes = sum(_bytes_of(checkpoint, mapping) for mapping in mappings)
        needed, records = _output_bytes(checkpoint, mappings, dtype), dict[str, FileRecord]()
        with new_directory(
            mcore_dir, sources=[hf_dir], overwrite=overwrite, needed_bytes=needed, records=records
        ) as temporary:
            chunks, broken = [], set[str]()
            report_bytes = counted(on_progress, source_bytes, lambda: check_source(False))
            for written, files, names in _write(
                checkpoint, architecture, mappings, layout, dtype, temporary, workers, report_bytes
            ):
                chunks += written
                records |= files
                broken |= names
            check_source(True)
            check_finite(broken, hf_dir, dtype)
            write_metadata(temporary, chunks, {"checkpoint_version": 3.0, "iteration": 0})
            (temporary / COMPANIONS).mkdir()
            copy_companions(hf_dir, temporary / COMPANIONS, keep=lambda name: name != DECLARED_BESIDE)
            _write_config(temporary / COMPANIONS, architecture, dequantized_to, counted_by)
            report: dict[str, Any] = {
                "family": architecture.family,
                "layout": asdict(layout),
                "dtype": "as stored" if dtype is None else str(dtype).removeprefix("torch."),
                "dequantized": dequantized,
                "tensors": len(weight_map.hf_names),
                "predictors": len(carried),
                "bytes": source_bytes,
            }
            write_text(temporary / REPORT_NAME, json.dumps(report, indent=2) + "\n")
            if verify:
                from conversion.verify import verify_logits

                (temporary / COMPLETE_NAME).touch()
                report["largest_logit_difference"] = verify_logits(
                    architecture, hf_dir, temporary, dtype, tolerance, dequantized=dequantized
                )
    return {**report, "seconds": time.monotonic() - began}


def _dequantized_to(checkpoint: HFCheckpoint, verify: bool) -> torch.dtype | None:
    """What weights are that a checkpoint holds in fewer bits; None: it holds none.

    Raises:
        HFCheckpointError: they cannot be verified.
    """
    mxfp4 = any(isinstance(stored, Mxfp4Stack) for stored in checkpoint.tensors.values())
    if verify and mxfp4:
        raise HFCheckpointError(
            f"{checkpoint.directory} holds MXFP4, which --verify does not compare: verify what mcore_to_hf.py makes of "
            "the checkpoint, with its --verify"
        )
    if isinstance(checkpoint, QuantizedCheckpoint):
        return checkpoint.full_precision
    return FULL_PRECISION if mxfp4 else None


def _write_config(
    directory: Path, architecture: Architecture, dequantized_to: torch.dtype | None, predictors: str | None
) -> None:
    """Change config.json into that of what is written, under a model_type that transformers knows.

    Args:
        dequantized_to: dtype of what were quantised weights; None: there were none.
        predictors: the key that counts layers for multi-token prediction, which are left out.
    """
    path = directory / "config.json"
    before = json.loads(path.read_text(encoding="utf-8"))
    config = {**architecture.hf_config, "model_type": architecture.family}
    if dequantized_to is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dequantized_to).removeprefix("torch.")
    if predictors is not None:
        config[predictors] = 0
    if config != before:
        write_text(path, json.dumps(config, indent=2) + "\n")


def _check_stacks(checkpoint: HFCheckpoint, weight_map: WeightMap) -> None:
    """Raise HFCheckpointError where layers differ in dtype: the checkpoint stacks them in one tensor."""
    first: dict[str, StoredTensor] = {}
    for mapping in weight_map.exported():
        stored = checkpoint.entry(mapping.hf_names[0])
        other = first.setdefault(checkpoint_place(mapping, weight_map.architecture).key, stored)
        if other.dtype != stored.dtype:
            raise HFCheckpointError(
                f"{stored.name} in {checkpoint.directory} has dtype {stored.dtype}, but {other.name} has "
                f"{other.dtype}: layers are stored as one tensor; choose a dtype with --dtype"
            )


def _output_bytes(checkpoint: HFCheckpoint, mappings: Sequence[Mapping], dtype: torch.dtype | None) -> int:
    result = 0
    for mapping in mappings:
        stored = checkpoint.entry(mapping.hf_names[0]).dtype
        width = (mapping.cast_to(dtype) or stored).itemsize
        result += _bytes_of(checkpoint, mapping) // stored.itemsize * width
    return result


def _write(
    checkpoint: HFCheckpoint,
    architecture: Architecture,
    mappings: tuple[Mapping, ...],
    layout: TargetLayout,
    dtype: torch.dtype | None,
    directory: Path,
    workers: int | None,
    report: Callable[[int], None],
) -> list[_Written]:
    sizes = [_bytes_of(checkpoint, mapping) for mapping in mappings]
    ranges = even_ranges(sizes, default_workers(sum(sizes)) if workers is None else workers)
    jobs = [
        _Job(checkpoint, architecture, mappings[start:stop], number, layout, dtype, directory)
        for number, (start, stop) in enumerate(ranges)
    ]
    return run_jobs(_run_job, jobs, report)


def _bytes_of(checkpoint: HFCheckpoint, mapping: Mapping) -> int:
    return sum(checkpoint.entry(name).nbytes for name in mapping.hf_names)


_Written = tuple[list[Chunk], dict[str, FileRecord], set[str]]


@dataclass(frozen=True)
class _Job:
    """Parameters that one worker writes into files of its own."""

    checkpoint: HFCheckpoint
    architecture: Architecture
    mappings: tuple[Mapping, ...]
    number: int
    layout: TargetLayout
    dtype: torch.dtype | None
    directory: Path


def _run_job(job: _Job, report: Callable[[int], None]) -> _Written:
    """What was written: chunks, the files that they lie in, and the tensors with NaN or infinite values."""
    writers: dict[int, ChunkWriter] = {}
    broken: set[str] = set()
    with ExitStack() as files:

        def writer_of(rank: int) -> ChunkWriter:
            if rank not in writers:
                writers[rank] = files.enter_context(ChunkWriter(job.directory, f"__{rank}_{job.number}.distcp"))
            return writers[rank]

        for mapping in job.mappings:
            place, shape = checkpoint_place(mapping, job.architecture), mapping.mcore_shape
            dtype = mapping.cast_to(job.dtype) or job.checkpoint.entry(mapping.hf_names[0]).dtype
            for start, stop, parts in _parts(mapping, job.layout.parts_of(mapping, job.architecture)):
                cut = []
                for tp_rank, columns in parts:
                    writer = writer_of(job.layout.rank(mapping, job.architecture, tp_rank))
                    rest = shape[1:] if columns is None else (columns[1] - columns[0],)
                    offsets = (start, columns[0] if columns else 0, *(0,) * len(shape[2:]))[: len(shape)]
                    writer.begin(place, shape, offsets, (stop - start, *rest), dtype)
                    cut.append((writer, columns))
                position = start
                for rows in job.checkpoint.row_blocks(mapping, start, stop):
                    converted = rows.to(dtype)
                    if not is_finite(converted):
                        broken |= _not_finite(mapping, position, converted)
                    position += len(rows)
                    for writer, columns in cut:
                        writer.add(converted if columns is None else converted[:, columns[0] : columns[1]])
                    report(rows.nbytes)
                for writer, _ in cut:
                    writer.end()
    chunks = [chunk for writer in writers.values() for chunk in writer.chunks]
    return chunks, {writer.file: writer.record for writer in writers.values()}, broken


def _not_finite(mapping: Mapping, start: int, rows: torch.Tensor) -> set[str]:
    """The Hugging Face tensors with NaN or infinite values among a parameter's rows from row ``start`` on."""
    result, position = set(), 0
    for segment in mapping.row_segments(start, start + len(rows)):
        size = segment.stop - segment.start
        if segment.source is not None and not is_finite(rows[position : position + size]):
            result.add(tensor_of(mapping.hf_names[segment.source]))
        position += size
    return result


def _parts(mapping: Mapping, tp: int) -> Iterator[tuple[int, int, list[tuple[int, tuple[int, int] | None]]]]:
    """The chunks of a parameter: first row, end row, and for each chunk its tensor parallel rank and columns."""
    rows = mapping.mcore_shape[0]
    if mapping.tp_dim == 1:
        columns = [mapping.shard_columns(tp, tp_rank) if tp > 1 else None for tp_rank in range(tp)]
        yield 0, rows, list(enumerate(columns))
    elif mapping.tp_dim is None:
        yield 0, rows, [(0, None)]
    elif mapping.arrangement is Arrangement.VOCABULARY:
        # The model pads the vocabulary so that it divides; the checkpoint holds no padding.
        step = -(-rows // tp)
        for tp_rank, start in enumerate(range(0, rows, step)):
            yield start, min(start + step, rows), [(tp_rank, None)]
    else:
        for tp_rank in range(tp):
            for start, stop in mapping.shard_rows(tp, tp_rank):
                yield start, stop, [(tp_rank, None)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 done, 1 with one line on standard error that says why not."""
    options = command_lines.hf_to_mcore(arguments, __doc__)
    try:
        hf_dir = local_directory(options.hf_dir)
        with progress_bar(f"{hf_dir.name} to Megatron-Core") as on_progress:
            report = convert(
                hf_dir,
                options.mcore_dir,
                layout=TargetLayout(options.tp, options.pp, options.vpp, options.ep),
                dtype=options.dtype and getattr(torch, options.dtype),
                families=options.family,
                workers=options.workers,
                verify=options.verify,
                tolerance=options.tolerance,
                overwrite=options.overwrite,
                require_tokenizer=not options.allow_missing_tokenizer,
                predictors=not options.without_predictors,
                checksums=not options.no_checksums,
                on_progress=on_progress,
            )
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_report(report, options.mcore_dir)
    return 0


def print_report(report: dict[str, Any], target: Path) -> None:
    """A line of what was converted, and of predictors and the verification where there were any."""
    rate = report["bytes"] / 2**30 / max(report["seconds"], 1e-9)
    print(
        f"{target}: {report['family']}, {report['tensors']} tensors, {report['bytes'] / 2**30:.3f} GiB in "
        f"{report['seconds']:.1f} s ({rate:.2f} GiB/s)"
    )
    if report["predictors"]:
        print(f"{report['predictors']} tensors of layers for multi-token prediction were carried along as they are")
    if "largest_logit_difference" in report:
        print(f"largest logit difference to Hugging Face: {report['largest_logit_difference']:.3e}")


if __name__ == "__main__":
    sys.exit(run_interruptible(main))
