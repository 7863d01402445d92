# The process of a test: runs the label's setup and statement, in which the program's names stand for its process. Only
# plain values come back from there; objects stay there, and are used by their attributes, calls and items. Comparing an
# object would run the program's code, so it is refused.
# mypy: ignore-errors
# ruff: noqa: F821, SIM115  (wire.py stands before this file; the pipes stay open to the end)

import builtins
import importlib
import os

_LINE_BYTES = 4 << 20


class Refused(BaseException):
    """The test needs something that cannot be had of another process: no `except Exception` of a test may hide it."""


class ProgramEnded(BaseException):
    """No answer comes any more."""


def _ask(kind, place, values=(), named=None):
    encoded = [encode(value, _reference) for value in values]
    request = {"do": kind, "on": place, "values": encoded}
    request["named"] = {name: encode(value, _reference) for name, value in (named or {}).items()}
    try:
        _requests.write(to_line(request))
        _requests.flush()
        line = _replies.readline(_LINE_BYTES)
    except BrokenPipeError:
        line = b""
    if not line.endswith(b"\n"):
        raise ProgramEnded
    try:
        answer = json.loads(line)
        if "raised" in answer:
            name, text = answer["raised"]
        else:
            value = decode(answer["value"], _remote)
            after = [decode(one, _remote) for one in answer["values"]]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, ArithmeticError):
        raise ProgramEnded from None  # nothing that program.py sends: the program writes there itself
    if "raised" in answer:
        error = getattr(builtins, str(name), None)
        is_error = isinstance(error, type) and issubclass(error, Exception) and not issubclass(error, UnicodeError)
        raise (error if is_error else RuntimeError)(str(text))
    for argument, new in zip(values, after, strict=False):
        _update(argument, new)
    return value


def _update(argument, new):
    """A function may change the lists, dicts and sets that it is given."""
    if type(argument) is not type(new):
        return
    if type(argument) is list:
        argument[:] = new
    elif type(argument) in (dict, set):
        argument.clear()
        argument.update(new)


def _remote(payload):
    return Remote({"handle": int(payload[1])}, str(payload[0]))


def _reference(value):
    if type(value) is Remote:
        place = object.__getattribute__(value, "_place")
        if "handle" in place:
            return {"o": ["", place["handle"]]}
        return encode(_ask("eval", place["name"]), _reference)
    raise Refused(f"an object of type {type(value).__name__} cannot be handed to the program")


def _refuse(*_):
    raise Refused("the test compares an object of the program, which would run the program's code")


class Remote:
    """A name or an object of the program."""

    def __init__(self, place, kind):
        object.__setattr__(self, "_place", place)
        object.__setattr__(self, "_kind", kind)

    def __call__(self, *values, **named):
        return _ask("call", object.__getattribute__(self, "_place"), values, named)

    def __getattr__(self, name):
        return _ask("get", object.__getattribute__(self, "_place"), [name])

    def __getitem__(self, key):
        return _ask("item", object.__getattribute__(self, "_place"), [key])

    def __len__(self):
        return _ask("len", object.__getattribute__(self, "_place"))

    def __bool__(self):
        return _ask("truth", object.__getattribute__(self, "_place")) is True

    def __next__(self):
        return _ask("next", object.__getattribute__(self, "_place"))

    def __iter__(self):
        return iter(_ask("list", object.__getattribute__(self, "_place")))

    def __str__(self):
        return str(_ask("text", object.__getattribute__(self, "_place")))

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __setattr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __contains__ = _refuse


def _main():
    request = json.load(sys.stdin)
    namespace = {"__name__": "test", "__ask__": lambda source: _ask("eval", source)}
    for name, module in request["modules"].items():
        namespace[name] = importlib.import_module(module)
    for name in request["remote"]:
        namespace[name] = Remote({"name": name}, "name")
    verdict = "passed"
    try:
        for source in (request["setup"], request["statement"]):
            exec(compile(source, "test.py", "exec", dont_inherit=True), namespace)
    except AssertionError:
        verdict = "wrong"
    except Refused:
        verdict = "object"
    except ProgramEnded:
        verdict = "ended"
    except Exception:
        verdict = "error"
    os.write(3, verdict.encode())
    os._exit(0)


_requests, _replies = open(4, "wb"), open(5, "rb")
_main()
