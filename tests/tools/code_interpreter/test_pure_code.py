"""Which code may be run once for all that ask for it."""

from __future__ import annotations

import pytest

from tools.code_interpreter.pure_code import LONGEST, is_pure

PURE = [
    "print(703 * 45 + 12)",
    "import math\nprint(math.gcd(12, 18))",
    "from math import *\nprint(factorial(5))",
    "from fractions import Fraction as F\nimport itertools, collections\nprint(F(1, 3), list(itertools.count()))",
    "def f(n):\n    return 1 if n < 2 else n * f(n - 1)\nprint(f(20))",
    "class Point:\n    def __init__(self, x):\n        self.x = x\nprint(Point(3).x)",
    "for _ in range(3):\n    print(_)",
    "if __name__ == '__main__':\n    print(1)",
    "print(1 / 0)",
    "print((",  # what is no Python says so each time
    "print(1)\0",
    "while True: pass",
    "",
]
IMPURE = [
    "import random\nprint(random.random())",
    "import time\nprint(time.time())",
    "import numpy as np\nprint(np.empty(3))",
    "import sympy\nprint(sympy.sympify('1+1'))",
    "from os import urandom\nprint(urandom(3))",
    "import collections.abc, os.path",
    "from . import math",
    "print(open('f').read())",
    "print(input())",
    "print(id(3))",
    "eval('__import__')('time')",
    "exec('import time')",
    "print(__import__('time').time())",
    "print(().__class__.__base__.__subclasses__())",
    "import statistics\nprint(statistics.random.random())",
    "from statistics import random as r\nprint(r.random())",
    "import statistics\nprint(statistics.NormalDist().samples(3))",
    "import collections\nprint(collections._sys.argv)",
    "import operator\nprint(operator.attrgetter('__class__')(1))",
    "import string\nprint(string.Formatter().get_field('0.__class__', (1,), {}))",
    "f = getattr\nprint(f(1, '__class__'))",
    "print(globals())",
    "__builtins__",
    "x" * (LONGEST + 1),
]


@pytest.mark.parametrize("code", PURE)
def test_code_that_computes_is_pure(code):
    assert is_pure(code)


@pytest.mark.parametrize("code", IMPURE, ids=[code[:40] for code in IMPURE])
def test_code_that_reads_the_world_is_not(code):
    assert not is_pure(code)
