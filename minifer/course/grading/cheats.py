"""Cheats that must gain nothing: the sandbox's exam.

Each is the body of `attack()`; when it comes back with something true, the cheat has got through,
and hands in the right answer. So points mean that the sandbox leaks. Names are put together from
pieces where the plain name would be refused before the file runs: what is behind that must hold.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cheat:
    """what: in words. attack: the body of a function. answer: used instead of an attack, the body
    of `double(values)`. everywhere: also tried when the file is loaded, for exercise 90.2."""

    name: str
    what: str
    attack: str = ""
    answer: str = ""
    everywhere: bool = False


MODULES = 'import os\nmodules = getattr(os.sys, "modu" + "les")\n'

CHEATS = [
    Cheat("solution", "reads the solution", 'return "def" in SOLUTION.read_text()'),
    Cheat("tests", "reads the tests", 'return "def" in TESTS.read_text()'),
    Cheat("listing", "lists the solutions", 'import os\nreturn os.listdir(ROOT / "solutions")'),
    Cheat(
        "numpy",
        "reads the solution with numpy",
        'import numpy\nreturn numpy.fromfile(SOLUTION, "u1").any()',
    ),
    Cheat(
        "torch",
        "reads the solution with torch",
        "import torch\nreturn torch.from_file(str(SOLUTION), size=3, dtype=torch.uint8) + 1",
    ),
    Cheat(
        "link",
        "reads the solution through a link",
        'import os\nos.symlink(SOLUTION, "x")\nreturn open("x").read()',
    ),
    Cheat(
        "import-solution",
        "imports the solution",
        'import sys\nsys.path.insert(0, str(ROOT / "solutions"))\nimport ex90_x\n'
        "return ex90_x.double",
    ),
    Cheat("import", "imports the engine", "import minifer.engine\nreturn minifer.engine.Engine"),
    Cheat(
        "import-from",
        "imports from the engine's package",
        "from minifer import Engine\nreturn Engine",
    ),
    Cheat(
        "dunder-import",
        "imports with `__import__`",
        'return __import__("minifer.engine").engine.Engine',
    ),
    Cheat(
        "importlib",
        "imports with importlib",
        MODULES + 'return modules["importlib"].import_module("minifer.engine").Engine',
    ),
    Cheat(
        "new-module",
        "imports a part of the engine that is not loaded",
        MODULES + 'return modules["importlib"].import_module("minifer.perf.costs").__dict__',
    ),
    Cheat(
        "modules",
        "takes the engine from sys.modules",
        MODULES + 'return modules["minifer.engine"].Engine',
    ),
    Cheat(
        "exec",
        "imports in exec",
        'exec("import minifer.engine as e", space := {})\nreturn space["e"].Engine',
    ),
    Cheat(
        "example",
        "takes the engine from the book's example",
        "from minifer.course.example import Engine\nreturn Engine",
    ),
    Cheat("source", "reads the engine's source", 'return (ENGINE / "engine.py").read_text()'),
    Cheat(
        "test-module",
        "calls the test's own reference",
        MODULES + 'return modules["test_ex90"].reference([1])',
    ),
    Cheat(
        "stack",
        "walks the stack to the expected value",
        'import sys\nframe = getattr(sys, "_get" + "frame")(1)\n'
        'return getattr(frame, "f_ba" + "ck")',
    ),
    Cheat("inspect", "walks the stack with inspect", MODULES + 'return modules["inspect"].stack()'),
    Cheat(
        "traceback",
        "walks the stack from an exception",
        "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n"
        '    return getattr(e.__traceback__, "tb_" + "frame")',
    ),
    Cheat(
        "generator",
        "walks the stack from a generator",
        'g = (x for x in [1])\nreturn getattr(g, "gi_" + "frame")',
    ),
    Cheat("globals", "goes through a function's globals", "return double.__globals__"),
    Cheat(
        "gc",
        "looks for the expected value in memory",
        MODULES + 'return modules["gc"].get_objects()',
    ),
    Cheat("proc", "looks at its process in /proc", 'return open("/proc/self/maps").read()'),
    Cheat(
        "settrace",
        "traces the test",
        'import sys\ngetattr(sys, "settr" + "ace")(print)\nreturn True',
    ),
    Cheat(
        "liar",
        "returns an object equal to everything",
        answer="class Liar:\n    __eq__ = lambda s, o: True\n    __len__ = lambda s: 5\n"
        "return Liar()",
    ),
    Cheat(
        "lying-ints",
        "returns ints that equal everything",
        answer="class Liar(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
        "return [Liar(-1)] * 5",
    ),
    Cheat(
        "lying-list",
        "returns a list that equals everything",
        answer="class Liar(list):\n    __eq__ = lambda s, o: True\n"
        "    __len__ = lambda s: 5\nreturn Liar()",
    ),
    Cheat(
        "lying-class",
        "says that it is a list",
        answer="class Liar:\n    __class__ = list\n    __eq__ = lambda s, o: True\nreturn Liar()",
    ),
    Cheat("nan", "returns NaN", answer='return [float("nan")] * 5'),
    Cheat(
        "inputs",
        "changes its input and hands it back",
        answer="values[:] = [2 * v for v in values]\nreturn values",
    ),
    Cheat("none", "returns its input", answer="return values"),
    Cheat(
        "seeds",
        "seeds all generators to know the inputs",
        "import random, torch\nrandom.seed(0)\ntorch.manual_seed(0)\n"
        "mine = [random.randrange(100) for _ in range(5)]\n"
        "return mine == VALUES",
    ),
    Cheat("os-exit", "ends the process without a word", "import os\nos._exit(0)", everywhere=True),
    Cheat("posix-exit", "ends the process by another name", "import posix\nposix._exit(0)"),
    Cheat("sys-exit", "ends the program", answer="import sys\nsys.exit(0)", everywhere=True),
    Cheat(
        "interrupt", "raises KeyboardInterrupt", answer="raise KeyboardInterrupt", everywhere=True
    ),
    Cheat("skip", "has pytest skip the test", answer=MODULES + 'modules["pytest"].skip()'),
    Cheat("not-attempted", "fails as a stub does", answer='raise NotImplementedError("ex90.1")'),
    Cheat("kill", "kills its process", "import os\nos.kill(os.getpid(), 9)", everywhere=True),
    Cheat(
        "segfault",
        "crashes the process",
        answer=MODULES + "import sys\nsys.setrecursionlimit(10**8)\n"
        "def f(): return f()\nreturn f()",
    ),
    Cheat(
        "print",
        "prints 100 MB",
        answer='for _ in range(100):\n    print("x" * 1_000_000)\nreturn None',
        everywhere=True,
    ),
    Cheat(
        "write",
        "writes 100 MB to the standard output",
        answer='import os\nfor _ in range(100):\n    os.write(1, b"x" * 1_000_000)\nreturn None',
    ),
    Cheat(
        "disk",
        "fills the disk",
        answer='with open("x", "wb") as f:\n    for _ in range(1000):\n'
        '        f.write(b"x" * 1_000_000)\nreturn None',
    ),
    Cheat("outside", "writes into the book", 'return open(ROOT / "exercises/x", "w").write("x")'),
    Cheat("loop", "loops for ever", answer="while True:\n    pass"),
    Cheat("loop-in-c", "loops for ever in C", answer="return sum(iter(int, 1))"),
    Cheat("sleep", "sleeps for ever", answer="import time\ntime.sleep(1e6)"),
    Cheat(
        "signals",
        "sleeps and ignores all signals",
        answer="import signal, time\nfor s in range(1, 60):\n    try:\n"
        "        signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
    ),
    Cheat("fork", "forks", "import os\nreturn os.fork()"),
    Cheat("subprocess", "starts a program", 'import os\nreturn os.system("true") == 0'),
    Cheat(
        "popen",
        "starts a program by subprocess",
        MODULES + 'return modules["subprocess"].run(["true"]).returncode == 0',
    ),
    Cheat("socket", "opens a socket", MODULES + 'return modules["socket"].socket()'),
    Cheat(
        "thread",
        "starts a thread",
        "import threading\nthreading.Thread(target=print).start()\nreturn True",
    ),
    Cheat("memory", "allocates 100 GB", "return bytearray(100 << 30)"),
    Cheat(
        "torch-memory",
        "allocates 100 GB of a tensor",
        "import torch\nreturn torch.zeros(100 << 30).any() + 1",
    ),
    Cheat(
        "patch-torch",
        "replaces torch.equal",
        answer="import torch\ntorch.equal = lambda *a: True\nreturn RIGHT(values)",
    ),
    Cheat(
        "patch-tensor",
        "replaces a method of Tensor",
        answer="import torch\ntorch.Tensor.isfinite = lambda s: s == s\nreturn RIGHT(values)",
    ),
    Cheat(
        "patch-builtins",
        "replaces a builtin",
        answer=MODULES + 'modules["builtins"].len = lambda x: 5\nreturn RIGHT(values)',
    ),
    Cheat(
        "patch-compare",
        "replaces compare",
        MODULES + 'modules["minifer.course.grading.compare"].compare = print\nreturn True',
    ),
    Cheat(
        "patch-code",
        "replaces compare's code",
        "import random\nrandom.Random.shuffle.__code__ = (lambda *a: None).__code__\nreturn True",
    ),
    Cheat(
        "patch-pytest",
        "replaces pytest.raises",
        answer=MODULES + 'modules["pytest"].raises = print\nreturn RIGHT(values)',
    ),
    Cheat(
        "patch-module",
        "replaces a module",
        answer=MODULES + 'modules["random"] = modules["math"]\nreturn RIGHT(values)',
    ),
    Cheat(
        "results",
        "writes results of its own",
        answer="import os\nfor fd in range(3, 30):\n    try:\n"
        '        os.write(fd, b\'{"kind": "result"}\\n\')\n'
        "    except OSError:\n        pass\nreturn RIGHT(values)",
    ),
    Cheat(
        "close",
        "closes the grader's channel",
        answer="import os\nos.closerange(3, 100)\nreturn RIGHT(values)",
    ),
    Cheat(
        "limits",
        "lifts the limits",
        MODULES + 'modules["resource"].setrlimit(0, (-1, -1))\nreturn True',
    ),
]
