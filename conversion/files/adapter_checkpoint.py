"""Checkpoints that hold only adapters (LoRA): what they belong to, the merged model, and PEFT's files.

The learner's checkpoint then has the factors and no weight of the model, and ``hf/adapters.json`` says of which model
they are. ``MergedCheckpoint`` reads the two together as if it were a checkpoint of the merged model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping as MappingABC
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from conversion.files.checksums import FileRecord, record_files
from conversion.files.directory import COMPANIONS, FORMAT_NAME
from conversion.files.dist_checkpoint import DistCheckpoint, DistCheckpointError
from conversion.files.peft_files import write_peft
from conversion.files.quantized_checkpoint import open_source
from conversion.model.adapter_map import factor_mappings, peft_tensor, target_of
from conversion.model.mapping import Mapping, to_mcore
from conversion.model.weight_map import CheckpointPlace, WeightMap, checkpoint_place
from run_files.atomic_files import write_text
from untrusted import load_json

RECORD_NAME = "adapters.json"
PEFT_DIRECTORY = "adapter"
"""Directory of an export that holds PEFT's files."""


@dataclass(frozen=True)
class AdapterRecord:
    """What adapters are, and of which model.

    Attributes:
        base: directory whose weights the learner read.
        base_checksum: ``weights_checksum`` of it.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str
    base_checksum: str

    def write(self, companions: Path) -> None:
        """Write the record into ``companions``, a checkpoint's directory ``hf``."""
        write_text(companions / RECORD_NAME, json.dumps(asdict(self), indent=2) + "\n")


def read_record(checkpoint: Path) -> AdapterRecord | None:
    """What a checkpoint's adapters are; None: it holds a whole model.

    Raises:
        DistCheckpointError: the record is not one.
    """
    return record_of(checkpoint / COMPANIONS)


def record_of(directory: Path) -> AdapterRecord | None:
    """What the adapters are that ``AdapterRecord.write`` has described in ``directory``; None: nothing is there.

    Raises:
        DistCheckpointError: the record is not one.
    """
    path = directory / RECORD_NAME
    if not path.is_file():
        return None
    try:
        result = load_json(path.read_bytes())
        targets = tuple(str(target) for target in result["targets"])
        base, checksum = str(result["base"]), str(result["base_checksum"])
        return AdapterRecord(int(result["rank"]), float(result["alpha"]), targets, base, checksum)
    except (ValueError, KeyError, TypeError) as error:
        raise DistCheckpointError(f"{path} does not say what the adapters are: {error!r}") from error


def weight_files(directory: Path) -> list[str]:
    """Names of the files that hold a model's weights, safetensors or Megatron-Core's."""
    pattern = "*.distcp" if (directory / FORMAT_NAME).is_file() else "*.safetensors"
    return sorted(path.name for path in directory.glob(pattern))


def weights_checksum(records: MappingABC[str, FileRecord]) -> str:
    """One checksum of all ``weight_files``, by the record of each."""
    digest = xxhash.xxh3_128()
    for name, record in sorted(records.items()):
        digest.update(f"{name} {'+'.join(part.checksum for part in record.parts)}\n".encode())
    return digest.hexdigest()


class MergedCheckpoint(DistCheckpoint):
    """Adapters and their base, read as the merged model in the adapters' dtype.

    Args:
        directory: checkpoint of the adapters.
        base: where their base is now; None: where it was.
        verify: hold the base against its checksum, which reads all of it.

    Raises:
        DistCheckpointError: the base is not there, or is another model than the adapters were trained on.
        HFCheckpointError, UnsupportedArchitecture: the base cannot be read.
    """

    def __init__(
        self,
        directory: Path,
        record: AdapterRecord,
        weight_map: WeightMap,
        base: str | Path | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__(directory)
        self._adapters = DistCheckpoint(directory)
        self.record = record
        source = Path(base if base is not None else record.base)
        if not source.is_dir() or not weight_files(source):
            raise DistCheckpointError(
                f"{directory} holds adapters of {record.base}, and {source} has no weights: pass --base-dir with the "
                "model that they were trained on"
            )
        if verify and weights_checksum(record_files(source, weight_files(source))) != record.base_checksum:
            raise DistCheckpointError(
                f"{directory} holds adapters of {record.base}, and the weights in {source} are others: pass --base-dir "
                "with the model that they were trained on"
            )
        self._base = DistCheckpoint(source) if (source / FORMAT_NAME).is_file() else open_source(source)
        self._weight_map = weight_map
        self._mappings = {checkpoint_place(mapping, weight_map.architecture): mapping for mapping in weight_map}
        first = next(mapping for mapping in weight_map if target_of(mapping) in record.targets)
        factor = next(factor_mappings(first, record.rank))
        self._dtype = self._adapters.dtype(checkpoint_place(factor, weight_map.architecture))

    def dtype(self, place: CheckpointPlace) -> torch.dtype:
        """The adapters' dtype, to which the learner casts the base; buffers stay in float32."""
        return self._mappings[place].cast_to(self._dtype) or torch.float32

    def shape(self, place: CheckpointPlace) -> tuple[int, ...]:
        """The parameter's shape, without padding of the vocabulary."""
        return self._mappings[place].mcore_shape

    def lies_in_order(self, place: CheckpointPlace) -> bool:
        """False: what is merged lies nowhere."""
        return False

    def read(self, place: CheckpointPlace, shape: tuple[int, ...]) -> Tensor:
        """The merged parameter, rounded once to its dtype."""
        mapping = self._mappings[place]
        if isinstance(self._base, DistCheckpoint):
            weight = self._base.read(place, shape)
        else:
            weight = self._base.read_shard(mapping)
        weight = weight.to(self.dtype(place))
        if target_of(mapping) not in self.record.targets:
            return weight
        factors = self.factors(mapping)
        scale = self.record.alpha / self.record.rank
        stems = [name.removesuffix(".weight") for name in mapping.hf_names]
        products = [factors[f"{n}.lora_B.weight"].float() @ factors[f"{n}.lora_A.weight"].float() for n in stems]
        return (weight.float() + scale * to_mcore(mapping, products)).to(weight.dtype)

    def factors(self, mapping: Mapping) -> dict[str, Tensor]:
        """The factors of an adapted weight, A [rank, in] and B [out, rank], by PEFT's names without their prefix."""
        parts: dict[str, dict[int, Tensor]] = {}
        for factor in factor_mappings(mapping, self.record.rank):
            name, first = peft_tensor(factor.hf_names[0])
            place = checkpoint_place(factor, self._weight_map.architecture)
            parts.setdefault(name, {})[first] = self._adapters.read(place, factor.mcore_shape)
        return {name: torch.cat([rows[first] for first in sorted(rows)]) for name, rows in parts.items()}

    def write_peft(self, directory: Path) -> None:
        """Write the adapters as ``peft`` and engines read them: adapter_config.json and adapter_model.safetensors.

        Experts have a tensor each, as engines take them; transformers fuses experts, and ``peft`` does not load those.
        """
        adapted = [mapping for mapping in self._weight_map if target_of(mapping) in self.record.targets]
        tensors = {name: tensor for mapping in adapted for name, tensor in self.factors(mapping).items()}
        write_peft(directory, tensors, self.record.rank, self.record.alpha, self.record.base)
