# The process of the program. It never gets an expected value, so nothing that the program does to this process reveals
# one, and only the right value passes the test.
# mypy: ignore-errors
# ruff: noqa: F821, SIM115  (wire.py stands before this file; the pipes stay open to the end)

import os
import types

_objects = []


def _say(descriptor, message):
    data = to_line(message)
    while data:
        data = data[os.write(descriptor, data) :]


def _as_truth(value):
    if type(value) in (type({}.keys()), type({}.items())):  # equal to a set of the same
        return {"s": [encode(item, _as_truth) for item in value]}
    return {"o": [type(value).__name__, bool(value)]}


def _as_handle(value):
    _objects.append(value)
    return {"o": [type(value).__name__, len(_objects) - 1]}


def _as_value(value):
    return encode_library(value, _as_value, _as_handle)


def _do(request, module):
    """One request of the judge: {"do", "on": {"name"} or {"handle"}, "values": […], "named": {…}}."""
    kind, place = request["do"], request["on"]
    values = [decode(value, lambda payload: _objects[payload[1]]) for value in request.get("values", ())]
    named = {k: decode(v, lambda payload: _objects[payload[1]]) for k, v in request.get("named", {}).items()}
    if kind == "eval":
        return eval(compile(place, "test.py", "eval", dont_inherit=True), module.__dict__), []
    if kind == "name":  # [its value], or [] if there is none
        return [getattr(module, place)] if hasattr(module, place) else [], []
    target = _objects[place["handle"]] if "handle" in place else getattr(module, place["name"])
    if kind == "call":
        return target(*values, **named), values
    if kind == "get":
        return getattr(target, values[0]), []
    if kind == "item":
        return target[values[0]], []
    if kind in ("isinstance", "issubclass"):
        return {"isinstance": isinstance, "issubclass": issubclass}[kind](values[0], target), []
    return {"len": len, "truth": bool, "next": next, "list": list, "text": str}[kind](target), []


def _serve(module):
    for line in open(4, "rb"):
        try:
            value, arguments = _do(json.loads(line), module)
            answer = {"value": encode(value, _as_value), "values": [encode(a, _as_value) for a in arguments]}
        except Exception as error:
            answer = {"raised": [type(error).__name__, str(error)[:1000]]}
        _say(5, answer)


def _main():
    request = json.load(sys.stdin)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for source in (request["setup"], request["program"]):
        exec(compile(source, "solution.py", "exec", dont_inherit=True), module.__dict__)
    if request["do"] == "serve":
        return _serve(module)
    if request["do"] == "eval":
        answer = eval(compile(request["expression"], "test.py", "eval", dont_inherit=True), module.__dict__)
    else:
        name = request["name"]
        function = getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name)
        answer = function(*request["arguments"])
    _say(3, encode(answer, _as_truth))
    os._exit(0)  # threads and functions of atexit have nothing to add


_main()
