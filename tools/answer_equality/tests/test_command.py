import doctest
import json
from pathlib import Path

import pytest

from answer_equality.command import main

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_of_the_readme():
    failed, tried = doctest.testfile(str(README), module_relative=False)
    assert failed == 0 and tried > 4


def test_a_pair(capsys):
    assert main(["\\frac{1}{2}", "0.5"]) == 0
    assert main(["1/3", "0.5"]) == 1
    assert capsys.readouterr().out == "equal\nnot equal\n"


def test_a_file_of_responses(tmp_path, capsys):
    file = tmp_path / "answers.jsonl"
    rows = [
        {"response": "so \\boxed{0.5}", "ground_truth": "1/2"},
        {"response": "#### 1,200", "ground_truth": 1200, "data_source": "openai/gsm8k"},
        {"response": "no idea", "ground_truth": ["1", "2"]},
    ]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    assert main(["--responses", str(file)]) == 0
    assert [json.loads(line)["acc"] for line in capsys.readouterr().out.splitlines()] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ('{"response": "1"', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('["1", "1"]', 'line 2: needs "response"'),
        ('{"response": 1, "ground_truth": 1}', 'line 2: needs "response"'),
        ('{"response": "1"}', 'line 2: needs "response"'),
    ],
    ids=range(5),
)
def test_a_bad_line_is_named(tmp_path, capsys, line, wrong):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"response": "1", "ground_truth": 1}\n' + line)
    assert main(["--responses", str(file)]) == 2
    assert f"answers.jsonl, {wrong}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["1"], ["1", "2", "--responses", "file"]])
def test_a_pair_or_a_file(arguments):
    with pytest.raises(SystemExit):
        main(arguments)


def test_a_file_that_is_missing(capsys):
    assert main(["--responses", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl" in capsys.readouterr().err
