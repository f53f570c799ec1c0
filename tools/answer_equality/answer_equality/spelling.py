"""One spelling for what LaTeX, Unicode, Markdown and Python write in several ways. Text in, text out.

Nothing here decides what an answer means: a replacement is made only where both spellings mean the same wherever they
stand. Every pattern runs in linear time on answers of the length that the comparison accepts.
"""

from __future__ import annotations

import functools
import re
import unicodedata


def listed(words: str) -> tuple[str, ...]:
    """The words of a table that is written as running text."""
    return tuple(words.split())


# Private stand-ins for signs whose plain form means something else in LaTeX.
DOLLAR = "\ue000"

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
GREEK_LETTERS = listed(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_CHARACTERS = {
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "÷": r"\div ", "⁄": "/", "∕": "/"},
    **{"√": r"\sqrt ", "∛": r"\sqrt[3]", "∞": r"\infty ", "π": r"\pi ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ "},
    **{"≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv "},
    **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "∖": r"\setminus ", "∣": "|"},
    **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}"},
    **{"∠": r"\angle ", "△": r"\triangle ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor "},
    **{"⌈": r"\lceil ", "⌉": r"\rceil ", "∧": r"\land ", "∨": r"\lor ", "\u200b": "", "\ufeff": ""},
    # A thousands separator is never written with a Chinese comma.
    **{"∶": ":", "，": ", "},
    **{"“": '"', "”": '"', "‘": "'", "’": "'", "′": "'", "＄": "$"},
    **dict(
        zip(
            "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
            (f"\\{name} " for name in GREEK_LETTERS),
            strict=True,
        )
    ),
}
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUBSCRIPT_RUN = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")

_COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant", "leqq"), r"\le"),
    **dict.fromkeys(("geq", "geqslant", "geqq"), r"\ge"),
    **{"lt": "<", "gt": ">", "neq": r"\ne", "ast": "*", "colon": ":", "mid": "|", "vert": "|", "lvert": "|"},
    **{"rvert": "|", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")"},
    **{"varnothing": r"\emptyset", "wedge": r"\land", "vee": r"\lor", "degree": r"^\circ", "percent": r"\%"},
    **{"euro": "€", "pounds": "£", "imath": "i", "thinspace": " ", "backslash": r"\setminus", "gets": r"\gets"},
    **{"varphi": r"\phi", "varepsilon": r"\epsilon", "vartheta": r"\theta", "dots": r"\ldots", "cdots": r"\ldots"},
    **{"ce": "", "displaystyle": "", "textstyle": "", "limits": "", "left": "", "right": "", "rm": "", "bf": ""},
    **dict.fromkeys(("big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "biggl", "biggr"), ""),
    **dict.fromkeys(("quad", "qquad", "enspace", "nobreak"), " "),
    **dict.fromkeys(("land", "wedge"), r"\land"),
}
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_EMPTY_DELIMITER = re.compile(r"\\(?:left|right)\s*\.")
_SPACING = re.compile(r"\\[,;:!> ]|~|\s")
_TIGHT_COMMA = re.compile(r"(?<=\d)(?:(?:\\!)+,(?:\\!)*|(?:,|\{,\})(?:\\!)+|\\text\{,\})(?=\d)")
_UPRIGHT = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|cal|normal)|mbox|hbox|operatorname\*?|bm|boldsymbol|"
    r"textsuperscript|rm|bf|it|sf|tt|emph)\s*(?=\{)"
)
_DRESS = re.compile(
    r"\\(?:(?:text)?color(?:box)?\s*(?:\[\w+\])?\s*\{[^{}]*\}|[hv]?phantom\s*\{[^{}]*\}|[hvm]space\*?\s*\{[^{}]*\}|"
    r"(?:kern|mkern|hskip|mskip)\s*-?[\d.]+\s*(?:pt|em|ex|mu|cm|mm)|(?:label|tag)\*?\s*\{[^{}]*\}|"
    r"(?:tiny|scriptsize|footnotesize|small|normalsize|large|Large|LARGE|huge|Huge|scriptstyle|scriptscriptstyle|"
    r"bfseries|itshape|rmfamily|sffamily|mathstrut|strut|nonumber|notag|newline|underline|uline|ensuremath|framebox|"
    r"mathord|mathop|mathinner|mathbin|mathrel|smash|middle|nolimits)(?![A-Za-z]))"
)
"""What changes how an answer looks, with what belongs to it; what is dressed stays."""
_SWITCHED_UPRIGHT = re.compile(r"\{\s*\\(?:rm|bf|it|sf|tt)\s+(?=[A-Za-z])")
_LEADING_SPACE = re.compile(r"\A(?:\\[,;:!> ]|~|\s)+")
_LAST_SPACE = re.compile(r"(?:\\[,;:!> ]|~|\s|\\)\Z")
_NAMED_FUNCTION = re.compile(
    r"\\(?:operatorname\*?|mathrm|text|rm)\s*\{\s*(lcm|gcd|max|min|sin|cos|tan|cot|sec|csc|log|ln|exp|arcsin|arccos|arctan)"
    r"\s*\}(?=\s*(?:\\left)?[({\d\\^])"
)
_OVER = re.compile(r"\{((?:[^{}]|\{[^{}]*\})*?)\\over(?![A-Za-z])((?:[^{}]|\{[^{}]*\})*)\}")
_OVER_TAIL = re.compile(r"\\over(?![A-Za-z])([^{}=,;<>\\]*)\Z")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))")
_CHINESE = {
    **{
        "平方": " square ",
        "立方": " cubic ",
        "千米": " km ",
        "公里": " km ",
        "厘米": " cm ",
        "毫米": " mm ",
        "分米": " dm ",
    },
    **{
        "米": " meters ",
        "千克": " kg ",
        "公斤": " kg ",
        "克": " grams ",
        "吨": " tons ",
        "毫升": " ml ",
        "升": " liters ",
    },
    **{"小时": " hours ", "分钟": " minutes ", "秒": " seconds ", "天": " days ", "周": " weeks ", "个月": " months "},
    **{"年": " years ", "元": " yuan ", "度": " degrees ", "人": " people ", "岁": " years ", "公顷": " hectares "},
    **{
        "每": " per ",
        "和": " and ",
        "与": " and ",
        "及": " and ",
        "以及": " and ",
        "且": " and ",
        "或": " or ",
        "或者": " or ",
    },
    **{
        "、": ", ",
        "。": ".",
        "无解": "no solution",
        "答案是": "answer is ",
        "答案为": "answer is ",
        "倍": " times ",
        "答案": "answer ",
        "答": "answer ",
    },
    **dict.fromkeys("个只名本支棵辆页张次种块件条头袋箱台把双组排朵颗匹座根盒瓶枚", " items "),
}
_CHINESE_PHRASES = (
    (re.compile(r"\A(?:故选|选|故答案为|故答案是)\s*[:：]?\s*"), "答案是"),
    (re.compile(r"\A共(?=\s*\d)"), ""),
    (re.compile(r"点(?=\s*[(（])"), ""),
    (re.compile(r"百分之(?=\s*\d)(\s*[\d.]+)"), r"\1%"),
    (re.compile(r"(?<=\d)\s*比\s*(?=\d)"), ":"),
    (re.compile(r"(?<=小时)\s*(\d+)\s*分(?!钟)"), r"\1分钟"),
    (re.compile(r"(?<=\d)分\Z"), "个"),
)
_UNIT_IN_BRACKETS = re.compile(r"[(（]\s*([\u4e00-\u9fff]{1,4})\s*[)）]\s*\Z")
_CHINESE_WORDS = re.compile("|".join(sorted(_CHINESE, key=len, reverse=True)))
_LOG_WITH_BASE = re.compile(r"(?<!\\)\blog(10|2)\(")
_IN_BASE = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*)?\(?\s*(?:in )?base[ -](\d{1,2})\s*\)?\s*\}?\Z")
_ELLIPSIS_BETWEEN = re.compile(r"(?<=,)\s*\.\.\.(?=\s*,)")
_DEGREES = re.compile(r"(?<=\d)\s*\^(?:o(?![A-Za-z])|\{\s*o\s*\})")
_EMPTY_TEXT = re.compile(r"\\text\s*\{[\s.]*\}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MODULES = re.compile(r"\b(?:np|numpy|math|cmath|sympy|sp|torch|mpmath|mp)\.(?=[A-Za-z])")
_QUOTED_ARGUMENT = re.compile(r"\(\s*(['\"])([^'\"()]*)\1\s*\)")
_PYTHON_NUMBER = re.compile(r"\b(?:float|int|uint|complex|Decimal|mpf|tensor|S|Integer|Float)(?:\d+)?(?=\((?!\[))")
_IMAGINARY_LITERAL = re.compile(r"(?<=\d)j\b|(?<=\d\.)j\b")
_SYMPY_I = re.compile(r"(?<=[*+\-])(\s*)I\b|\bI(?=\s*(?:\*|\)))")
_SYMPY_E = re.compile(r"(?<=\*)(\s*)E\b|\bE(?=\s*\*)")
_SPACED_TEXT = re.compile(r"[\"'`]")
_LEAD = re.compile(
    r"(?:\\text\{\s*)?(?:(?:thus|so|therefore|hence)\b,?\s*)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:|=)\s*\}?:?",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"(?:\\text\{)?(?:option|choice)\s*\}?\s*\(?([A-Ja-j])\)?\}?\Z", re.IGNORECASE)
_LETTER_WITH_PARENTHESIS = re.compile(r"\A([A-J])\)\Z")


@functools.lru_cache(maxsize=512)
def spelled(text: str) -> str:
    """``text`` with one spelling for each sign; spaces stay where they may matter."""
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in run[0]) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + "".join(_SUBSCRIPTS[sign] for sign in run[0]) + "}", text)
    text = _chinese_phrases(text)
    text = _CHINESE_WORDS.sub(lambda word: _CHINESE[word[0]], text)
    text = "".join(_character(sign) for sign in text)
    text = _DRESS.sub(" ", _TIGHT_COMMA.sub("{,}", text.replace("\\\\%", "\\%")))
    text = _TIMES_TEN.sub(r"\\times ", _NAMED_FUNCTION.sub(r"\\\1 ", text))
    text = _without_outer_space(text)
    text = _without_delimiters(text)
    lead = _LEAD.match(text)
    if lead:
        text = _without_delimiters(text[lead.end() :].strip())
    text = _EMPTY_DELIMITER.sub("", text)
    text = _UPRIGHT.sub(r"\\text", _SWITCHED_UPRIGHT.sub(r"\\text{", text))
    text = _COMMAND.sub(lambda command: _COMMANDS.get(command[1], command[0]) + _gap(command[1]), text)
    text = _LOG_WITH_BASE.sub(r"\\log_{\1}(", _DEGREES.sub(r"^\\circ", text.replace(f"\\text{{{DOLLAR}}}", DOLLAR)))
    text = _EMPTY_TEXT.sub(" ", _BOX.sub("", text))
    text = _QUOTED_ARGUMENT.sub(r"(\2)", _MODULES.sub("", text))
    text = _PYTHON_NUMBER.sub("", text)
    text = _IMAGINARY_LITERAL.sub("i", text)
    text = _SYMPY_E.sub(r"\1e", _SYMPY_I.sub(r"\1i", text)) if _looks_like_python(text) else text
    for _ in range(8):
        text, replaced = _OVER.subn(r"\\frac{\1}{\2}", text)
        if not replaced:
            break
    text = _IN_BASE.sub(r"_{\1}", _with_bare_over(text))
    text = _ELLIPSIS_BETWEEN.sub(r"\\ldots ", text)
    text = _unwrapped(text.strip())
    choice = _CHOICE.match(text)
    if choice:
        return choice[1].upper()
    return _LETTER_WITH_PARENTHESIS.sub(r"\1", text)


def _chinese_phrases(text: str) -> str:
    """With phrases whose words stand in another order, or mean something only in one place, made plain."""
    if text.isascii():
        return text
    for pattern, replacement in _CHINESE_PHRASES:
        text = pattern.sub(replacement, text)
    unit = _UNIT_IN_BRACKETS.search(text)
    if unit and re.fullmatch(_CHINESE_WORDS.pattern.join(("(?:", ")+")), unit[1]):
        return text[: unit.start()] + unit[1]
    return text


def _with_bare_over(text: str) -> str:
    """3 \\over 7 without braces around it, which TeX takes up to the next sign that it cannot go beyond."""
    tail = _OVER_TAIL.match(text, max(0, text.rfind("\\over")))
    if tail is None:
        return text
    start = max(text.rfind(sign, 0, tail.start()) for sign in "{}=,;<>") + 1
    return f"{text[:start]}\\frac{{{text[start : tail.start()]}}}{{{tail[1]}}}"


def without_spacing(text: str) -> str:
    """``text`` with every kind of space, LaTeX's too, as one blank."""
    return re.sub(" +", " ", _SPACING.sub(" ", text)).strip()


def _character(sign: str) -> str:
    if sign in _CHARACTERS:
        return _CHARACTERS[sign]
    if ord(sign) < 128:
        return sign
    name = unicodedata.name(sign, "")
    if name.startswith("VULGAR FRACTION"):
        above, _, below = unicodedata.normalize("NFKC", sign).partition("⁄")
        return f"\\frac{{{above}}}{{{below}}}" if below else sign
    return unicodedata.normalize("NFKC", sign)


def _gap(command: str) -> str:
    # What replaces a command must not grow together with the letters behind it.
    return " " if _COMMANDS.get(command, "").startswith("\\") and _COMMANDS[command][-1].isalpha() else ""


def _looks_like_python(text: str) -> bool:
    return "\\" not in text and ("*" in text or "(" in text or "+" in text or "-" in text)


def _without_outer_space(text: str) -> str:
    text = _LEADING_SPACE.sub("", text)
    while last := _LAST_SPACE.search(text, max(0, len(text) - 2)):
        text = text[: last.start()]
    return text


def _without_delimiters(text: str) -> str:
    text = text.strip()
    for mark in ("**", "__", "`", '"'):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    text = text.replace("\\$", DOLLAR).replace("\\(", "").replace("\\)", "")
    if text.startswith("\\[") and text.endswith("\\]"):
        text = text[2:-2]
    if text.count("$") % 2:
        text = re.sub(r"\$(?=\s*[\d.])", DOLLAR, text, count=1)
    text = _without_outer_space(text.replace("$", ""))
    return text[:-1].rstrip() if text.endswith((".", ",", ";")) and not text.endswith("..") else text


def _unwrapped(text: str) -> str:
    """Take away braces or a \\text{...} around the whole."""
    for _ in range(8):
        start = 6 if text.startswith("\\text{") else 1 if text.startswith("{") else 0
        if not start or _closing_brace(text, start) != len(text) - 1:
            break
        inner = text[start:-1].strip().rstrip(".")
        if start == 1 and (_is_python_set(inner) or "\\choose" in inner):
            break
        text = inner
    return text


def _is_python_set(inner: str) -> bool:
    if re.fullmatch(r"[^\d,]*[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", inner):
        return False  # Python prints a blank behind a comma; LaTeX's braces may stand around 1,234
    return not inner or "," in inner.replace("{,}", "") or ("\\" not in inner and inner.isdigit())


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for position in range(start, len(text)):
        if text[position - 1] == "\\":
            continue
        depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return position
    return -1
