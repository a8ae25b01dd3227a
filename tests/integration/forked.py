"""Run programs, each in a fork of this process, which has imported what they share: that takes longer than they do.

Reads {"imports": [module, …], "programs": [{"program": PATH, "arguments": […], "stdin": TEXT}, …]} from stdin; the last
line of stdout is [{"code": exit code, "output": what it wrote to stdout and stderr}, …].
"""

import importlib
import io
import json
import os
import runpy
import sys
import tempfile
import traceback


def run(program, arguments, stdin):
    """Run `program` as `python PROGRAM ARGUMENTS…` would; return its exit code and what it wrote."""
    with tempfile.TemporaryFile("w+b") as output:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            code = 1
            try:
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                sys.argv, sys.stdin = [program, *arguments], io.StringIO(stdin)
                runpy.run_path(program, run_name="__main__")
                code = 0
            except BaseException:  # noqa: BLE001 - as an interpreter, it prints whatever ends the program
                traceback.print_exc()
            finally:  # it must not return into its parent
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        return {"code": code, "output": output.read().decode(errors="replace")}


request = json.load(sys.stdin)
for name in request["imports"]:
    importlib.import_module(name)
print(json.dumps([run(**program) for program in request["programs"]]))
