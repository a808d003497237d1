"""The errors that a user of this package meets."""


class MemOptError(ValueError):
    """Bad input or a combination that cannot work here; the message is one line: what, where, what is allowed."""


class UnsupportedModelError(MemOptError):
    """The engine cannot train this model on this machine; the message says why and the way out."""
