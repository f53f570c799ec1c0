"""A short campaign: three strikes at a run, which must lose nothing and leave nothing behind."""

from __future__ import annotations

import pytest

from tests.campaign.campaign import Campaign
from tests.campaign.demo import Prepared
from tests.campaign.plan import Plan
from tests.end_to_end.conftest import FinishedRun


@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_a_run_survives_three_strikes(demo_run: FinishedRun):
    runs_dir = demo_run.run_dir.parent / "campaign"
    runs_dir.mkdir()
    prepared = Prepared(demo_run.command_line.config, demo_run.run_dir, runs_dir)
    plan = Plan(7, stops=0.0, only=["driver", "learner rank", "sandbox server"])
    campaign = Campaign(prepared, plan, kills=3, longest_waits=(30.0, 6.0))
    campaign.run()
    assert not campaign.failed, (campaign.blows, campaign.run_violations)
