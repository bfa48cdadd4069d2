from __future__ import annotations

import sys
from types import ModuleType

import msgspec
import pytest

from penstock.core.errors import CorruptRecordError, RemoteError
from penstock.wire.failures import describe_failure, rebuild_failure
from penstock.wire.frames import RemoteFailure


class AppError(Exception):
    pass


class TwoPartError(Exception):
    def __init__(self, path: str, line: int) -> None:
        super().__init__(f"{path}:{line}")
        self.path = path


class Outer:
    class InnerError(ValueError):
        pass


def travelled(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        sent = msgspec.msgpack.encode(describe_failure(caught))
    return rebuild_failure(msgspec.msgpack.decode(sent, type=RemoteFailure))


def bytes_error() -> UnicodeDecodeError:
    return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        ValueError(),
        KeyError("missing"),
        KeyError(("a", 1)),
        KeyError(object),
        ZeroDivisionError("division by zero"),
        FileNotFoundError(2, "No such file or directory", "/data/x"),
        OSError("plain text"),
        bytes_error(),
        AppError("mine", 3, None, b"x", [1, 2.5]),
        AppError(object),
        TwoPartError("train.csv", 17),
        Outer.InnerError("nested"),
        CorruptRecordError("a.tfrecord", "bad checksum", offset=12, remedy="skip it"),
        RuntimeError("x" * 300_000),
        SystemExit(3),
        GeneratorExit("planted"),
        KeyboardInterrupt(),
        ExceptionGroup("two at once", [ValueError("one"), AppError("other", 2)]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_failure_keeps_its_type_and_message(error: BaseException) -> None:
    got = travelled(error)
    assert type(got) is type(error)
    assert str(got)[:1000] == str(error)[:1000]
    assert any("In the worker" in note and type(error).__name__ in note for note in got.__notes__)


def test_plain_arguments_arrive_as_they_were() -> None:
    assert travelled(AppError("mine", 3, None, b"x")).args == ("mine", 3, None, b"x")
    assert travelled(FileNotFoundError(2, "No such file", "/data/x")).filename == "/data/x"  # type: ignore[attr-defined]


def test_causes_and_groups_travel_along() -> None:
    error = ValueError("cannot decode")
    error.__cause__ = AppError("header", 7)
    error.__cause__.__cause__ = SystemExit(3)
    got = travelled(error)
    assert isinstance(got.__cause__, AppError) and got.__cause__.args == ("header", 7)
    assert isinstance(got.__cause__.__cause__, SystemExit) and got.__cause__.__cause__.code == 3
    assert not hasattr(got.__cause__, "__notes__"), "the worker's traceback stands once, with the first"
    group = travelled(ExceptionGroup("both", [ValueError("one"), ExceptionGroup("inner", [KeyError("two")])]))
    assert isinstance(group, ExceptionGroup)
    first, second = group.exceptions
    assert repr(first) == "ValueError('one')"
    assert isinstance(second, ExceptionGroup) and repr(second.exceptions) == "(KeyError('two'),)"


def test_an_endless_chain_of_causes_is_cut() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert str(travelled(first)) == "first"


def test_notes_travel_and_stand_once() -> None:
    error = ValueError("bad")
    error.add_note("in map(decode), element 7 of split 3")
    notes = travelled(error).__notes__
    assert sum("element 7" in note for note in notes) == 1


def test_the_traceback_shows_the_users_lines_and_the_cause() -> None:
    def user_function() -> None:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("converted") from error

    try:
        user_function()
    except ValueError as error:
        text = describe_failure(error).traceback
    assert "user_function" in text and "KeyError: 'missing'" in text and "direct cause" in text


def test_a_class_that_is_not_known_here_is_a_remote_error_by_name() -> None:
    class LocalError(Exception):
        pass

    got = travelled(LocalError("boom"))
    assert type(got) is RemoteError
    assert "LocalError: boom" in str(got) and str(got).startswith("tests.wire.test_failures.")


def test_nothing_is_imported_and_only_exceptions_are_made() -> None:
    def failure(module: str, qualname: str) -> RemoteFailure:
        return RemoteFailure(module=module, qualname=qualname, args=("true",), message="true", traceback="")

    assert "antigravity" not in sys.modules
    for module, qualname in [
        ("antigravity", "Error"),
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "int"),
        ("os", "path.join"),
        ("", ""),
    ]:
        got = rebuild_failure(failure(module, qualname))
        assert type(got) is RemoteError, (module, qualname)
    assert "antigravity" not in sys.modules


def test_a_modules_own_getattr_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: pytest.fail("asked")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    failure = RemoteFailure(module="lazy_module", qualname="Error", args=(), message="x", traceback="")
    assert type(rebuild_failure(failure)) is RemoteError


def test_an_exception_that_cannot_be_printed_still_travels() -> None:
    class HostileError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert isinstance(travelled(HostileError()), RemoteError)
    assert isinstance(travelled(ValueError("\ud800")), Exception)
