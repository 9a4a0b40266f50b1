"""Exceptions of user code that are hard to catch or to describe."""


class Panic(BaseException):
    """As a panic of a library written in Rust."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")
