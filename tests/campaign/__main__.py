"""Random kills, requests to end and stops on the small demo: python -m tests.campaign --kills 50 --seed 1

Victims come from the whole process tree, at random moments. A run that ends is started again by the same command. Each
must reach its last step, with every row, trajectory and checkpoint there, with the training values of a run that nobody
struck (every second run replays that one's rollouts), and must leave no process, shared memory or temporary file.
The exit status is 1 where one of this does not hold. The first campaign in a directory prepares the demo there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.campaign.campaign import Blow, Campaign, write_blow
from tests.campaign.demo import prepare
from tests.campaign.plan import DRIVER, KINDS, VARIANTS, Plan


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="strikes in all (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stops", type=float, default=0.2, help="share of SIGSTOP among them (%(default)s)")
    parser.add_argument("--terms", type=float, default=0.2, help="share of SIGTERM among them (%(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="a setting of the runs, such as tools.code_interpreter.isolation=rlimits; may be repeated. Values are no "
        "longer compared with those of the run that nobody struck",
    )  # fmt: skip
    parser.add_argument(
        "--variant", action="append", default=[], dest="variants", choices=[*VARIANTS],
        help="what the runs are, in turn; may be repeated: isolations of the sandbox, an agent on the gateway, or the "
        "demo (default), whose values alone are compared with those of the run that nobody struck",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=6, help="training steps of a run (%(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds without a step that are too many")
    parser.add_argument(
        "--only", action="append", default=[], choices=[DRIVER, *(kind for kind, _ in KINDS)], metavar="VICTIM",
        help="strike these alone; may be repeated: %(choices)s",
    )  # fmt: skip
    parser.add_argument("--directory", type=Path, default=Path("runs/campaign"), help="for runs and demo (%(default)s)")
    options = parser.parse_args()
    console = Console(soft_wrap=not sys.stdout.isatty())
    directory = options.directory.absolute()
    with console.status("the demo without interruption"):
        prepared = prepare(directory, options.steps)
    file = directory / f"strikes_{time.strftime('%Y%m%d-%H%M%S')}.jsonl"

    def report(blow: Blow) -> None:
        write_blow(file, blow)
        recovery = "" if blow.recovery is None else f", {blow.recovery:.0f} s"
        console.print(
            f"{len(campaign.blows):3} {blow.run} after {blow.moment:5.1f} s, step {blow.step:2}: {blow.signal} of "
            f"{blow.victim}: {blow.outcome}{recovery}",
            highlight=False,
        )

    plan = Plan(options.seed, stops=options.stops, terms=options.terms, only=options.only)
    campaign = Campaign(
        prepared, plan, options.kills, limit=options.limit, report=report, variants=options.variants or ["demo"],
        settings=options.settings,
    )  # fmt: skip
    campaign.run()
    console.print(table_of(campaign.blows))
    for blow in campaign.blows:
        for violation in blow.violations:
            console.print(f"[red]{blow.run}, {blow.victim}:[/] {escape(violation)}")
    for name, found in campaign.run_violations.items():
        for violation in found:
            console.print(f"[red]{name}:[/] {escape(violation)}")
    console.print(f"{len(campaign.blows)} strikes at {len(campaign.run_violations)} runs; {file}")
    return 1 if campaign.failed else 0


def table_of(blows: list[Blow]) -> Table:
    table = Table(title="strikes")
    for name in ("run", "victim", "signal", "moment", "step", "outcome", "recovery"):
        table.add_column(name, justify="right" if name in ("moment", "step", "recovery") else "left")
    for blow in blows:
        recovery = "" if blow.recovery is None else f"{blow.recovery:.0f} s"
        outcome = f"[red]{blow.outcome}[/]" if blow.violations else blow.outcome
        table.add_row(blow.run, blow.victim, blow.signal, f"{blow.moment:.1f} s", str(blow.step), outcome, recovery)
    return table


if __name__ == "__main__":
    sys.exit(main())
