"""What clients ask about sessions, runs and checkpoints, and do to checkpoints: the protocol's REST part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_retool.tinker.checkpoints import expiry
from megatron_retool.tinker.external_weights import URL_SECONDS
from megatron_retool.tinker.requests import KINDS, CheckpointPath, checkpoint_path, lifetime
from megatron_retool.tinker.run_store import RECORD_NAME
from megatron_retool.tinker.service import TinkerService
from megatron_retool.tinker.training_run import TrainingRun
from sglang_rollout.gateway.errors import ApiError, invalid
from sglang_rollout.gateway.fields import Json

Answer = dict[str, Any]
MOST_LISTED = 1000


def page(query: Json, items: Sequence[Any]) -> tuple[list[Any], Answer]:
    """The part of a list that ?offset and ?limit ask for, and its cursor.

    Raises:
        ApiError: 400, they are no numbers.
    """
    numbers = {}
    for name, default, most in (("offset", 0, 1 << 31), ("limit", 20, MOST_LISTED)):
        written = query.get(name, str(default))
        if not (written.isascii() and written.isdecimal() and len(written) < 12):
            raise invalid(name, "expected a whole number that is not negative")
        numbers[name] = min(int(written), most)
    offset, limit = numbers["offset"], numbers["limit"]
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return list(items[offset : offset + limit]), cursor


class Rest:
    """Answers by method, without HTTP. Every one raises ``ApiError`` with the status that fits."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service

    def training_run(self, identifier: str) -> Answer:
        """One run."""
        return self._described(self._service.training.find(identifier))

    def training_runs(self, query: Json) -> Answer:
        """A page of all runs."""
        runs, cursor = page(query, self._service.training.all())
        return {"training_runs": [self._described(each) for each in runs], "cursor": cursor}

    def run_checkpoints(self, identifier: str) -> Answer:
        """The named checkpoints of a run."""
        run = self._service.training.find(identifier)
        return {"checkpoints": [each.described() for each in self._service.checkpoints.named(run.id)]}

    def checkpoints(self, query: Json) -> Answer:
        """A page of all named checkpoints."""
        result, cursor = page(query, self._service.checkpoints.named())
        return {"checkpoints": [each.described() for each in result], "cursor": cursor}

    def sessions(self, query: Json) -> Answer:
        """A page of all sessions' ids."""
        result, cursor = page(query, [each.record.id for each in self._service.sessions.all()])
        return {"sessions": result, "cursor": cursor}

    def session(self, identifier: str) -> Answer:
        """A session's runs and samplers."""
        session = self._service.sessions.find(identifier)
        runs = [each.id for each in self._service.training.all() if each.record.session_id == identifier]
        return {"training_run_ids": runs, "sampler_ids": list(session.samplers)}

    def sampler(self, identifier: str) -> Answer:
        """What a sampler samples from."""
        result = self._service.sessions.sampler(identifier)
        path = None if result.path is None else str(result.path)
        return {"sampler_id": identifier, "base_model": result.base_model, "model_path": path}

    def weights_info(self, body: Json) -> Answer:
        """Base model and adapter settings of a checkpoint."""
        checkpoint = self._service.checkpoints.find(checkpoint_path(body, "tinker_path"), "tinker_path")
        lora = checkpoint.lora
        return {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": lora.rank,
            "train_unembed": lora.train_unembed,
            "train_mlp": lora.train_mlp,
            "train_attn": lora.train_attn,
        }

    async def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint."""
        await self._service.checkpoints.delete(self._service.checkpoints.find(path).path)

    async def publish(self, path: CheckpointPath, public: bool) -> None:
        """Make a checkpoint public, or private again."""
        checkpoints = self._service.checkpoints
        await checkpoints.change(checkpoints.find(path), public=public)

    async def set_lifetime(self, path: CheckpointPath, body: Json) -> None:
        """Set when a checkpoint expires."""
        checkpoints = self._service.checkpoints
        await checkpoints.change(checkpoints.find(path), ttl=(lifetime(body),))

    def external_weights_urls(self, path: CheckpointPath, root: str) -> Answer:
        """URLs of the files, which need no key.

        Args:
            root: of this server, as the client called it.
        """
        checkpoint = self._service.checkpoints.find(path)
        if path.kind != "external_weights":
            raise invalid("checkpoint", f"{path} has no URLs: take one of save_weights_external")
        directory = self._service.checkpoints.directory(checkpoint.path)
        token = self._service.downloads.open(directory)
        names = sorted(each.name for each in directory.iterdir() if each.name != RECORD_NAME)
        return {"urls": {name: f"{root}/{token}/{name}" for name in names}, "expires": expiry(int(URL_SECONDS))}

    def get_info(self, identifier: str) -> Answer:
        """What a client asks about its run."""
        record = self._service.training.find(identifier).record
        return {
            "type": "get_info",
            "model_id": record.id,
            "is_lora": True,
            "lora_rank": record.lora.rank,
            "model_name": record.base_model,
            "optimizer_config": {"type": "adamw"},
            "model_data": {
                "arch": "lora",
                "model_name": record.base_model,
                "tokenizer_id": self._service.model.tokenizer,
            },
        }

    def capabilities(self) -> Answer:
        """The models that the server offers."""
        model = self._service.model
        return {
            "supported_models": [
                {
                    "model_name": name,
                    "max_context_length": model.context,
                    "trainable": True,
                    "sampleable": True,
                }
                for name in model.names
            ]
        }

    def _described(self, run: TrainingRun) -> Answer:
        checkpoints = self._service.checkpoints.named(run.id)

        def last(kind: str) -> Answer | None:
            return next((each.described() for each in checkpoints if each.path.kind == kind), None)

        return {
            "training_run_id": run.id,
            "base_model": run.record.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.record.lora.rank,
            "corrupted": run.lost is not None,
            "last_request_time": run.record.last_request,
            "last_checkpoint": last("weights"),
            "last_sampler_checkpoint": last("sampler_weights"),
            "user_metadata": run.record.user_metadata,
        }


def path_of_route(run: str, kind: str, name: str) -> CheckpointPath:
    """The checkpoint that a route names.

    Raises:
        ApiError: 404, there is no such kind.
    """
    if kind not in KINDS:
        raise ApiError(404, f"there is no kind of checkpoint {kind!r:.60}", code="not_found")
    return CheckpointPath(run, kind, name)
