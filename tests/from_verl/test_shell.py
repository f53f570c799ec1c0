import pytest

from megatron_retool.from_verl.shell import UNKNOWN, read_script


def overrides(text, **environment):
    return read_script(text, {"PWD": "/here", "B": "", **environment}).overrides


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x a.b=1e-6", "1e-6"),
        ("x +a.b=1", "1"),
        ("x ++a.b=1", "1"),
        ('x a.b=\'["c","d"]\'', '["c","d"]'),
        ("x a.b=['c','d']", "[c,d]"),
        ('n=3\nx a.b="$n ${n}"', "3 3"),
        ("n=$((1024 * 2))\nx a.b=$(((n + 1) * 2))", "4098"),
        ("x a.b=${N:-4}", "4"),
        ("N=7\nx a.b=${N:-4}", "7"),
        ('x a.b=${P:-"${HOME}/m"}', "/home/me/m"),
        ("x a.b=$(pwd)/f", "/here/f"),
        ("x \\\n  c.d=1 \\\n# e.f=2 \\\n  a.b=3", "3"),
        ("x a.b=1 # a.b=2", "1"),
        ("x a.b='#1'", "#1"),
        ('ARGS=(\n a.b=1 # one\n c.d=2\n)\nx "${ARGS[@]}"', "1"),
        ("A=(c.d=1)\nA+=(a.b=2)\nx ${A[@]}", "2"),
        ('m=sync\nif [ "$m" = "async" ]; then\n v=1\nelse\n v=2\nfi\nx a.b=$v', "2"),
        ("n=3\nif [[ $n -gt 2 ]]; then v=big; fi\nx a.b=$v", "big"),
        ('if [ -z "$GONE" ]; then\n v=0\nelif [ 1 == 1 ]; then\n v=5\nfi\nx a.b=$v', "5"),
        ("x a.b= c.d=1 $@", ""),
        ('OPTIONS="c.d=1 a.b=2"\nx $OPTIONS e.f=3', "2"),
        ('n=2\nOPTIONS=" c.d=1\n a.b=$n"\nx ${OPTIONS} e.f=3', "2"),
        ("Q=8\nx a.b=m${Q:+_${Q}}", "m_8"),
        ("x a.b=m${Q:+_${Q}}", "m"),
        ("Q=8\nx a.b=${N:-m_${B}${Q:+_${Q}}}", "m__8"),
        ('A=(\n a.b=\\"none\\"\n)\nx "${A[@]}"', '"none"'),
        ("cat > f <<'END'\nit's\nEND\nx a.b=1", "1"),
        ("k=4\nn=$((1 << k))\nx a.b=1", "1"),
        ('echo "a <<b"\nx a.b=1', "1"),
    ],
)
def test_value_of_an_override(text, value):
    assert overrides(text, HOME="/home/me")["a.b"] == value


@pytest.mark.parametrize("text", ["x a.b=$GONE", "x a.b=$(date)", "x a.b=$((GONE * 2))"])
def test_what_has_no_value_is_marked(text):
    assert overrides(text)["a.b"].startswith(UNKNOWN)


def test_options_and_assignments_are_no_overrides():
    script = read_script("RAY_ADDRESS=http://a:1 python3 -m verl --config-name='p.yaml' --lr=1 a.b=2", {})
    assert script.overrides == {"a.b": "2"}
    assert "--config-name=p.yaml" in script.options
