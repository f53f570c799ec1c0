"""The same seed strikes the same victims, and every kind has its turn."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron_retool.config import load_config
from tests.campaign.campaign import Blow, Campaign, RunStandsStill
from tests.campaign.plan import DRIVER, KINDS, VARIANTS, Plan, by_kind, kind_of, variant_of

COMMANDS = {
    1: "python -m megatron_retool train",
    10: "python -S -E /a/sglang_rollout/engine/process_guard.py 9 1 python -m sglang.launch_server --port 1",
    11: "python -m sglang.launch_server --port 1",
    12: "sglang::scheduler",
    13: "sglang::detokenizer",
    14: "ray::EngineWorker.start",
    15: "ray::LearnerWorker",
    16: "ray::LearnerWorker.update",
    17: "python -m megatron_retool.rewards.worker /a/reward.py:compute_score {} 1024 1",
    18: "python -m tools.code_interpreter.server --die-with-parent",
    19: "python -I /a/tools/code_interpreter/warden.py {} 18 5 6",
    20: "/a/ray/core/src/ray/raylet/raylet --raylet_socket_name=x",
    21: "/a/ray/core/src/ray/gcs/gcs_server --log_dir=x",
    22: "python -c from multiprocessing.resource_tracker import main",
}


def test_processes_are_told_by_their_command_lines():
    found = by_kind(1, COMMANDS)
    assert found == {
        DRIVER: [1], "engine guard": [10], "SGLang server": [11], "SGLang scheduler": [12], "SGLang detokenizer": [13],
        "EngineWorker": [14], "learner rank": [15, 16], "reward process": [17], "sandbox server": [18],
        "sandbox": [19], "Ray's raylet": [20], "Ray's GCS": [21],
    }  # fmt: skip
    assert kind_of(COMMANDS[22]) is None and set(found) <= {DRIVER, *(kind for kind, _ in KINDS)}


def test_runs_take_the_variants_in_turn():
    assert [variant_of(number, ["demo", "rlimits"]) for number in (1, 2, 3)] == ["demo", "rlimits", "demo"]
    for settings in VARIANTS.values():
        load_config(None, settings)
        for setting in settings:
            file = setting.partition("=")[2].partition(":")[0]
            assert "/" not in file or Path(file).is_file()


class EndingRun:
    """A run that ends with each of ``codes``, one after another."""

    def __init__(self, codes):
        self.codes, self.starts = list(codes), 0

    def exit_code(self):
        return self.codes[0]

    def start(self):
        self.codes.pop(0)
        self.starts += 1

    def processes(self):
        return {}

    def tail(self):
        return ""


def test_a_strike_may_end_the_run_late_but_once(tmp_path):
    campaign = Campaign(None, Plan(1), 1)
    campaign.blows.append(Blow(tmp_path.name, "Ray's GCS", "SIGTERM", 1.0, 1, outcome="went on"))
    run = EndingRun([85, 0])
    campaign._to_the_end(run, tmp_path)
    assert run.starts == 1 and campaign.blows[-1].outcome == "went on, ended late with 85; resumed"
    with pytest.raises(RunStandsStill, match="ended with 85 without a strike"):
        campaign._to_the_end(EndingRun([85, 85, 0]), tmp_path)
    with pytest.raises(RunStandsStill, match="without a strike"):
        campaign._to_the_end(EndingRun([85, 0]), tmp_path / "another")


def test_a_seed_is_a_campaign():
    found = by_kind(1, COMMANDS)

    def strikes(seed: int):
        plan = Plan(seed, stops=0.5)
        return [(plan.moment(60), plan.strike(found)) for _ in range(40)]

    assert strikes(3) == strikes(3) != strikes(4)
    drawn = [strike for _, strike in strikes(3)]
    assert {strike.kind for strike in drawn[: len(found)]} == set(found)
    assert all(strike.process in found[strike.kind] for strike in drawn)
    assert all(0 <= moment <= 60 for moment, _ in strikes(3))
    stops = [strike for strike in drawn if strike.signal is signal.SIGSTOP]
    assert 5 < len(stops) < 35
    assert {strike.continues_after is None for strike in stops} == {True, False}


def test_a_share_of_the_strikes_asks_to_end():
    plan = Plan(5, stops=0.2, terms=0.4)
    signals = [plan.strike({"sandbox": [2]}).signal for _ in range(300)]
    shares = {each: signals.count(each) / 300 for each in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL)}
    assert shares == pytest.approx({signal.SIGTERM: 0.4, signal.SIGSTOP: 0.2, signal.SIGKILL: 0.4}, abs=0.08)
    assert {str(plan.strike({DRIVER: [1]})) for _ in range(50)} >= {"SIGTERM", "SIGKILL"}


def test_a_stopped_driver_always_goes_on():
    plan = Plan(0, stops=1.0, only=[DRIVER])
    assert all(plan.strike({DRIVER: [1], "sandbox": [2]}).continues_after for _ in range(50))
    assert plan.strike({"sandbox": [2]}) is None
