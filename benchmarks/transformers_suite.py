"""transformers' own common tests of language models, run on this project's classes.

    python benchmarks/transformers_suite.py --json FILE

The tests come from the source distribution of the installed transformers, which pip fetches, or from --source: a tar
file, or an unpacked folder such as a checkout of the same version's tag. They are copied to a temporary folder beside a
small file of ours that subclasses them for two configurations, and run there on the CPU, without a network.

The source distribution lacks some files of tests/ (ABSENT). What they hold is left out then and named in the report;
from a checkout it is run, too. Ends with exit code 1 if a test fails that EXPLAINED does not explain.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("pytest", "parameterized", "transformers")
COMMON_TESTS = "test_modeling_common.py"

# Why a test that fails is not a fault; by the pattern of its name.
EXPLAINED = {
    "test_model_outputs_equivalence": (
        "takes the largest element of every tensor that is returned, and `sums` holds empty ones outside training"
    ),
}


class Absent(NamedTuple):
    """A file of tests/ that a source distribution lacks: what is left out without it, and what stands in for it."""

    left_out: str
    stand_in: str


ABSENT = {
    "generation/test_utils.py": Absent(
        "generation (GenerationTesterMixin)", "class GenerationTesterMixin:\n    pass\n"
    ),
    "exporters/test_export.py": Absent("torch.export (ExportTesterMixin)", "class ExportTesterMixin: ...\n"),
    "utils/test_configuration_utils.py": Absent(
        "all but a few of the values that a configuration is made with",
        'config_common_kwargs = {"output_hidden_states": True, "output_attentions": True, "dtype": "float16"}\n',
    ),
    "distributed_testing_utils.py": Absent(
        "starting processes for the tests of parallelism",
        """
def _get_distributed_device_type():
    return "cpu"


def _absent(*args, **kwargs):
    raise AssertionError("this source does not hold distributed_testing_utils.py")


run_distributed = _get_distributed_backend = _get_rank_device = _set_rank_device = _start_rank_processes = _absent
""",
    ),
}

OUR_TESTS = '''
import unittest

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.testing_utils import torch_device

from modeling.config import GatherMoeConfig
from modeling.model import GatherMoeForCausalLM, GatherMoeModel

from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_expert_parallel_mixin import ExpertParallelTesterMixin
from .test_fsdp_mixin import FSDPTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor
from .test_tensor_parallel_mixin import TensorParallelTesterMixin
from .test_training_mixin import TrainingTesterMixin

# By these lists the suite knows which class takes labels, and which of two is the one without a head.
MODEL_MAPPING_NAMES["gather_moe"] = "GatherMoeModel"
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gather_moe"] = "GatherMoeForCausalLM"
SIZES = dict(
    vocab_size=99, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_experts=8,
    num_attention_heads=4, num_key_value_heads=2, num_experts_per_tok=2, max_position_embeddings=512,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)


class Sample:
    base_model_class, causal_lm_class, config_class = GatherMoeModel, GatherMoeForCausalLM, GatherMoeConfig
    is_training = True
    batch_size, seq_length, vocab_size = 13, 7, 99
    num_hidden_layers, hidden_size, num_attention_heads = 2, 32, 4
    type_sequence_label_size = 2
    # An argument called `noise` is taken for an image model's, which has one number per patch.
    image_size = patch_size = 1

    def __init__(self, options):
        self.options = options

    def get_config(self):
        return GatherMoeConfig(**SIZES, **self.options)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        mask = torch.tril(torch.ones_like(ids).to(torch_device))
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Common(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    TensorParallelTesterMixin,
    ExpertParallelTesterMixin,
    FSDPTesterMixin,
):
    all_model_classes = (GatherMoeModel, GatherMoeForCausalLM)
    model_tester = None
    options = {}
    # By the copyright line of our configuration the suite would take the model for an old one.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = Sample(self.options)
        self.config_tester = ConfigTester(self, config_class=GatherMoeConfig)

    def test_config(self):
        self.config_tester.run_common_tests()


class NormedHeads(Common, unittest.TestCase):
    """As Qwen3-MoE."""


class BiasedRouter(Common, unittest.TestCase):
    """With what no stock type of the three has: scores by sigmoid, a router bias, a dense layer beside a sparse one."""

    options = dict(
        qk_norm="none", score_function="sigmoid", router_bias=True, mlp_only_layers=[0]
    )


del Common
'''

# Written into the temporary folder; a line of JSON for every report of a test or of a part of one.
REPORTING = """
import json
from pathlib import Path


def pytest_configure(config):
    for kind in ("training", "tensor_parallel", "expert_parallel", "fsdp"):
        config.addinivalue_line("markers", f"is_{kind}_test")


def pytest_runtest_logreport(report):
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
    elif report.failed:
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
    line = {"test": report.nodeid, "when": report.when, "outcome": report.outcome, "reason": reason}
    line["is_part"] = getattr(report, "context", None) is not None
    with (Path(__file__).parent.parent / "reports.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\\n")
"""


class Result(NamedTuple):
    """Of one test: passed, failed or skipped; why it failed or was skipped; why a failure is none of ours, or None."""

    test: str
    outcome: str
    reason: str
    explained: str | None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="a tar file or folder of transformers' source; default: fetched")
    parser.add_argument("--only", default="", help="run the tests whose name matches, as pytest's -k")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for all tests together")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    check_needed(NEEDED)
    version = importlib.metadata.version("transformers")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = arguments.source or fetch_source(version, folder / "fetched")
        left_out = lay_out(open_source(source, folder / "source"), folder / "work", version=version)
        lines = run_tests(folder / "work", only=arguments.only, timeout_s=arguments.timeout)
    results = judge(lines)
    print_report(results, left_out=left_out, version=version)
    if arguments.json is not None:
        rows = [result._asdict() for result in results]
        arguments.json.write_text(json.dumps({"version": version, "results": rows}, indent=2) + "\n")
    return int(any(r.outcome == "failed" and r.explained is None for r in results))


def check_needed(names: Sequence[str]) -> None:
    """ModuleNotFoundError naming everything that is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(f"not installed: {', '.join(missing)}; pip install {' '.join(missing)}")


def fetch_source(version: str, folder: Path) -> Path:
    """The source distribution of this version of transformers, from the package index."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*words, f"transformers=={version}", "--dest", str(folder)], check=True)
    (found,) = folder.glob("transformers-*.tar.gz")
    return found


def open_source(source: Path, folder: Path) -> Path:
    """The unpacked folder that holds tests/; ValueError where there is none."""
    if source.is_file():
        with tarfile.open(source) as tar:
            tar.extractall(folder, filter="data")
        source = folder
    for found in (source, *sorted(path for path in source.iterdir() if path.is_dir())):
        if (found / "tests" / COMMON_TESTS).is_file():
            return found
    raise ValueError(f"{source} has no tests/{COMMON_TESTS}; give a source distribution or a checkout of transformers")


def lay_out(source: Path, folder: Path, *, version: str) -> list[str]:
    """Copy the tests to `folder`, add ours and a stand-in for each file that is absent; what is left out for that.

    ValueError where the source is not of the installed version, whose code is what is tested.
    """
    text = (source / "src" / "transformers" / "__init__.py").read_text()
    found = re.findall(r'^__version__ = "([^"]+)"', text, flags=re.MULTILINE)
    if found != [version]:
        raise ValueError(
            f"{source} holds transformers {' '.join(found) or 'of an unknown version'}, but {version} is installed; "
            "tests and code must be of one version"
        )
    tests = folder / "tests"
    shutil.copytree(source / "tests", tests)
    left_out = []
    for name, absent in ABSENT.items():
        path = tests / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(absent.stand_in)
            left_out.append(absent.left_out)
        for package in {tests, path.parent}:
            (package / "__init__.py").touch()
    (tests / "test_gather_moe.py").write_text(OUR_TESTS)
    (tests / "conftest.py").write_text(REPORTING)
    return left_out


def run_tests(folder: Path, *, only: str, timeout_s: int) -> list[dict[str, Any]]:
    """Run our subclasses of the suite in a process of their own; a report per test and per part of one."""
    words = [sys.executable, "-m", "pytest", "-q", "--disable-warnings", "-p", "no:cacheprovider", "--tb=short"]
    words += ["-k", only] if only else []
    # The models are tiny: more threads than one would wait for each other.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1"}
    words.append("tests/test_gather_moe.py")
    done = subprocess.run(words, cwd=folder, env=environment, timeout=timeout_s, check=False)
    reports = folder / "reports.jsonl"
    if done.returncode not in (0, 1) or not reports.exists():
        raise RuntimeError(f"pytest ended with exit code {done.returncode}; see its output above")
    return [json.loads(line) for line in reports.read_text().splitlines()]


def judge(lines: Sequence[dict[str, Any]]) -> list[Result]:
    """One result per test, whatever its set-up, its parts and it itself came to, in the order of the first reports."""
    by_test: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_test.setdefault(line["test"].split("::", 1)[-1].replace("::", "."), []).append(line)
    results = []
    for test, reports in by_test.items():
        failed = [report["reason"] for report in reports if report["outcome"] == "failed"]
        skipped = [report["reason"] for report in reports if report["outcome"] == "skipped"]
        parts = [report for report in reports if report["is_part"]]
        if failed:
            results.append(Result(test, "failed", "; ".join(dict.fromkeys(failed)), explanation(test)))
        elif skipped and (not parts or all(part["outcome"] == "skipped" for part in parts)):
            results.append(Result(test, "skipped", "; ".join(dict.fromkeys(skipped)), None))
        else:
            results.append(Result(test, "passed", "", None))
    return results


def explanation(test: str) -> str | None:
    """Why a failure of `test` (Class.name) is not a fault of the model's, where it is not."""
    name = test.rsplit(".", 1)[-1]
    return next((reason for pattern, reason in EXPLAINED.items() if fnmatch(name, pattern)), None)


def print_report(results: Sequence[Result], *, left_out: Sequence[str], version: str) -> None:
    counts = {kind: sum(r.outcome == kind for r in results) for kind in ("passed", "failed", "skipped")}
    print(f"\ntransformers {version}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    for what in left_out:
        print(f"left out, not in this source: {what}")
    skips: dict[str, int] = {}
    for result in results:
        if result.outcome == "skipped":
            reason = result.reason.splitlines()[0].removeprefix("Skipped: ")
            skips[reason] = skips.get(reason, 0) + 1
    for reason, count in sorted(skips.items(), key=lambda item: -item[1]):
        print(f"{count:5d} skipped: {reason}")
    for result in results:
        if result.outcome == "failed":
            why = f"explained: {result.explained}" if result.explained else f"UNEXPLAINED: {result.reason[:300]}"
            print(f"failed {result.test}\n    {why}")


if __name__ == "__main__":
    sys.exit(main())
