import pytest

from megatron_retool.rewards.overlong import parse_pieces, piecewise_penalty, soft_punishment


def test_soft_punishment_of_dapo():
    def penalty(length):
        return soft_punishment(length, max_response_length=20480, buffer_length=4096, penalty=1.0)

    assert [penalty(n) for n in (0, 16384, 18432, 20480, 30000)] == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert soft_punishment(20480, 20480, 4096, 0.5) == -0.5
    with pytest.raises(ValueError, match="buffer_length=4096"):
        soft_punishment(0, 2048, 4096, 1.0)


def test_piecewise_penalty_is_continuous():
    pieces = parse_pieces(["8000 0.01", "12000 0.05"])
    values = {0: 0.0, 8000: 0.0, 9000: -0.01, 12000: -0.04, 13000: -0.09, 16000: -0.24, 16384: -0.2592}
    for length, value in values.items():
        assert piecewise_penalty(length, pieces) == pytest.approx(value)


@pytest.mark.parametrize("texts", [[], ["8000"], ["a 0.1"], ["8000 0.1", "8000 0.2"]])
def test_bad_pieces_are_refused(texts):
    with pytest.raises(ValueError, match="piece"):
        parse_pieces(texts)
