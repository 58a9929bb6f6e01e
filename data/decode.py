"""Decode the bytes of a text, and tell text from binary."""

import contextlib
import io
import re
import tokenize

from common.console import UserError
from common.files import UTF16_MARKS

FALLBACK = "cp1252"  # encoding of text files that are not Unicode: Windows' Latin-1
CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # except tab, newline and page break
MOST_CONTROLS = 0.001  # largest fraction of control characters in a text


def stated_encoding(content: bytes) -> str | None:
    """Return the encoding that a Python file states in its first lines (PEP 263), if any."""
    with contextlib.suppress(SyntaxError):
        stated = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        return None if stated.startswith("utf-8") else stated
    return None


def decode(content: bytes, given: str | None) -> tuple[str, str]:
    """
    Decode a text: as UTF-16 if it begins with that byte-order mark, else as UTF-8, else in the
    `given` encoding or FALLBACK. Returns the text, and how it was guessed, "" for Unicode. Raises
    UserError if it is not text.
    """
    other = given or FALLBACK
    text, problem = try_decode(content, unicode_of(content))
    if not problem:
        return text, ""
    # FALLBACK, too, would read the control characters, and broken bytes as letters
    if (text and not given) or (not text and is_damaged(content)):
        raise UserError(problem)
    text, worse = try_decode(content, other)
    if worse:
        raise UserError(f"{problem}; {worse}")
    words = " ".join(re.findall(r"\S*[^\x00-\x7f]\S*", text[:100_000]))[:40]
    hint = "" if given else "; or give --encoding=NAME"
    return text, f"{problem}; read as {other}: {words!r}{hint}"


def try_decode(content: bytes, encoding: str) -> tuple[str, str]:
    """Return the text, "" if it is not in this encoding, and what is wrong with it, if anything."""
    try:
        text = content.decode(encoding)
    except LookupError as error:
        return "", first_line(error)
    except UnicodeError as error:
        at = getattr(error, "start", 0)  # some multi-byte codecs do not say where
        line = 1 + content[:at].count(b"\n")
        return "", f"line {line:,} is not {encoding}: {content[at : at + 8]!r}"
    controls = too_many_controls(text)
    return text, f"{controls:,} NULs and control characters in {encoding}" if controls else ""


def too_many_controls(text: str) -> int:
    """Count the control characters of a text, or return 0 if they are few enough for a text."""
    controls = len(CONTROLS.findall(text))
    most = min(5 + MOST_CONTROLS * len(text), len(text) / 4)
    return controls if controls > most else 0


def is_text(text: str | None) -> bool:
    return text is not None and not too_many_controls(text)


def unicode_of(content: bytes) -> str:
    return "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"


def is_damaged(content: bytes) -> bool:
    """Return True for Unicode with a few broken bytes; in another encoding most would be broken."""
    lenient = content.decode(errors="replace")
    broken = lenient.count("\ufffd")
    valid = len(lenient) - broken - len(lenient.encode("ascii", "ignore"))
    return valid > broken or content.startswith(UTF16_MARKS)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}"
