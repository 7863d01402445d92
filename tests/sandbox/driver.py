"""Runs programs in the sandbox for a test, in a process that may belong to another user: a JSON line in, one out.

python driver.py      in {"code", "stdin", "limits"}, out the fields of the result, or {"error": …}
"""

import json
import sys
from dataclasses import asdict

from fusionrl.sandbox import Limits, SandboxError, run_python_sync

for line in sys.stdin:
    request = json.loads(line)
    try:
        result = run_python_sync(request["code"], stdin=request["stdin"], limits=Limits(**request["limits"]))
        answer = asdict(result) | {"answer": result.answer.decode()}
    except (SandboxError, ValueError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
