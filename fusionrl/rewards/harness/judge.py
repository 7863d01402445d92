# The process of a test: runs the label's setup and statement, in which the program's names refer to its process. Only
# plain values come back from there; objects stay there, and are used by their attributes, calls and items. Comparing an
# object would run the program's code, so it is refused.
# mypy: ignore-errors
# ruff: noqa: F821, SIM115  (wire.py stands before this file; the pipes stay open to the end)

import builtins
import importlib
import operator
import os

_LINE_BYTES = 4 << 20
# Attributes by which numpy, pandas and ctypes take memory, also of an address, that an object says is its own.
_MEMORY = ("__array", "__cuda_array", "__dlpack", "__arrow_c", "__dataframe", "_as_parameter_")
_no_verdict = []  # why the test has none, whatever a bare `except:` in it has caught


class Refused(BaseException):
    """The test needs something that cannot be had of another process: no `except Exception` of a test may hide it."""

    def __init__(self, *texts):
        super().__init__(*texts)
        _no_verdict.append("object")


class ProgramEnded(BaseException):
    """No answer comes any more."""

    def __init__(self):
        _no_verdict.append("ended")


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
            after = [decode(item, _remote) for item in answer["values"]]
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ImportError,
        RuntimeError,
        ArithmeticError,
        MemoryError,
    ):
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
    elif type(argument) is deque:
        argument.clear()
        argument.extend(new)
    elif type(argument).__module__ == "numpy" and argument.shape == new.shape:
        argument[...] = new


def _remote(payload):
    return Remote({"handle": int(payload[1])}, str(payload[0]))


def _reference(value):
    if type(value) is Remote:
        place = object.__getattribute__(value, "_place")
        if "handle" in place:
            return {"o": ["", place["handle"]]}
        return encode(_ask("eval", place["name"]), _reference)
    return encode_library(value, _reference, _refuse_argument)


def _refuse_argument(value):
    raise Refused(f"an object of type {type(value).__name__} cannot be handed to the program")


def _refuse(*_):
    raise Refused("the test compares an object of the program, which would run the program's code")


def _value(remote):
    """The value of a global of the program, if that is plain data; it may have changed since the last question."""
    place = object.__getattribute__(remote, "_place")
    members = _ask("name", place["name"]) if "name" in place else []
    return members[0] if members and type(members[0]) is not Remote else _refuse()


def _ask_of_class(question, remote, value):
    if type(value) is not Remote:
        raise Refused("the test asks for the class of plain data, which came without it")
    return _ask(question, object.__getattribute__(remote, "_place"), [value]) is True


def _on_value(function):
    return lambda remote, *operands: function(_value(remote), *operands)


def _on_value_at_right(function):
    return lambda remote, left: function(left, _value(remote))


class Remote:
    """A name or an object of the program."""

    def __init__(self, place, kind):
        object.__setattr__(self, "_place", place)
        object.__setattr__(self, "_kind", kind)

    def __call__(self, *values, **named):
        return _ask("call", object.__getattribute__(self, "_place"), values, named)

    def __getattr__(self, name):
        if name.startswith(_MEMORY):
            raise Refused("the test takes an object of the program for an array")
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

    def __instancecheck__(self, instance):
        return _ask_of_class("isinstance", self, instance)

    def __subclasscheck__(self, kind):
        return _ask_of_class("issubclass", self, kind)

    __hash__ = __setattr__ = _refuse
    __eq__, __ne__ = _on_value(operator.eq), _on_value(operator.ne)
    __lt__, __le__, __gt__, __ge__ = map(_on_value, (operator.lt, operator.le, operator.gt, operator.ge))
    __add__, __sub__, __mul__ = map(_on_value, (operator.add, operator.sub, operator.mul))
    __radd__, __rsub__, __rmul__ = map(_on_value_at_right, (operator.add, operator.sub, operator.mul))
    __contains__ = _on_value(operator.contains)


class Names(dict):
    """The names of the test; those of the program are looked up at their use, so a missing one is a NameError."""

    def __init__(self, names, remote):
        super().__init__(names)
        self._remote = frozenset(remote)

    def __missing__(self, name):
        if name not in self._remote:
            raise KeyError(name)
        value = _ask("name", name)
        if not value:
            raise NameError(f"name {name!r} is not defined")  # and no built-in function of that name
        # A list may change, or be changed by the test: it stays there.
        is_mutable = not isinstance(value[0], (type(None), int, float, complex, str, bytes, tuple, frozenset, Remote))
        return Remote({"name": name}, "name") if is_mutable else value[0]


def _main():
    request = json.load(sys.stdin)
    namespace = Names({"__name__": "test", "__ask__": lambda source: _ask("eval", source)}, request["remote"])
    for name, module in request["modules"].items():
        namespace[name] = importlib.import_module(module)
    verdict = "passed"
    try:
        for source in (request["setup"], request["statement"]):
            exec(compile(source, "test.py", "exec", dont_inherit=True), namespace)
        _ask("name", "")  # a program that has ended passes nothing, also where the test has asked it nothing
    except AssertionError:
        verdict = "wrong"
    except (Refused, ProgramEnded):
        pass
    except Exception:
        verdict = "error"
    os.write(3, (_no_verdict or [verdict])[0].encode())
    os._exit(0)


_requests, _replies = open(4, "wb"), open(5, "rb")
_main()
