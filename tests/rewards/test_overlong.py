import pytest

from megatron_retool.cluster.checks import check_extensions
from megatron_retool.config import ConfigError, load_config
from megatron_retool.registry import ExtensionError
from megatron_retool.rewards.manager import RewardManager
from megatron_retool.rewards.overlong import length_penalties, length_penalty, piecewise_penalty, soft_punishment


def test_soft_punishment_of_dapo():
    def penalty(length):
        return soft_punishment(length, max_response_length=20480, buffer_length=4096, penalty=1.0)

    assert [penalty(n) for n in (0, 16384, 18432, 20480, 30000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert soft_punishment(20480, 20480, buffer_length=4096, penalty=0.5) == -0.5
    with pytest.raises(ValueError, match="buffer_length=4096"):
        soft_punishment(0, 2048, buffer_length=4096, penalty=1.0)


def test_piecewise_penalty_is_continuous():
    pieces = ["8000 0.01", "12000 0.05"]
    values = {0: 0.0, 8000: 0.0, 9000: -0.01, 12000: -0.04, 13000: -0.09, 16000: -0.24, 16384: -0.2592}
    for length, value in values.items():
        assert piecewise_penalty(length, 16384, pieces=pieces) == pytest.approx(value)


@pytest.mark.parametrize("texts", [[], ["8000"], ["a 0.1"], ["8000 0.1", "8000 0.2"]])
def test_bad_pieces_are_refused(texts):
    with pytest.raises(ValueError, match="piece"):
        piecewise_penalty(9000, 16384, pieces=texts)


OWN = """
def cosine(length, max_response_length, *, penalty, power=1):
    return -penalty * (length / max_response_length) ** power
def words(length, max_response_length):
    return "long"
"""


def test_a_penalty_of_ones_own(tmp_path):
    (tmp_path / "my_penalty.py").write_text(OWN)
    target = f"{tmp_path}/my_penalty.py"
    overrides = [f"reward.overlong.mode={target}:cosine", "reward.overlong.kwargs.power=2", "reward.overlong.penalty=3"]
    overlong = load_config(None, overrides).reward.overlong
    bound = length_penalties.bind(overlong.mode, overlong.kwargs, settings=overlong)
    assert length_penalty(bound, 50, 100) == -0.75
    with pytest.raises(ExtensionError, match="words: it returned 'long' for 5 tokens: return a number"):
        length_penalty(length_penalties.bind(f"{target}:words"), 5, 100)
    for wrong, message in ((f"{target}:words", "return a number"), (f"{target}:cosin", "did you mean cosine")):
        config = load_config(None, [f"reward.overlong.mode={wrong}", "data.max_response_length=100"])
        with pytest.raises(ConfigError, match=message):
            RewardManager(config.reward, None, 100)
        with pytest.raises(ConfigError, match=message):
            check_extensions(config)


def test_an_unknown_penalty_and_settings_that_nothing_reads_are_refused():
    with pytest.raises(ConfigError, match="'soft_punsh' is not one of none, soft_punish, piecewise.*soft_punish"):
        load_config(None, ["reward.overlong.mode=soft_punsh"])
    with pytest.raises(ConfigError, match="reward.overlong.kwargs"):
        load_config(None, ["reward.overlong.mode=soft_punish", "reward.overlong.kwargs.power=2"])
