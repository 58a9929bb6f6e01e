"""Decode the bytes of a text, and tell text from binary."""

import re

from common.console import UserError
from common.files import UTF16_MARKS

CONTROLS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")  # except tab, newline and page break
MOST_CONTROLS = 0.001  # largest fraction of control characters in a text


def decode(content: bytes, given: str | None) -> str:
    """
    Decode a text: as UTF-16 if it begins with that byte-order mark, else as UTF-8, and only if it
    is neither in the `given` encoding. Raises UserError if it is not text.
    """
    problem = ""
    unicode = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8"
    for encoding in (unicode, given) if given else (unicode,):
        try:
            text = content.decode(encoding)
        except LookupError as error:
            raise UserError(f"{problem}; {first_line(error)}") from None
        except UnicodeError as error:
            at = getattr(error, "start", 0)  # some multi-byte codecs do not say where
            line = 1 + content[:at].count(b"\n")
            problem = f"line {line:,} is not {encoding}"
            continue
        controls = too_many_controls(text)
        if not controls:
            return text
        problem = f"{controls:,} NULs and control characters in {encoding}"
    raise UserError(problem)


def too_many_controls(text: str) -> int:
    """Count the control characters of a text, or return 0 if they are few enough for a text."""
    controls = len(CONTROLS.findall(text))
    most = min(5 + MOST_CONTROLS * len(text), len(text) / 4)
    return controls if controls > most else 0


def is_text(text: str | None) -> bool:
    # U+FFFD stands for a broken byte
    return text is not None and not too_many_controls(text.replace("\ufffd", "\0"))


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:300].rstrip('.')}"
