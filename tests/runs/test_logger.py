import io
import json
import math

import pytest
from rich.console import Console

from megatron_retool.reports.run import draw_plots
from megatron_retool.runs.logger import MetricLogger
from megatron_retool.runs.metrics_file import read_metrics


def test_rows_repeat_steps_once_after_resume(tmp_path):
    with MetricLogger(tmp_path, ["jsonl"]) as log:
        for step in range(4):
            log.log(step, {"a": step})
    with open(tmp_path / "metrics.jsonl", "a") as handle:
        handle.write('{"step": 4, "a"')  # the process died here
    with MetricLogger(tmp_path, ["jsonl"], first_step=2) as log:
        log.log(2, {"a": 20.0})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "a": 0.0}, {"step": 1, "a": 1.0}, {"step": 2, "a": 20.0}
    ]  # fmt: skip


def test_not_finite_is_null_and_json_stays_valid(tmp_path):
    with MetricLogger(tmp_path, ["jsonl"]) as log:
        log.log(1, {"a": math.nan, "b": math.inf, "c": 1})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "a": None, "b": None, "c": 1.0}


def test_tensorboard_gets_every_metric(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricLogger(tmp_path, ["tensorboard"]) as log:
        log.log(3, {"critic/score/mean": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalar = events.Scalars("critic/score/mean")[0]
    assert (scalar.step, scalar.value) == (3, 0.5)


def test_tensorboard_shows_samples_as_a_table_of_text(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.text.text_plugin import text_array_to_html
    from tensorboard.util.tensor_util import make_ndarray

    response = "<tool_call>\n  print('*')\n</tool_call>\n\nso \\boxed{2}"
    with MetricLogger(tmp_path, ["tensorboard", "jsonl"]) as log:
        log.log_samples(4, [{"question": "1_1_?", "correct": 1.0, "response": response}])
        log.log(4, {"val-core/all/acc/mean@4": 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.SummaryMetadata("validation/samples").plugin_data.plugin_name == "text"
    (event,) = events.Tensors("validation/samples")
    assert event.step == 4 and events.Scalars("val-core/all/acc/mean@4")[0].step == 4
    shown = text_array_to_html(make_ndarray(event.tensor_proto), True)
    assert shown.count("<tr>") == 2 and "<strong>question</strong>" in shown and "<p>1</p>" in shown
    for literal in ("1_1_?", "&lt;tool_call&gt;\n  print('*')\n&lt;/tool_call&gt;\n\nso \\boxed{2}"):
        assert literal in shown


def test_unknown_logger(tmp_path):
    with pytest.raises(ValueError, match="tensorbored"):
        MetricLogger(tmp_path, ["tensorbored"])


def test_report_has_a_picture_for_what_was_logged(tmp_path):
    with MetricLogger(tmp_path, ["jsonl"]) as log:
        for step in range(3):
            code = {"code/ratio": 0.5, "code/lines_per_call": 3.0, "code/purpose/search": step / 3}
            validated = {"val-aux/x/acc/level_5/mean@4": 0.25, "val-quick/all/acc/mean@2": 0.5}
            training = {"rollout/acc/mean": step / 3, "val-core/x/acc/mean@4": 0.5, "timing_s/step": 1.0}
            log.log(step, training | code | validated)
    page = draw_plots(tmp_path).write_page("<figures>")
    text = page.read_text()
    assert "&lt;figures&gt;" in text and "accuracy.png" in text
    validations = ("validation_by_source", "validation_by_difficulty", "validation_quick")
    for name in ("accuracy", *validations, "time", "code", "code_lines", "code_purpose"):
        assert (page.parent / f"{name}.png").stat().st_size > 5000
    assert not (page.parent / "entropy.png").exists()


def test_report_without_metrics(tmp_path):
    with pytest.raises(FileNotFoundError, match="metrics.jsonl"):
        draw_plots(tmp_path)


def test_a_validation_is_one_readable_line(tmp_path):
    out = io.StringIO()
    validated = {
        "val-core/all/acc/mean@4": 0.5, "val-core/all/acc/std@4": 0.1, "val-core/all/acc/best@4/mean": 0.75,
        "val-core/all/acc/best@2/mean": 0.6, "val-core/all/acc/maj@4/mean": 0.55, "val-core/aime/acc/mean@4": 0.5,
        "val-aux/all/reward/mean@4": 0.0, "val-aux/tool/use_rate": 0.9,
    }  # fmt: skip
    with MetricLogger(tmp_path, ["console"], console=Console(file=out, width=400)) as log:
        log.log(0, validated)
        log.log(1, {"rollout/acc/mean": 0.25, "timing_s/step": 3.0, **validated})
        log.log(2, {"sft/loss": 1.5})
        log.log(3, {"val-quick/all/acc/mean@2": 0.25, "val-quick/tool/use_rate": 0.5, "early_stopping/waited": 1.0})
    before, header, row, validation, sft, quick = out.getvalue().splitlines()
    assert before == "step     0  validation: mean@4 0.500  best@4 0.750  maj@4 0.550  tool use 0.9"
    assert validation == before.replace("0 ", "1 ", 1)
    assert header.split() == ["step", "acc", "step", "s"] and row.split() == ["1", "0.250", "3.000"]
    assert sft == "step     2  loss 1.5"
    assert quick == "step     3  quick validation: mean@2 0.250  tool use 0.5"
