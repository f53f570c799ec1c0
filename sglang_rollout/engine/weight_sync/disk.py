"""Weights as safetensors on a file system that learner and engines share."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from sglang_rollout.engine.weight_sync.base import Bucket, ServerWeightSync


class WeightDirectory:
    """A directory that holds weights as a checkpoint, version_N, which appears complete or not at all.

    Args:
        directory: holds only the newest version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.bytes = 0
        self._partial = self.directory / "partial"
        self._files: dict[str, str] = {}

    def begin(self) -> None:
        """Start a version from its beginning."""
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._files, self.bytes = {}, 0

    def add(self, bucket: Bucket) -> None:
        """Write a bucket as one more safetensors file."""
        name = f"model-{len(set(self._files.values())) + 1:05d}.safetensors"
        # safetensors refuses tensors that share memory, as views of a bucket do.
        copies = {key: tensor.to("cpu", copy=True).contiguous() for key, tensor in bucket}
        save_file(copies, self._partial / name)
        self._files |= {key: name for key, _ in bucket}
        self.bytes += sum(tensor.nbytes for _, tensor in bucket)

    def finish(self, version: int, model_path: Path) -> Path:
        """Make the version appear, with the configuration beside ``model_path``; other versions go."""
        index = {"metadata": {"total_size": self.bytes}, "weight_map": self._files}
        (self._partial / "model.safetensors.index.json").write_text(json.dumps(index))
        for name in ("config.json", "generation_config.json"):
            if (model_path / name).is_file():
                shutil.copy(model_path / name, self._partial / name)
        final = self.directory / f"version_{version}"
        before = list(self.directory.glob("version_*"))
        if final in before:
            shutil.rmtree(final)
        os.replace(self._partial, final)
        for old in before:
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def newest(self) -> tuple[int, Path] | None:
        """The version that is there, and its directory."""
        result = []
        for path in self.directory.glob("version_*"):
            with contextlib.suppress(FileNotFoundError):  # it went when a newer one appeared
                result.append((path.stat().st_mtime_ns, int(path.name.removeprefix("version_")), path))
        return max(result)[1:] if result else None

    def remove(self) -> None:
        """Remove the directory with every version."""
        shutil.rmtree(self.directory, ignore_errors=True)


class DiskWeightSync(ServerWeightSync):
    """Weights as a safetensors checkpoint that the engines read.

    Args:
        directory: on a file system that learner and engines share; holds one version at a time.
        model_path: Hugging Face directory whose config.json the engines need beside the weights.
    """

    def __init__(self, engines: Sequence[str], *, directory: Path, model_path: str | Path, **common: Any) -> None:
        super().__init__(engines, **common)
        self._directory = WeightDirectory(Path(directory))
        self._model_path = Path(model_path)

    def _begin(self) -> None:
        self._directory.remove()
        self._directory.begin()

    def _send(self, bucket: Bucket) -> None:
        self._directory.add(bucket)

    def _give_up(self) -> None:
        self._directory.remove()

    def _end(self, version: int) -> None:
        final = self._directory.finish(version, self._model_path)
        self._call_all(
            "/update_weights_from_disk",
            {"model_path": str(final), "weight_version": str(version), "flush_cache": True},
        )

    def close(self) -> None:
        """Close the connections, and remove the files."""
        super().close()
        self._directory.remove()
