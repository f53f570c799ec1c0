"""From the bytes of a page to text that a model can read.

Pages are hostile input, and Python's html.parser takes a time that grows with the square of a malformed page's length
(half a minute for 60 kB of opening tags). So the markup is scanned here, each character once. What is lost by it: a ">"
within an attribute's quotes ends the tag.
"""

from __future__ import annotations

import html
import re

_TAG_NAME = re.compile(r"(/?)([A-Za-z][A-Za-z0-9]*)")
_UNREAD = ("script", "style", "noscript", "template", "svg", "iframe", "object", "textarea", "title")
"""Elements whose content is no text of the page; the title is kept apart."""
_ENDS = {name: re.compile(rf"</{name}", re.IGNORECASE) for name in _UNREAD}
_BLOCKS = frozenset([
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "div", "dl", "dt", "figcaption",
    "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol",
    "option", "p", "pre", "section", "table", "tr", "ul",
])  # fmt: skip
_CELLS = ("td", "th")
_SPACE = re.compile(r"\s+")
_DECLARED = re.compile(rb"charset\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)
_CHARSETS = re.compile(r"(utf|ucs|iso|latin|windows|cp\d|koi8|gb|hz|big5|euc|shift|sjis|ascii|us-ascii|mac|tis)", re.I)
"""Beginnings of the names of encodings of texts. Python knows others (punycode), which take long."""


def is_text(content_type: str) -> bool:
    """Whether a Content-Type is that of a text; a server that names none is believed to send one."""
    kind = _kind(content_type)
    return not kind or kind.startswith("text/") or kind.endswith(("json", "xml"))


def to_text(body: bytes, content_type: str) -> tuple[str, str]:
    """(title, text) of a page. Plain text has no title and stays as it is."""
    kind = _kind(content_type)
    is_html = "html" in kind or (not kind and body.lstrip()[:1] == b"<")
    source = body.decode(_charset(body, content_type, is_html), "replace")
    return html_to_text(source) if is_html else ("", source.strip())


def html_to_text(source: str) -> tuple[str, str]:
    """(title, text): a line for each block that holds text; scripts, styles and comments left out."""
    title, pieces, position = "", [], 0
    while True:
        start = source.find("<", position)
        pieces.append(_SPACE.sub(" ", source[position:] if start < 0 else source[position:start]))
        if start < 0:
            break
        if source.startswith("<!--", start):
            end = source.find("-->", start + 4)
            position = end + 3
        elif source[start + 1 : start + 2] in ("!", "?") or _TAG_NAME.match(source, start + 1):
            end = source.find(">", start)
            position = end + 1
        else:
            pieces.append("<")
            position = start + 1
            continue
        if end < 0:  # a comment or tag without an end has the rest of the page
            break
        result = _TAG_NAME.match(source, start + 1)
        name = result[2].lower() if result else ""
        if result and not result[1] and name in _ENDS:
            closing = _ENDS[name].search(source, position)
            content = source[position : closing.start() if closing else len(source)]
            if name == "title" and not title:
                title = " ".join(html.unescape(content).split())
            position += len(content)
        pieces.append("\n" if name in _BLOCKS else " " if name in _CELLS else "")
    lines = (" ".join(line.split()) for line in html.unescape("".join(pieces)).split("\n"))
    return title, "\n".join(line for line in lines if line)


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _charset(body: bytes, content_type: str, is_html: bool) -> str:
    if body.startswith(b"\xef\xbb\xbf"):
        return "utf-8-sig"
    declared = _DECLARED.search(content_type.encode("ascii", "replace"))
    if declared is None and is_html:
        declared = _DECLARED.search(body[:2048])
    name = declared[1].decode() if declared else ""
    if not _CHARSETS.match(name):
        return "utf-8"
    try:
        "".encode(name)
    except LookupError:
        return "utf-8"
    return name
