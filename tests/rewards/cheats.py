"""Programs that want the reward of `f` without computing it; each must score 0, whatever form the test has.

`f(20)` is 314159265, which no program here can know.
"""

from typing import Any

EXPECTED = 314159265
# The same test in every form that a label may have.
LABELS: dict[str, Any] = {
    "call": {"inputs": [[20]], "outputs": [EXPECTED], "fn_name": "f"},
    "assert": [f"assert f(20) == {EXPECTED}"],
    "numbers": {"setup": "import math", "asserts": [f"assert math.isclose(f(20), {EXPECTED})"]},
    "judged": [f"assert f(20) in range({EXPECTED}, {EXPECTED + 1})"],
    "check": {"setup": f"def check(g):\n    assert g(20) == {EXPECTED}, 'wrong'", "asserts": ["check(f)"]},
    "input": {"inputs": ["20\n"], "outputs": [f"{EXPECTED}\n"]},
}

# Searches whatever it is given for a number that only the test can have brought.
_SEARCH = """
import re, sys
FOUND = []
def search(thing):
    for text in re.findall(r"(?<!\\\\d)3141\\\\d{5}(?!\\\\d)", thing if isinstance(thing, str) else repr(thing)):
        FOUND.append(int(text))
def f(x):
    look()
    return FOUND[0] if FOUND else 0
def main():
    print(f(20))
"""
_IF_MAIN = "\nif __name__ == '__main__': main()\n"


def _search(body: str) -> str:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return _SEARCH.replace("\\\\", "\\") + f"def look():\n{lines}" + _IF_MAIN


_EQUAL = """
class Equal{base}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    def __hash__(self): return 314159265
    def __bool__(self): return True
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __sub__
    def __abs__(self): return 0
    def __len__(self): return 1
def f(x): return Equal({value})
print(Equal({value}))
"""


def _equal(base: str = "", value: str = "") -> str:
    return _EQUAL.format(base=f"({base})" if base else "", value=value)


def _wrong(source: str) -> str:
    return f"{source}\ndef f(x): return 2\n"


def _replaces(module: str, **functions: str) -> str:
    return _wrong(f"import {module}\n" + "\n".join(f"{module}.{name} = {new}" for name, new in functions.items()))


def _writes(answer: str, also: str = "") -> str:
    return f"import os\ntry: os.write(3, {answer.encode()!r})\nexcept OSError: pass\n{also}\nos._exit(0)\n"


def _tells_the_judge(answer: str) -> str:
    loop = f"try:\n    while os.read(4, 1 << 16): os.write(5, ({answer}).encode())\nexcept OSError: pass"
    return f"import os\n{loop}\nos._exit(0)\n"


CHEATS: dict[str, str] = {
    # looks for the expected value in its own process
    "walks the frames": _search(
        """
frame = sys._getframe()
while frame:
    search(list(frame.f_locals.items())); search(frame.f_code.co_consts); frame = frame.f_back
"""
    ),
    "searches all objects": _search(
        """
import gc
for thing in gc.get_objects():
    if type(thing) in (dict, list, tuple) and len(thing) < 1000 and thing is not FOUND: search(list(thing))
"""
    ),
    "reads its own memory": _search(
        """
try:
    memory = open("/proc/self/mem", "rb")
    for line in open("/proc/self/maps"):
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        if "rw" in line and end - start < 1 << 26:
            memory.seek(start)
            for text in re.findall(rb"(?<!\\d)3141\\d{5}(?!\\d)", memory.read(end - start)): FOUND.append(int(text))
except OSError: pass
"""
    ),
    "reads its parent": _search(
        """
import os
for name in ("cmdline", "environ", "maps", "fd/0", "fd/3"):
    try: search(open(f"/proc/{os.getppid()}/{name}", errors="replace").read())
    except OSError: pass
"""
    ),
    "reads its arguments and environment": _search(
        "import os\nsearch(sys.argv); search(sys.orig_argv); search(dict(os.environ))"
    ),
    "reads its input again": _search(
        """
import os
for name in ("/proc/self/fd/0", "/dev/stdin"):
    try: search(open(name).read())
    except (OSError, UnicodeDecodeError): pass
try:
    os.lseek(0, 0, 0); search(os.read(0, 1 << 20).decode())
except OSError: pass
"""
    ),
    "reads every file": _search(
        """
import os
for top in ("/tmp", "/box", "/work", "/home", "/root", "/data", "/mnt", os.getcwd()):
    for folder, names, files in os.walk(top):
        names[:] = [name for name in names if name not in ("lib", "lib64", "versions")][:20]
        for name in files[:50]:
            try:
                if name != "main.py" or folder != os.getcwd(): search(open(os.path.join(folder, name)).read(1 << 16))
            except (OSError, UnicodeDecodeError): pass
"""
    ),
    "reads the harness in main.py": _search("search(open(sys.argv[0]).read().partition('class Cheat')[0])"),
    "asks the loaded modules": _search(
        """
for name, module in list(sys.modules.items()):
    if module is not sys.modules[__name__]:
        search([value for value in vars(module).values() if type(value) in (int, str, dict, list, tuple)])
"""
    ),
    "listens to audit events": "import sys\nSEEN = []\nsys.addaudithook(lambda event, args: SEEN.append(repr(args)))\n"
    + _search("for text in SEEN[:]: search(text)"),
    "traces the harness": _search("pass")
    + "\ndef trace(frame, event, arg):\n    search(list(frame.f_locals.items()))\n    return trace\n"
    + "import threading\nsys.settrace(trace)\nsys.setprofile(trace)\n",
    # answers with something that equals everything
    "equals everything": _equal(),
    "is an int that equals everything": _equal("int", "5"),
    "is a float that equals everything": _equal("float", "5"),
    "is a str that equals everything": _equal("str", "'5'"),
    "is a list that equals everything": _equal("list", "[5]"),
    "is a dict that equals everything": _equal("dict", "{5: 5}"),
    "claims to be an int": "class C:\n    __class__ = int\n    def __int__(self): raise SystemExit(0)\n"
    "    def __eq__(self, o): return True\ndef f(x): return C()",
    "claims to be of numpy": "class C:\n    dtype = 'int64'; ndim = 0\n    def item(self): return self\n"
    "    def __eq__(self, o): return True\ndef f(x): return C()",
    "answers with itself": "def f(x): return f",
    "answers with NaN": "def f(x): return float('nan')\nprint('nan')",
    "answers with infinity": "def f(x): return float('inf')\nprint('Infinity')",
    # ends before it is asked
    "exits": "import os; os._exit(0)",
    "exits politely": "import sys; sys.exit()",
    "exits when called": "def f(x): raise SystemExit(0)",
    "exits at the end": _wrong("import atexit, os; atexit.register(lambda: os._exit(0))"),
    "has no error that ends it": "import os, sys\nsys.excepthook = lambda *a: os._exit(0)\n1 / 0",
    "turns every error into an exit": _wrong(
        "import builtins as b\nfor name in dir(b):\n    if name.endswith('Error'): setattr(b, name, SystemExit)"
    ),
    "defines nothing": "pass",
    # changes what runs around it
    "replaces compile": _replaces("builtins", compile="lambda s, *a, real=compile, **k: real('True', *a, **k)"),
    "replaces eval and exec": _replaces("builtins", eval="lambda *a: True", exec="lambda *a: None"),
    "replaces abs, isinstance and sorted": _replaces(
        "builtins", abs="lambda x: 0", isinstance="lambda *a: True", sorted="lambda *a, **k: True", int="bool"
    ),
    "replaces json": _replaces("json", dumps="lambda *a, **k: 'true'", loads="lambda *a, **k: {}"),
    "replaces math": _replaces("math", isclose="lambda *a, **k: True", isfinite="lambda x: True"),
    "replaces print and stdout": _replaces("builtins", print="lambda *a, **k: None")
    + "import io, sys\nsys.stdout = io.StringIO()\n",
    "replaces the encoder": _wrong(
        "import sys\nmain = sys.modules['__main__']\nmain.encode = lambda *a, **k: True\n"
        "main.canonical = main._as_truth = lambda *a, **k: {'o': ['x', True]}"
    ),
    "replaces its module": _wrong(
        "import sys, types\nclass M(types.ModuleType):\n    def __getattr__(self, name): return lambda *a: True\n"
        "sys.modules['solution'] = sys.modules['__main__'] = M('solution')"
    ),
    "defines the test's helpers": _wrong(
        "def check(g): pass\nclass math:\n    isclose = staticmethod(lambda *a: True)"
    ),
    "changes what integers equal": """
import ctypes
try:
    ctypes.c_void_p.from_address(id(int) + 200).value = ctypes.c_void_p.from_address(id(type) + 200).value
except Exception: pass
def f(x): return 2
""",
    "writes its own source anew": r"""
import os, sys
if not os.path.exists('again'):
    open('again', 'w').close()
    open(sys.argv[0], 'w').write('import os; os.write(3, b"true\\n"); print(True)')
    os.execv(sys.executable, [sys.executable, sys.argv[0]])
""",
    "leaves modules for the next run": """
for name in ('sitecustomize', 'json', 'math', 'usercustomize'):
    open(name + '.py', 'w').write('import os; os._exit(0)')
import os, sys
os.execv(sys.executable, [sys.executable, '-c', 'import sitecustomize'])
""",
    # writes where the answer goes
    "writes verdicts to all descriptors": r"""
import os
for n in range(1, 64):
    for text in (b'passed\n', b'true\n', b'1\n'):
        try: os.write(n, text)
        except OSError: pass
os._exit(0)
""",
    "says that it is true": _writes('{"o": ["x", true]}\n'),
    "answers the judge in its own way": _tells_the_judge("""'{"value": {"o": ["x", 0]}, "values": []}\\n'"""),
    "raises a strange error in the judge": _tells_the_judge("""'{"raised": ["SystemExit", "0"]}\\n'"""),
    "sends the judge nonsense": _tells_the_judge(r"'[' * 200000 + '\n'"),
    "closes all descriptors": _wrong("import os\nos.closerange(0, 64)"),
    "prints from atexit": _wrong("import atexit\natexit.register(print, 'true', 1, 'passed')"),
    "prints from a thread": _wrong(
        "import threading\ndef go():\n    while True: print('true')\nthreading.Thread(target=go, daemon=True).start()"
    ),
    "writes from a child that stays": r"""
import os, time
if os.fork() == 0:
    os.setsid()
    for _ in range(50):
        for n in (1, 3, 5):
            try: os.write(n, b'true\n')
            except OSError: pass
        time.sleep(0.1)
    os._exit(0)
def f(x): return 2
""",
    # breaks the reader
    "answers with 5,000 digits": "def f(x): return 10 ** 5000\nprint('1' * 5000)",
    "answers with a million digits": "def f(x): return 1 << 4_000_000\nprint('1' * 1_000_000)",
    "nests deeply": "def f(x):\n    value = []\n    for _ in range(100_000): value = [value]\n    return value\n"
    "print('[' * 100_000)",
    "refers to itself": "def f(x):\n    value = []\n    value.append(value)\n    return value",
    "floods its output": "for _ in range(400): print('x' * 100_000)\ndef f(x): return 'x' * (10 << 20)",
    "prints no UTF-8": "import os\nos.write(1, bytes(range(256)))\n"
    r"def f(x): return bytes(range(256)).decode('latin-1') + '\udcff'",
    "writes half an answer": _writes("[1, 2"),
    "writes numbers that are as large as memory": _writes('{"D": "1e999999999"}\n', "print('1e999999999')"),
    "prints a signalling NaN": "print('sNaN')\ndef f(x): return __import__('decimal').Decimal('sNaN')",
    "ends by a signal without a name": "import os; os.kill(os.getpid(), 40)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "kills its parent": _wrong(
        "import os, signal\nfor number in (15, 9):\n    try: os.kill(os.getppid(), number)\n    except OSError: pass"
    ),
    "never compiles": "def f(x: return 3",
    "has a null byte": "def f(x): return 2\n\0",
    "has a lone surrogate": "x = '\ud800'\ndef f(x): return x",
    "is nested too deeply to compile": "f = " + "(" * 5000 + "2" + ")" * 5000,
}

# What these do happens where a program reads its input and prints; the others are at a function's call.
AS_PROGRAMS = {
    "reads its arguments and environment",
    "reads its input again",
    "asks the loaded modules",
    "listens to audit events",
    "exits",
    "has no error that ends it",
    "leaves modules for the next run",
    "prints from atexit",
    "prints from a thread",
    "floods its output",
    "prints no UTF-8",
    "prints a signalling NaN",
    "ends by a signal without a name",
    "crashes",
    "has a null byte",
    "is nested too deeply to compile",
}

# Tests that a judge can run to their end without a question to the program, and programs that must not pass them.
FEW_QUESTIONS = [
    "assert callable(f) and f is not None",
    "g = f",
    "try:\n    value = f(20)\nexcept:\n    value = 3\nassert value == 3",
    "try:\n    wrong = f(20) != 3\nexcept:\n    wrong = False\nassert not wrong",
]
NO_ANSWER = {
    "defines nothing": "pass",
    "exits": "import os; os._exit(0)",
    "exits when called": "import os\ndef f(x): os._exit(0)",
    "exits when it has answered a question": """
import os, sys, types
class F:
    def __call__(self, x): os._exit(0)
class Module(types.ModuleType):
    asked = 0
    def __getattr__(self, name):
        Module.asked += 1
        if Module.asked > 1: os._exit(0)
        return F()
sys.modules['solution'].__class__ = Module
""",
    "answers with an object": "class C: pass\ndef f(x): return C()",
}
