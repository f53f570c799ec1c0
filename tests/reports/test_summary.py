import json

from rich.console import Console

from megatron_retool.reports.summary import summarise


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def validation(accuracy, use=0.5):
    return {"val-core/all/acc/mean@4": accuracy, "val-core/all/acc/maj@4/mean": 0.9, "val-aux/tool/use_rate": use}


def step(number, **more):
    return {"step": number, "timing_s/step": 2.0, "perf/total_num_tokens": 1000, **more}


def test_first_best_and_last_validation_stand_side_by_side(tmp_path):
    rows = [{"step": 0, **validation(0.2)}, step(1), step(2, **validation(0.7)), step(3, **validation(0.6))]
    write(tmp_path / "metrics.jsonl", rows)
    found = summarise(tmp_path, {"sft": 10.0, "rl": 6.0})
    assert list(found.validations) == ["before RL", "step 2, best", "step 3, last"]
    assert found.validations["step 2, best"] == {"mean@4": 0.7, "maj@4": 0.9, "tool use": 0.5}
    assert found.training["steps"] == "3, median 2.0 s, together 6 s"
    assert found.training["tokens trained on"] == "3,000"
    assert found.training["seconds by stage"] == "sft 10, rl 6, all 16"
    console = Console(width=80, record=True)
    found.print(console)
    printed = console.export_text()
    assert "step 2, best" in printed and "0.700" in printed and "…" not in printed
    assert "step 2, best: mean@4 0.700" in found.text()


def test_a_last_validation_that_is_the_best_stands_once(tmp_path):
    write(tmp_path / "metrics.jsonl", [{"step": 0, **validation(0.2)}, step(1, **validation(0.3))])
    assert list(summarise(tmp_path).validations) == ["before RL", "step 1, best and last"]


def test_a_quick_validation_is_none_of_them(tmp_path):
    quick = {"val-quick/all/acc/mean@4": 0.9}
    rows = [{"step": 0, **validation(0.2)}, step(1, **quick), step(2, **validation(0.3)), step(3, **quick)]
    write(tmp_path / "metrics.jsonl", rows)
    assert list(summarise(tmp_path).validations) == ["before RL", "step 2, best and last"]


def test_a_run_without_validations_has_its_steps(tmp_path):
    write(tmp_path / "metrics.jsonl", [step(1), step(2)])
    found = summarise(tmp_path)
    assert not found.validations and found.training["steps"].startswith("2, ")
    assert summarise(tmp_path / "nothing").training == {}
