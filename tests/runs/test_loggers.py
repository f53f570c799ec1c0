"""Each service's own package writes to a directory of the test, without a network, and is read back."""

import csv
import errno
import importlib.util
import io
import json
import math
import sqlite3

import pytest
from rich.console import Console

from megatron_retool.config import ConfigError, load_config
from megatron_retool.loop.samples import sample_of
from megatron_retool.runs import loggers
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.loggers import LoggedRun, Logger, check_loggers
from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import FinishReason, Trajectory

SAMPLES = [{"question": "1+1?", "correct": 1.0}, {"question": "2+2?", "correct": 0.0}]


class Remembering(Logger):
    """A logger of one's own."""

    calls: list = []

    def __init__(self, run, *, fails=False):
        super().__init__(run)
        self.fails = fails
        self.calls.append(("made", run.project, run.name, run.first_step))

    def log(self, step, metrics):
        if self.fails:
            raise KeyError("no server")
        self.calls.append((step, dict(metrics)))

    def log_samples(self, step, rows):
        self.calls.append((step, list(rows)))

    def close(self):
        self.calls.append("closed")


OWN = f"{__name__}:Remembering"


def trained(directory, name, step, *, samples=True):
    """Log one step, as a run that begins at ``step`` does."""
    with MetricLogger(directory, [name], first_step=step, project="project", config={"learner": {"lr": 0.1}},
                      console=Console(file=io.StringIO(), width=400)) as log:  # fmt: skip
        log.log(step, {"val-core/all/acc/mean@4": step / 2, "other": math.nan})
        if samples:
            log.log_samples(step, SAMPLES)
        assert log._write_errors.count == 0


def test_a_logger_of_ones_own_gets_everything(tmp_path):
    Remembering.calls.clear()
    with MetricLogger(tmp_path / "run", [OWN, "jsonl"], first_step=3, project="p") as log:
        log.log(3, {"a": 1})
        log.log_samples(3, SAMPLES)
        log.log_samples(4, [])
    assert Remembering.calls == [("made", "p", "run", 3), (3, {"a": 1.0}), (3, SAMPLES), "closed"]


def test_what_a_logger_raises_ends_nothing(tmp_path):
    out = io.StringIO()
    with MetricLogger(tmp_path, [OWN, "jsonl"], console=Console(file=out, width=200),
                      logger_kwargs={OWN: {"fails": True}}) as log:  # fmt: skip
        log.log(1, {"a": 1})
        log.log(2, {"a": 2})
    assert out.getvalue().count("no server") == 1
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == {"step": 2, "a": 2.0, "monitor/write_errors": 1.0}


def table(directory):
    with (directory / "metrics.csv").open(newline="") as handle:
        return list(csv.reader(handle))


def test_the_csv_table_grows_columns_and_rows(tmp_path):
    with MetricLogger(tmp_path, ["csv"], console=Console(file=io.StringIO())) as log:
        log.log(0, {"val/acc": 0.1})
        log.log(1, {"b": 1 / 3, "a, with a comma": math.nan})
        log.log(2, {"b": -math.inf, "val/acc": 1})
        assert log._write_errors.count == 0
    assert table(tmp_path) == [
        ["step", "val/acc", "b", "a, with a comma"],
        ["0", "0.1", "", ""],
        ["1", "", repr(1 / 3), "nan"],
        ["2", "1.0", "-inf", ""],
    ]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("torn", [b"3,0.5", b"3,0.5\n", b"3,0.5,7,8,9\n", b"\xff\xfe\n", b"3,0.5,7,8", b""])
def test_a_resumed_run_repeats_rows_of_the_csv_table_once(tmp_path, torn):
    with MetricLogger(tmp_path, ["csv"]) as log:
        for step in range(3):
            log.log(step, {"a": step, "b": 0})
        log.log(2, {"a": 2, "b": 0, "c": 1})
    with (tmp_path / "metrics.csv").open("ab") as handle:
        handle.write(torn)  # the process died here
    with MetricLogger(tmp_path, ["csv"], first_step=2) as log:
        log.log(2, {"a": 20, "b": 0, "c": 1})
        log.log(3, {"d": 1})
    assert table(tmp_path) == [
        ["step", "a", "b", "c", "d"],
        ["0", "0.0", "0.0", "", ""],
        ["1", "1.0", "0.0", "", ""],
        ["2", "20.0", "0.0", "1.0", ""],
        ["3", "", "", "", "1.0"],
    ]


def test_a_csv_table_of_someone_else_is_begun_anew(tmp_path):
    (tmp_path / "metrics.csv").write_text("a;b\n1;2\n")
    with MetricLogger(tmp_path, ["csv"], first_step=1) as log:
        log.log(1, {"a": 1})
    assert table(tmp_path) == [["step", "a"], ["1", "1.0"]]


@pytest.mark.parametrize("columns", ["same", "new"])
def test_rows_that_the_disk_had_no_room_for_come_with_the_next(tmp_path, monkeypatch, columns):
    with MetricLogger(tmp_path, ["csv"], console=Console(file=io.StringIO())) as log:
        log.log(1, {"a": 1})
        before = table(tmp_path)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            log.log(2, {"a": 2} if columns == "same" else {"b": 2})
        assert table(tmp_path) == before and log._write_errors.count == 1
        log.log(3, {"a": 3})
    assert [row[0] for row in table(tmp_path)] == ["step", "1", "2", "3"]
    assert table(tmp_path)[2] == (["2", "2.0"] if columns == "same" else ["2", "", "2.0"]) + [""]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["trainer.loggers=[tensorbored]"],
            "unknown logger 'tensorbored'; known are console, jsonl, csv, tensorboard, wandb",
        ),
        (["trainer.loggers=[gone.module:Logger]"], "there is no module gone"),
        ([f"trainer.loggers=['{OWN}']", f"trainer.logger_kwargs={{'{OWN}': {{colour: 1}}}}"], "colour"),
        (["trainer.logger_kwargs={wandb: {entity: me}}"], "wandb is none of trainer.loggers"),
    ],
)
def test_a_logger_that_cannot_be_used_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check_loggers(load_config(None, overrides).trainer)


@pytest.mark.parametrize("name", loggers.PACKAGES)
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=f"names {name}, which is not installed: pip install {name}"):
        check_loggers(load_config(None, [f"trainer.loggers=[{name}]"]).trainer)


def test_the_id_of_a_run_is_kept_in_its_folder(tmp_path):
    run = LoggedRun(tmp_path)
    assert run.run_id("wandb") == LoggedRun(tmp_path).run_id("wandb") != run.run_id("mlflow")


def test_rows_of_samples():
    trajectory = Trajectory([1], [2], [True], [-0.5], [0], [0], 0, 0, FinishReason.STOP, reward=-1.0,
                            reward_info={"pred": "3", "acc": 0.0}, extra_info={"ground_truth": "2"})  # fmt: skip
    assert sample_of(trajectory, "1+1?", "a\x1b").row() == {
        "question": "1+1?", "truth": "2", "prediction": "3", "correct": 0.0, "reward": -1.0, "turns": 1.0,
        "response": "a\N{REPLACEMENT CHARACTER}",
    }  # fmt: skip


@pytest.mark.slow
def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # no login
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained(tmp_path, "wandb", 1)
    trained(tmp_path, "wandb", 2, samples=False)
    (run_id,) = json.loads((tmp_path / "logger_runs.json").read_text()).values()
    written = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(written) == 2
    (table,) = (tmp_path / "wandb").rglob("*.table.json")
    assert json.loads(table.read_text())["data"] == [["1+1?", 1.0], ["2+2?", 0.0]]


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    directory = tmp_path / "runs" / "name"
    trained(directory, "mlflow", 1)
    trained(directory, "mlflow", 2)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "val-core/all/acc/mean_at_4")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 1.0)]
    assert run.info.status == "FINISHED" and run.data.params == {"learner": '{"lr": 0.1}'}
    (table,) = (tmp_path / "runs" / "mlflow_files").rglob("step_000002.json")
    assert json.loads(table.read_text()) == {"columns": ["question", "correct"], "data": [["1+1?", 1.0], ["2+2?", 0.0]]}


@pytest.mark.slow
def test_swanlab_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("swanlab")
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    trained(tmp_path, "swanlab", 1)
    (backup,) = (tmp_path / "swanlab").rglob("backup.swanlab")
    assert b"val-core/all/acc/mean@4" in backup.read_bytes()
    (table,) = (tmp_path / "swanlab").rglob("echarts-*.json")
    assert "2+2?" in table.read_text()


def test_trackio_goes_on_with_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read by the import
    pytest.importorskip("trackio")
    trained(tmp_path, "trackio", 1)
    trained(tmp_path, "trackio", 2, samples=False)
    rows = sqlite3.connect(tmp_path / "trackio" / "project.db").execute("select run_name, step, metrics from metrics")
    found = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert {name for name, *_ in found} == {tmp_path.name}
    assert [row["val-core/all/acc/mean@4"] for _, _, row in found if "other" in row] == [0.5, 1.0]
    assert any("validation/samples" in row and "2+2?" in json.dumps(row) for *_, row in found)


class Plain:
    """Not derived from Logger, with one method of it."""

    def __init__(self, run):
        self.run = run

    def log(self, step, metrics):
        pass


class TakesTooMuch(Logger):
    def log(self, step, metrics, epoch):
        pass


def plain_one(run):
    return Plain(run)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Plain", "Plain: the logger has no path, log_samples, close: derive it from"),
        ("TakesTooMuch", r"the method log must take \(self, step, metrics\)"),
    ],
)
def test_a_class_that_is_no_logger_is_refused_before_anything_starts(name, words):
    config = load_config(None, [f"trainer.loggers=[{__name__}:{name}]"])
    with pytest.raises(ConfigError, match=words):
        check_loggers(config.trainer)


def test_a_function_that_makes_no_logger_ends_no_run(tmp_path):
    name = f"{__name__}:plain_one"
    check_loggers(load_config(None, [f"trainer.loggers=[{name}]"]).trainer)
    output = io.StringIO()
    with MetricLogger(tmp_path, [name], project="project", console=Console(file=output, width=400)) as log:
        log.log(1, {"a": 1.0})
        assert log._write_errors.count == 1
    assert "the logger has no path" in output.getvalue()
