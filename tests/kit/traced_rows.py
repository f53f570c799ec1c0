"""Rows of routed experts that tell which tokens and which weights they are of, for engines that have no model."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_retool.routed_experts import ExpertArray, is_missing
from megatron_retool.trajectory import Trajectory

OVERRIDES = ("learner.routing_replay=rollout", f"model.path={Path(__file__).parent / 'traced_model'}")
LAYERS, K, EXPERTS = 2, 3, 250


def rows_of(ids: Sequence[int], version: int, start: int = 0) -> ExpertArray:
    """uint8 [tokens from start, 2, 3]: in the first layer a checksum of the token and all before it, then the version.

    The last token is left out, as an engine does that has just sampled it.
    """
    rows, checksum = np.zeros((max(0, len(ids) - 1), LAYERS, K), np.uint8), 0
    for position, token in enumerate(ids[:-1]):
        checksum = zlib.crc32(int(token).to_bytes(4, "little"), checksum)
        rows[position, 0] = [checksum % 250, checksum // 250 % 250, checksum // 62500 % 250]
    rows[:, 1] = version
    return rows[start:]


def meta_info(body: Any, sampled: Sequence[int], version: int) -> dict[str, str]:
    """What SGLang adds to its answer to the request ``body``."""
    if not body.get("return_routed_experts") or not sampled:
        return {}
    rows = rows_of([*body["input_ids"], *sampled], version, body["routed_experts_start_len"])
    # As an engine that was not started by us sends them.
    return {"routed_experts": base64.b64encode(rows.astype(np.int32).tobytes()).decode()}


def check(trajectory: Trajectory, weights: bool = True) -> list[int]:
    """No row is another token's, or with ``weights`` of others than sampled the next token; the tokens without rows."""
    rows = trajectory.routed_experts
    assert rows is not None
    ids = [*trajectory.prompt_ids.tolist(), *trajectory.response_ids.tolist()]
    versions = np.array([-1] * len(trajectory.prompt_ids) + trajectory.weight_versions.tolist())
    known = np.flatnonzero(~is_missing(rows))
    assert np.array_equal(rows[known, 0], rows_of([*ids, 0], 0)[known, 0])
    for position in known if weights else ():
        assert (rows[position, 1] == versions[position + 1 :][versions[position + 1 :] >= 0][0]).all(), position
    return np.flatnonzero(is_missing(rows)).tolist()
