"""What the checksums of an engine's tensors must be, computed from the tensors that were sent to it.

SGLang hashes its own parameters (``/weights_checker``), which are not the Hugging Face tensors: query, key and value
projections lie in one tensor, gate and up projections in another, experts are stacked, and tensor parallelism cuts all
of them. ``ExpectedChecksums`` puts the sent tensors together in the same way and hashes them with the same functions:
the first 8 bytes of SHA-256 for tensors on CPU, SGLang's tiled 64-bit hash for those on GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_retool.errors import InputError
from sglang_rollout.engine.weight_sync.errors import WeightSyncError

_UINT32 = 0xFFFFFFFF
_HASH_SEED = 0x243F6A88
_TILE_WORDS = 8192
_TILES_AT_ONCE = 512
_VOCABULARY_PADDING = 64

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_PROJECTION = re.compile(
    r"^(?P<prefix>.*\.)(?P<projection>q_proj|k_proj|v_proj|gate_proj|up_proj)\.(?P<kind>weight|bias)$"
)
_EXPERT = re.compile(r"^(?P<prefix>.*\.experts)\.(?P<expert>\d+)\.(?P<projection>gate_proj|up_proj|down_proj)\.weight$")


class ChecksumError(InputError):
    """The engines' layout is one whose checksums cannot be predicted here."""


class ExpectedChecksums:
    """Collects what is sent and says which engine tensors differ from it.

    Args:
        infos: /server_info of each engine, by base URL.

    Raises:
        ChecksumError: quantised engines, or experts split over ranks.
    """

    def __init__(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        quantized = [url for url, info in infos.items() if info.get("quantization")]
        if quantized:
            raise ChecksumError(
                "weight_sync.verify=true compares tensors bit by bit, which engines that quantise what they get do "
                f"not allow ({', '.join(quantized)}): set weight_sync.verify=false"
            )
        self._layouts = {
            url: _Layout(
                int(info.get("tp_size") or 1), str(info.get("device") or "cuda").startswith("cpu"), _kv_heads(info)
            )
            for url, info in infos.items()
        }
        if any(int(info.get("ep_size") or 1) > 1 for info in infos.values()):
            raise ChecksumError(
                "weight_sync.verify=true does not know how engines lay out experts under expert parallelism: set "
                "weight_sync.verify=false, or rollout.engine.expert_parallel_size=1"
            )
        self._tensors: dict[str, dict[Any, Tensor]] = {}

    def add(self, bucket: Sequence[tuple[str, Tensor]]) -> None:
        """Remember a bucket as it was sent (a copy on CPU: the sender may reuse its memory)."""
        for name, tensor in bucket:
            engine_name, place = _engine_place(name)
            self._tensors.setdefault(engine_name, {})[place] = tensor.detach().to("cpu", copy=True)

    def compare(self, answers: Mapping[str, Mapping[str, Any]]) -> int:
        """Compare with the engines' answers to /weights_checker; the number of tensors that agree.

        Raises:
            WeightSyncError: naming engines and tensors.
        """
        agreed, faults, culprits = 0, [], []
        for url, answer in answers.items():
            layout = self._layouts[url]
            wrong: set[str] = set()
            missing: set[str] = set()
            for rank in answer["ranks"]:
                tensor_rank = _tensor_rank(rank["parallelism_info"])
                for name, result in rank["checksums"].items():
                    parts = self._tensors.get(name)
                    if parts is None and name == "lm_head.weight":
                        # Tied embeddings: engines that keep a separate output layer copy the input's.
                        parts = self._tensors.get("model.embed_tokens.weight")
                    if parts is None:
                        missing.add(name)
                    elif _checksum(layout.shard(name, parts, tensor_rank), layout.on_cpu) != result:
                        wrong.add(name)
                    else:
                        agreed += 1
            if wrong:
                faults.append(f"engine {url} holds other values than were sent in {_listed(wrong)}")
            if missing:
                faults.append(f"engine {url} has tensors that were never sent: {_listed(missing)}")
            if wrong or missing:
                culprits.append(url)
        if faults:
            raise WeightSyncError("weight sync verification failed: " + "; ".join(faults), culprits)
        return agreed


class _Layout:
    """How an engine lays out tensors of a tensor-parallel rank."""

    def __init__(self, tensor_parallel: int, on_cpu: bool, kv_heads: int | None) -> None:
        self.tensor_parallel = tensor_parallel
        self.on_cpu = on_cpu
        self.kv_heads = kv_heads

    def shard(self, name: str, parts: Mapping[Any, Tensor], rank: int) -> Tensor:
        if name.endswith("experts.w13_weight"):
            return torch.stack([torch.cat([self._rows(e[0], rank), self._rows(e[1], rank)]) for e in _by_expert(parts)])
        if name.endswith("experts.w2_weight"):
            return torch.stack([self._columns(e[2], rank) for e in _by_expert(parts)])
        if ".qkv_proj." in name:
            return torch.cat([self._rows(parts[0], rank), self._heads(parts[1], rank), self._heads(parts[2], rank)])
        if ".gate_up_proj." in name:
            return torch.cat([self._rows(parts[0], rank), self._rows(parts[1], rank)])
        tensor = parts[0]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return self._columns(tensor, rank)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            return self._vocabulary(tensor, rank)
        return tensor

    def _rows(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(self.tensor_parallel)[rank]

    def _columns(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(self.tensor_parallel, dim=1)[rank].contiguous()

    def _heads(self, tensor: Tensor, rank: int) -> Tensor:
        if self.kv_heads is not None and self.kv_heads < self.tensor_parallel:
            # More ranks than KV heads: neighbouring ranks hold the same one.
            return tensor.chunk(self.kv_heads)[rank * self.kv_heads // self.tensor_parallel]
        return self._rows(tensor, rank)

    def _vocabulary(self, tensor: Tensor, rank: int) -> Tensor:
        padded = -(-len(tensor) // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
        if padded != len(tensor):
            tensor = torch.cat([tensor, tensor.new_zeros(padded - len(tensor), *tensor.shape[1:])])
        return self._rows(tensor, rank)


def _engine_place(name: str) -> tuple[str, Any]:
    """Engine tensor that a Hugging Face tensor is part of, and its place in it."""
    if result := _EXPERT.match(name):
        stacked = "w2_weight" if result["projection"] == "down_proj" else "w13_weight"
        part = {"gate_proj": 0, "up_proj": 1, "down_proj": 2}[result["projection"]]
        return f"{result['prefix']}.{stacked}", (int(result["expert"]), part)
    if result := _PROJECTION.match(name):
        fused, part = _FUSED[result["projection"]]
        return f"{result['prefix']}{fused}.{result['kind']}", part
    return name, 0


def _by_expert(parts: Mapping[Any, Tensor]) -> list[dict[int, Tensor]]:
    experts: dict[int, dict[int, Tensor]] = {}
    for (expert, part), tensor in parts.items():
        experts.setdefault(expert, {})[part] = tensor
    return [experts[expert] for expert in sorted(experts)]


def _kv_heads(info: Mapping[str, Any]) -> int | None:
    """KV heads of the engine's model, where its configuration can be read on this host."""
    try:
        config = json.loads((Path(str(info.get("model_path"))) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    heads = config.get("num_key_value_heads")
    return int(heads) if heads else None


def _tensor_rank(places: Any) -> int:
    place = places[0] if isinstance(places, list) else places
    return int(place["tp_rank"])


def _listed(names: set[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _checksum(tensor: Tensor, on_cpu: bool) -> str:
    if on_cpu:
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        return hashlib.sha256(raw.data).digest()[:8].hex()
    return f"{gpu_tensor_hash(tensor):016x}"


def gpu_tensor_hash(tensor: Tensor) -> int:
    """SGLang's hash of a GPU tensor (sglang.kernels.ops.memory.gpu_tensor_hash), in torch operations on any device.

    Each 32-bit word is mixed with its position; words of a tile of 8192 are added, mixed again, and tiles are added.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() == 0:
        return 0
    if raw.numel() % 4:
        raw = torch.cat([raw, raw.new_zeros(4 - raw.numel() % 4)])
    words = raw.view(torch.int32)
    count = len(words)
    length = (count * 4) & _UINT32
    seeds = (_HASH_SEED, (_HASH_SEED * 0x9E3779B1 ^ 0xDEADBEEF) & _UINT32)
    total = 0
    step = _TILE_WORDS * _TILES_AT_ONCE
    for start in range(0, count, step):
        part = words[start : start + step].to(torch.int64) & _UINT32
        index = torch.arange(start, start + len(part), dtype=torch.int64, device=part.device) & _UINT32
        halves = []
        for seed, factor, shift in ((seeds[0], 0x27D4EB2D, 15), (seeds[1], 0x165667B1, 13)):
            rotated = ((index << shift) | (index >> (32 - shift))) & _UINT32
            mixed = _fmix32(part ^ (((index * factor + seed) & _UINT32) ^ rotated))
            padding = -len(mixed) % _TILE_WORDS
            tiles = torch.cat([mixed, mixed.new_zeros(padding)]).view(-1, _TILE_WORDS).sum(1) & _UINT32
            halves.append(_fmix32(tiles ^ length))
        # Wraps modulo 2**64 like the kernel's unsigned sum.
        total += int(((halves[0] << 32) | halves[1]).sum())
    return _splitmix64(total & (2**64 - 1))


def _fmix32(value: Tensor) -> Tensor:
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & _UINT32
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & _UINT32
    return value ^ (value >> 16)


def _splitmix64(value: int) -> int:
    mask = 2**64 - 1
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & mask
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
