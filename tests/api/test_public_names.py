"""What `import phalanx` offers: lazily, documented, and each example true."""

import doctest
import importlib
import inspect
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.core.errors import UsageError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "phalanx"
PUBLIC = {
    *(
        "plan",
        "estimate",
        "messages",
        "verify",
        "train",
        "schedule",
        "published",
        "checkpoints",
        "drill",
        "dry_run",
    ),
    *("report", "doctor", "RunReport", "Findings"),
    *("Layout", "ModelShape", "Cluster", "Run", "Recipe", "Schedule", "Message"),
    *("Plan", "Estimate", "Verdict", "Summary", "Published", "CheckpointList"),
    *("DrillReport", "DryRun"),
    *("PhalanxError", "UsageError", "RefusedError", "ScheduleError", "DataError"),
    "CheckpointError",
}
ERRORS = {name for name in PUBLIC if name.endswith("Error")}
FUNCTIONS = {name for name in PUBLIC if name.islower()}


def test_all_is_what_is_public():
    assert set(phalanx.__all__) == PUBLIC
    assert set(dir(phalanx)) >= PUBLIC
    assert all(getattr(phalanx, name).__name__ for name in PUBLIC)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = phalanx.trane


def loaded(code: str) -> set[str]:
    """The modules of a fresh interpreter after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return set(done.stdout.split())


def test_importing_brings_nothing_else():
    ours = {name for name in loaded("import phalanx") if name.startswith("phalanx")}
    assert ours == {"phalanx"}


def test_planning_brings_no_torch():
    code = (
        "import phalanx; phalanx.estimate('llama-3.1-8b', 'h100x8', 'tp=8', batch=8, seq=1024); "
        "phalanx.schedule('1f1b', 2, 2); phalanx.messages('gpt-3-175b', 'tp=8', batch=1, seq=64); "
        "phalanx.plan, phalanx.published; phalanx.checkpoints('.'); "
        "phalanx.report('tests/reports/recorded'), phalanx.doctor('tests/reports/recorded')"
    )
    assert "torch" not in loaded(code)


def cpu_seconds(code: str) -> float:
    """Least CPU time of a fresh interpreter that runs `code`, of several tries."""
    best = float("inf")
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def test_importing_takes_less_than_50_milliseconds():
    assert cpu_seconds("import phalanx") - cpu_seconds("import importlib, typing") < 0.05


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_documented(name: str):
    text = inspect.getdoc(getattr(phalanx, name)) or ""
    assert len(text) > 40
    if name not in ERRORS:
        assert ">>> " in text, f"{name} has no example"
    if name in FUNCTIONS:
        assert all(f"{section}:\n" in text for section in ("Args", "Returns", "Raises"))


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_argument_of_a_public_function_is_typed_and_explained(name: str):
    function = getattr(phalanx, name)
    text = inspect.getdoc(function) or ""
    for argument in inspect.signature(function).parameters.values():
        assert argument.annotation is not inspect.Parameter.empty
        assert f"{argument.name}: " in text or f"{argument.name}, " in text


def documented() -> list[doctest.DocTest]:
    """Every example in the docstrings of the package."""
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    sources = [path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sorted(sources)]
    modules = [name.removesuffix(".__init__") for name in names]
    found = {}
    for module in modules:
        for test in finder.find(importlib.import_module(module), module):
            if test.examples:
                found[test.name] = test
    return list(found.values())


@pytest.mark.parametrize("example", documented(), ids=lambda example: example.name)
def test_every_example_is_true(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(ROOT)
    example.globs["tmp_path"] = tmp_path
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: phalanx.estimate("lama-3.1-8b", "h100x8", "tp=8", batch=8, seq=64),
            "did you mean",
        ),
        (lambda: phalanx.estimate("gpt-3-175b", 8, "tp=8", batch=8, seq=64), "cluster is 8"),
        (lambda: phalanx.estimate(7, "h100x8", "tp=8", batch=8, seq=64), "model is 7"),
        (lambda: phalanx.plan("gpt-3-175b", "h100x8"), "give one of them"),
        (lambda: phalanx.messages("gpt-3-175b", "tp=8", batch=8, seq=64, rank=8), "ranks 0 to 7"),
        (lambda: phalanx.schedule("zigzag", 2, 2), "unknown schedule"),
        (lambda: phalanx.train({"recipe": {"stesp": 3}}), "did you mean steps"),
        (lambda: phalanx.verify("tq=2"), "did you mean"),
        (
            lambda: phalanx.estimate(
                "gpt-3-175b", "h100x8", "tp=8", batch=8, seq=64, framework="megatorn"
            ),
            "did you mean megatron",
        ),
    ],
)
def test_a_wrong_argument_is_answered_with_what_works(call, words: str):
    with pytest.raises(UsageError, match=words):
        call()


@pytest.mark.parametrize(
    "result",
    [
        lambda: phalanx.estimate("llama-3.1-8b", "h100x8", "tp=8", batch=8, seq=1024),
        lambda: phalanx.plan("llama-3.1-8b", "h100x8", batch=8, seq=1024).asking("tp=4"),
        lambda: phalanx.schedule("zb-h1", 4, 8),
        lambda: phalanx.published(ROOT / "benchmarks" / "published" / "runs_fit.csv"),
        lambda: phalanx.verify("tp=2", steps=1),
        lambda: phalanx.report(ROOT / "tests" / "reports" / "recorded"),
        lambda: phalanx.doctor(ROOT / "tests" / "reports" / "recorded"),
    ],
    ids=["estimate", "plan", "schedule", "published", "verify", "report", "doctor"],
)
def test_every_result_is_a_document_and_a_table(result):
    found = result()
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["schema"] == 1
    assert document == found.to_dict()
    html = found._repr_html_()
    assert html.startswith("<table>")
    assert html.endswith("</table>")


@pytest.mark.parametrize(
    "call",
    [
        lambda: phalanx.estimate("gpt2", "h100x8", "tp=4", batch=8, seq=64, framework=3),
        lambda: phalanx.estimate("gpt2", "h100x8", None, batch=8, seq=64),
        lambda: phalanx.estimate("gpt2", "h100x8", "tp=4", batch=8, seq=None),
        lambda: phalanx.messages("gpt2", "tp=2", batch=8, seq=64, rank="0"),
        lambda: phalanx.plan("gpt2", "h100x8", tokens=[1]),
        lambda: phalanx.plan("gpt2", "h100x8", batch=8, fixed=3),
        lambda: phalanx.plan("gpt2", "h100x8", batch=8, memory=[3]),
        lambda: phalanx.plan("gpt2", "h100x8", batch="8"),
        lambda: phalanx.published(3),
        lambda: phalanx.report(3),
        lambda: phalanx.doctor(3),
        lambda: phalanx.schedule("1f1b", "4", 8),
        lambda: phalanx.schedule(3, 4, 8),
        lambda: phalanx.schedule("1f1b", 4, 8, costs={"F": "x"}),
        lambda: phalanx.train(3),
        lambda: phalanx.verify([]),
        lambda: phalanx.verify(3),
        lambda: phalanx.verify("tp=2", steps="1"),
        lambda: phalanx.verify("tp=2", model=3),
        lambda: phalanx.verify("tp=2", recipe=3),
    ],
)
def test_a_value_of_the_wrong_kind_is_answered_with_the_right_one(call):
    with pytest.raises(UsageError, match=r" is \S+; it is |layout is empty"):
        call()


def test_a_whole_model_can_be_verified():
    shape = phalanx.ModelShape(layers=1, hidden=16, heads=2, kv_heads=2, ffn=32, vocab=64)
    verdict = phalanx.verify("tp=2", steps=1, model=shape)
    assert verdict.passed
    assert verdict.outcomes[0].case.run.model.hidden == 16


def test_an_option_that_nobody_knows_is_said_with_the_nearest() -> None:
    with pytest.raises(phalanx.UsageError, match="did you mean max_tp"):
        phalanx.plan("llama-3.1-8b", "h100x8", batch=64, seq=4096, max_TP=1)
