"""Keeps passwords and tokens out of what is shown or written."""

import re

HIDDEN = "***"
_IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]*@")
_NAMED = re.compile(
    r"(?i)([?&;]?[\w.-]*(?:token|secret|key|password|passwd|authorization|signature)[\w.-]*=)"
    r"[^&;\s'\"]+"
)


def redact(text: str) -> str:
    """A text without the secrets that addresses carry.

    Example:
        >>> redact("https://me:hunter2@host/a.txt?token=abc&page=2")
        'https://me:***@host/a.txt?token=***&page=2'

    Args:
        text: any; only addresses are changed.
    """
    return " ".join(_redact_word(word) for word in text.split(" ")) if "://" in text else text


def _redact_word(word: str) -> str:
    if "://" not in word:
        return word
    return _NAMED.sub(rf"\1{HIDDEN}", _IN_ADDRESS.sub(rf"\1:{HIDDEN}@", word))
