"""Runs code where this project cannot be imported, only what is installed beside it.

Such a process is a fork of one that has loaded torch and transformers and has never seen this project, which takes
half a second. A cold one, which nothing was loaded for, takes four.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# An editable install would let a clean process import this project; this takes it out of the way.
HIDE_PROJECT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("modeling", "recipe", "run_pretrain"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
"""
LIMIT_S = 120
SERVER = (
    HIDE_PROJECT
    + """
import gc, json, os, traceback
import torch
import transformers.masking_utils, transformers.modeling_utils
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        file = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.chdir(request["folder"])
        sys.argv = ["-c", *request["words"]]
        status = 1
        try:
            exec(request["code"], {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
)


def run_clean(code: str, words: list[str], folder: Path, *, cold: bool = False) -> str:
    """Run `code` in `folder` with these words in sys.argv; stdout and stderr, or an AssertionError that holds them."""
    if cold:
        return _run_cold(code, words, folder)
    server, said = _server(), folder / "said.txt"
    assert server.stdin is not None
    assert server.stdout is not None
    request = {"code": code, "words": words, "folder": str(folder), "said": str(said)}
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    if not select.select([server.stdout], [], [], LIMIT_S)[0]:
        os.killpg(server.pid, signal.SIGKILL)
        _server.cache_clear()
        raise AssertionError(f"no end after {LIMIT_S} s: {said.read_text()}")
    status = server.stdout.readline().strip()
    assert status == "0", f"exit code {status}: {said.read_text()}"
    return said.read_text()


def _run_cold(code: str, words: list[str], folder: Path) -> str:
    command = [sys.executable, "-I", "-c", HIDE_PROJECT + code, *words]
    with tempfile.TemporaryDirectory(prefix="gather-moe-modules-") as modules, (folder / "said.txt").open("w+") as said:
        done = subprocess.run(
            command, cwd=folder, env=_environment(modules), stdout=said, stderr=subprocess.STDOUT, timeout=LIMIT_S
        )
        said.seek(0)
        text = said.read()
    assert done.returncode == 0, text
    return text


def _environment(modules: str) -> dict[str, str]:
    """Without this project's path, offline, and with a folder for the code that models bring along."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return kept | {"HF_MODULES_CACHE": modules, "HF_HUB_OFFLINE": "1"}


@functools.cache
def _server() -> "subprocess.Popen[str]":
    """In a process group of its own, so that whatever it started ends with it."""
    modules = tempfile.TemporaryDirectory(prefix="gather-moe-modules-")
    server = subprocess.Popen(
        [sys.executable, "-I", "-c", SERVER],
        env=_environment(modules.name),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(_end, server, modules)
    return server


def _end(server: "subprocess.Popen[str]", modules: "tempfile.TemporaryDirectory[str]") -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
    server.communicate()
    modules.cleanup()
