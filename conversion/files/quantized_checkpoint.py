"""Directories of low precision (``model.low_precision``) as sources: read as the full-precision models meant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from conversion.files.hf_checkpoint import HFCheckpoint, StoredTensor
from conversion.files.safetensors_headers import HFCheckpointError
from conversion.model.block_fp8 import is_linear
from conversion.model.low_precision import Quantization, Scheme, quantization_of
from conversion.model.mapping import FULL_PRECISION_DTYPES
from conversion.model.mxfp4 import power_of_two, unpack_e2m1
from conversion.model.weight_map import WeightMap

FULL_PRECISION = torch.bfloat16
"""What the weights were before they were quantised, in nearly every model that is published so."""
_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "output_scale",
    "output_global_scale",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
    "k_global_scale",
    "v_global_scale",
    "k_zero_point",
    "v_zero_point",
)
"""Last parts of the names of what activations and caches are quantised with: weights do not depend on it."""
_OF_WEIGHTS = (
    "weight_packed",
    "weight_shape",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
)
_MORE = ("pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "qweight", "qzeros", "scales", "g_idx")
"""Last parts of the names of what changes a weight by formulas that are not read."""


def open_source(directory: str | Path) -> HFCheckpoint:
    """The weights of a directory, dequantised where it is declared that they are quantised.

    Raises:
        HFCheckpointError: as ``HFCheckpoint`` and ``QuantizedCheckpoint``.
        UnsupportedArchitecture: they are quantised in another way than those that are read.
    """
    config = Path(directory) / "config.json"
    quantization = quantization_of(directory, json.loads(config.read_text(encoding="utf-8")))
    return HFCheckpoint(directory) if quantization is None else QuantizedCheckpoint(directory, quantization)


@dataclass(frozen=True)
class _Weight:
    """A quantised matrix: the tensors that it lies in."""

    scheme: Scheme
    numbers: StoredTensor
    scales: StoredTensor
    second: StoredTensor | None = None
    zero_points: StoredTensor | None = None
    order: StoredTensor | None = None


class QuantizedCheckpoint(HFCheckpoint):
    """A directory with quantised weights, which are full-precision matrices to those who read it.

    Scales and the like are not among ``tensors``. They are checked as they are opened, but for their values.

    Attributes:
        full_precision: dtype of the weights to readers; None: none is quantised, only caches or activations are.

    Raises:
        HFCheckpointError: as ``HFCheckpoint``; nothing is quantised; scales are missing, belong to no quantised weight,
            or are of another shape or dtype than declared; a weight is stored otherwise than declared.
        UnsupportedArchitecture: a pattern of the declaration takes too long.
    """

    def __init__(self, directory: str | Path, quantization: Quantization) -> None:
        super().__init__(directory)
        self._quantization = quantization
        dtype: torch.dtype = getattr(torch, quantization.dtype)
        self.full_precision = dtype if quantization.schemes else None
        self._weights: dict[str, _Weight] = {}
        used: set[str] = set()
        for stored in self.on_disk.values():
            module, _, leaf = stored.name.rpartition(".")
            if leaf in quantization.leaves and self._is_quantized(stored):
                weight = self._weight(stored, module)
                self._weights[f"{module}.weight"] = weight
                used |= {part.name for part in _parts(weight)} | {f"{module}.weight_shape"}
        for name in used - {weight.numbers.name for weight in self._weights.values()}:
            self.tensors.pop(name, None)
        for name, weight in self._weights.items():
            self.tensors.pop(weight.numbers.name)
            if name in self.tensors:
                raise HFCheckpointError(
                    f"{self.directory / weight.numbers.file} holds {weight.numbers.name} beside {name}: remove one"
                )
            shape = self._shape(weight)
            self.tensors[name] = replace(weight.numbers, name=name, shape=shape, dtype=dtype)
            self._check_parts(name, weight, shape)
        for name in [name for name in self.tensors if name.rpartition(".")[2] in _OF_ACTIVATIONS]:
            if quantization.exact:
                del self.tensors[name]
        self._check_left()
        if not self._weights and quantization.schemes:
            raise HFCheckpointError(f"{self.directory}: {self._nothing()}: the two do not belong together")

    def _is_quantized(self, stored: StoredTensor) -> bool:
        if self._quantization.exact:
            return _name(stored.dtype) not in FULL_PRECISION_DTYPES
        return any(_name(stored.dtype) == scheme.stored for _, scheme in self._quantization.schemes)

    def _nothing(self) -> str:
        kinds = " or ".join(sorted({scheme.stored for _, scheme in self._quantization.schemes}))
        one = next((t for t in self.on_disk.values() if ".layers." in t.name and len(t.shape) == 2), None)
        such = f", and {one.name} is {_name(one.dtype)}" if one else ""
        return f"{self._quantization.place} declares quantised weights, but no tensor is {kinds}{such}"

    def _where(self, stored: StoredTensor) -> str:
        return f"{self.directory / stored.file}: {stored.name}"

    def _weight(self, stored: StoredTensor, module: str) -> _Weight:
        """The tensors that belong to a stored matrix of low precision.

        Raises:
            HFCheckpointError: it is not declared, or one of them is missing.
        """
        scheme = self._quantization.scheme_of(module)
        if scheme is None:
            raise HFCheckpointError(
                f"{self._where(stored)} is {_name(stored.dtype)}, but {self._quantization.place} declares {module} as "
                "not quantised: the two do not belong together"
            )
        leaf = stored.name.rpartition(".")[2]
        if leaf != scheme.weight or _name(stored.dtype) != scheme.stored:
            raise HFCheckpointError(
                f"{self._where(stored)} has dtype {stored.dtype}, but {self._quantization.place} declares {module} as "
                f"{scheme.weight} of {scheme.stored}"
            )
        if len(stored.shape) != 2 or not all(stored.shape):
            self._part(stored, module, scheme.scale, "scales")  # a norm has none, which is what is wrong with it
            raise HFCheckpointError(
                f"{self._where(stored)} has shape {stored.shape}: only matrices are read that are quantised, one in a "
                "tensor: start from the full-precision weights"
            )
        return _Weight(
            scheme,
            stored,
            self._part(stored, module, scheme.scale, "scales"),
            self._part(stored, module, scheme.second, "second scale") if scheme.second else None,
            self._part(stored, module, "weight_zero_point", "zero points") if scheme.zero_points else None,
            self._part(stored, module, "weight_g_idx", "order of columns") if scheme.ordered else None,
        )

    def _part(self, stored: StoredTensor, module: str, leaf: str, what: str) -> StoredTensor:
        name = f"{module}.{leaf}"
        result = self.on_disk.get(name)
        if result is None:
            kind = "FP8 weight" if stored.dtype == torch.float8_e4m3fn else "quantised weight"
            raise HFCheckpointError(
                f"{self.directory} lacks tensor {name}, the {what} of the {kind} {stored.name} in {stored.file}"
            )
        return result

    def _shape(self, weight: _Weight) -> tuple[int, int]:
        """Of the matrix that a weight stands for."""
        stored = weight.numbers
        rows, columns = stored.shape[0], stored.shape[1] * weight.scheme.per_item
        announced = self.on_disk.get(stored.name.removesuffix("weight_packed") + "weight_shape")
        if weight.scheme.stored != "int32" or announced is None:
            return rows, columns
        shape = super().read(announced.name).flatten()[:3].tolist()
        if len(shape) != 2 or shape[0] != rows or not columns - weight.scheme.per_item < shape[1] <= columns:
            raise HFCheckpointError(
                f"{self._where(announced)} is {shape}, but {stored.name} of shape {stored.shape} holds {rows} rows of "
                f"{columns} numbers"
            )
        return rows, int(shape[1])

    def _check_parts(self, name: str, weight: _Weight, shape: tuple[int, int]) -> None:
        scheme, scales = weight.scheme, weight.scales
        rows, columns = (size or whole for size, whole in zip(scheme.block, shape, strict=True))
        if scheme.block[0] == 1 and shape[1] % columns:
            raise HFCheckpointError(
                f"{self._where(weight.numbers)}: {shape[1]} columns are not a multiple of the group_size "
                f"{columns} that {self._quantization.place} declares"
            )
        counts = -(-shape[0] // rows), -(-shape[1] // columns)
        accepted = [counts, (counts[0], 1, counts[1], 1)]
        if counts[1] == 1 and not scheme.block[1]:
            accepted += [(counts[0],), *([()] if counts[0] == 1 else [])]
        if scales.shape not in accepted:
            raise HFCheckpointError(
                f"{self._where(scales)} has shape {scales.shape}, but {name} of shape {shape} has {counts} blocks of "
                f"{rows} x {columns}"
            )
        self._check_dtype(scales, *scheme.scale_dtypes)
        if weight.second is not None:
            self._check_dtype(weight.second, "float32")
            if weight.second.shape not in ((), (1,)):
                raise HFCheckpointError(f"{self._where(weight.second)} has shape {weight.second.shape}, not one number")
        if weight.zero_points is not None:
            packed = scheme.stored == "int32" and bool(scheme.block[0])
            expected = (-(-counts[0] // scheme.per_item), counts[1]) if packed else scales.shape
            self._check_dtype(weight.zero_points, "int32" if packed else "int8")
            if weight.zero_points.shape != expected:
                raise HFCheckpointError(
                    f"{self._where(weight.zero_points)} has shape {weight.zero_points.shape}, but the {counts} "
                    f"scales of {name} have {expected} zero points"
                )
        if weight.order is not None:
            self._check_dtype(weight.order, "int32", "int64")
            if weight.order.shape != (shape[1],):
                raise HFCheckpointError(
                    f"{self._where(weight.order)} has shape {weight.order.shape}, but {name} has {shape[1]} columns"
                )

    def _check_dtype(self, stored: StoredTensor, *dtypes: str) -> None:
        if _name(stored.dtype) not in dtypes:
            raise HFCheckpointError(f"{self._where(stored)} has dtype {stored.dtype}, not {' or '.join(dtypes)}")

    def _check_left(self) -> None:
        """Raise HFCheckpointError where a tensor belongs to a quantised weight, or to none, that is not there."""
        for name, stored in self.tensors.items():
            module, _, leaf = name.rpartition(".")
            weight = self._weights.get(f"{module}.weight")
            if leaf in _MORE or (leaf in _OF_WEIGHTS and weight is not None):
                raise HFCheckpointError(
                    f"{self._where(stored)} changes the weight of {module} in a way that {self._quantization.place} "
                    "does not declare, or that is not read: start from the full-precision weights"
                )
            if leaf in _OF_WEIGHTS and weight is None:
                of = f"{module}.{next(iter(self._quantization.leaves), 'weight')}"
                kinds = sorted({scheme.stored for _, scheme in self._quantization.schemes})
                raise HFCheckpointError(
                    f"{self.directory / stored.file} holds the scales {name}, but {of} is no "
                    f"{' or '.join(kinds) or 'quantised'} weight"
                )

    def check(self, weight_map: WeightMap) -> None:
        """As ``HFCheckpoint.check``; and linear layers that are declared as quantised have to be.

        Raises:
            HFCheckpointError: also where one of them is stored in full precision.
        """
        super().check(weight_map)
        if not self._quantization.exact:
            return
        for mapping in weight_map:
            for name in mapping.hf_names if is_linear(mapping) else ():
                module = name.removesuffix(".weight")
                if name not in self._weights and self._quantization.scheme_of(module) is not None:
                    stored = self.on_disk[name]
                    raise HFCheckpointError(
                        f"{self._where(stored)} is {_name(stored.dtype)}, but {self._quantization.place} declares it "
                        "as quantised: the two do not belong together"
                    )

    def read(self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None) -> Tensor:
        """As ``HFCheckpoint.read``: of a quantised weight what it stands for, in ``full_precision``.

        It is computed in the scales' dtype, or in float32 where that is of 8 bits, and rounded once more.

        Raises:
            HFCheckpointError: also where a scale is no finite number from 0 on, or columns are in no order.
        """
        weight = self._weights.get(name)
        if weight is None:
            return super().read(name, rows, out)
        first, stop = rows or (0, weight.numbers.shape[0])
        result = self._rows(weight, first, stop).to(self.tensors[name].dtype)
        return result if out is None else out.copy_(result)

    def _rows(self, weight: _Weight, first: int, stop: int) -> Tensor:
        """Rows of the matrix that a weight stands for, in the dtype that it is computed in."""
        scheme = weight.scheme
        columns = self.tensors[weight.numbers.name.removesuffix("_packed")].shape[1]
        numbers = _unpacked(super().read(weight.numbers.name, (first, stop)), scheme)[:, :columns]
        height = scheme.block[0] or max(stop, 1)
        blocks = first // height, -(-stop // height)
        scales = self._scales(weight, blocks)
        order, width = self._order(weight, columns), scheme.block[1]
        by_row = torch.arange(first, stop) // height - blocks[0]
        in_groups = width > 0 and order is None and columns % width == 0

        def spread(of_blocks: Tensor) -> Tensor:
            """What the numbers are multiplied with, in a shape that fits theirs."""
            of_rows = of_blocks if height == 1 else of_blocks[by_row]
            if in_groups:
                return of_rows.unsqueeze(-1)
            if order is not None:
                return of_rows[:, order]
            return of_rows.repeat_interleave(width, 1)[:, :columns] if width else of_rows

        numbers = numbers.to(scales.dtype)
        if in_groups:
            numbers = numbers.unflatten(1, (columns // width, width))
        if scheme.second and not scheme.divides:
            numbers = numbers + 0.0  # ModelOpt reads -0 as 0
        if weight.zero_points is not None:
            numbers = numbers - spread(self._zero_points(weight, blocks)).to(scales.dtype)
        return (numbers * spread(scales)).reshape(stop - first, columns)

    def _scales(self, weight: _Weight, blocks: tuple[int, int]) -> Tensor:
        """Scales of rows of blocks, [blocks, blocks of columns]."""
        scales = self._rows_of_blocks(weight.scales, blocks)
        if scales.dtype == torch.uint8:
            scales = power_of_two(scales)
        elif scales.dtype.itemsize == 1:
            scales = scales.float()
        self._check_scales(weight.scales, scales)
        if weight.second is None:
            return scales
        second = super().read(weight.second.name).reshape(())
        self._check_scales(weight.second, second)
        if weight.scheme.divides and not second:
            raise HFCheckpointError(f"{self._where(weight.second)} is 0, which scales are divided by")
        return scales / second if weight.scheme.divides else scales * second

    def _check_scales(self, stored: StoredTensor, scales: Tensor) -> None:
        if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
            raise HFCheckpointError(f"{self._where(stored)} has a scale that is no finite number from 0 on")

    def _rows_of_blocks(self, stored: StoredTensor, blocks: tuple[int, int]) -> Tensor:
        read = super().read(stored.name, blocks if stored.shape else None)
        return read.reshape(blocks[1] - blocks[0], -1)

    def _zero_points(self, weight: _Weight, blocks: tuple[int, int]) -> Tensor:
        stored = weight.zero_points
        assert stored is not None
        if stored.dtype != torch.int32:
            return self._rows_of_blocks(stored, blocks)
        step = weight.scheme.per_item  # packed from row to row
        first = blocks[0] // step
        packed = self._rows_of_blocks(stored, (first, -(-blocks[1] // step)))
        unpacked = _unpacked(packed.t().contiguous(), weight.scheme).t()
        return unpacked[blocks[0] - first * step : blocks[1] - first * step]

    def _order(self, weight: _Weight, columns: int) -> Tensor | None:
        """The group of each column; None: columns are in order."""
        if weight.order is None:
            return None
        order, width = super().read(weight.order.name).long(), weight.scheme.block[1]
        if bool((order == -1).any()):  # as it was before calibration
            return None
        groups = columns // width
        valid = bool(((order >= 0) & (order < groups)).all())
        if not valid or bool((order.bincount(minlength=groups) != width).any()):
            raise HFCheckpointError(
                f"{self._where(weight.order)} does not put the columns into {groups} groups of {width}"
            )
        return order

    def _place(self, name: str) -> StoredTensor:
        weight = self._weights.get(name)
        return super()._place(name) if weight is None else weight.numbers


def _parts(weight: _Weight) -> Sequence[StoredTensor]:
    parts = (weight.numbers, weight.scales, weight.second, weight.zero_points, weight.order)
    return [part for part in parts if part is not None]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _unpacked(stored: Tensor, scheme: Scheme) -> Tensor:
    """The numbers of a stored matrix, one in an element."""
    if scheme.stored == "uint8":
        return unpack_e2m1(stored)
    if scheme.stored != "int32":
        return stored
    shifts = torch.arange(0, 32, scheme.bits, dtype=torch.int32)
    numbers = (stored.unsqueeze(-1) >> shifts) & ((1 << scheme.bits) - 1)
    return numbers.flatten(-2) - (1 << (scheme.bits - 1))
