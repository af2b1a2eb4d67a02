"""The planner's page with the real Pyodide in headless Chromium, against the command line: the same plans, and in which time.

    python -m benchmarks.site [--quick] [--json PATH] [--questions N …] [--pyodide FILE.tgz]

Builds the static folder (Pyodide comes from npm, or from a file), serves it, and asks the page 12 questions through its
address, as a link does. Each plan must equal that of `fourfold plan --json`, its numbers to a millionth (but for the seconds
of the search), nothing may be asked for elsewhere, the console must be empty, and bad input must be answered in the planner's
words; otherwise the exit code is 1. Seconds: of the page from the change of its address to the report, with Python loaded
already; of the command as a whole process. On a busy machine, see the seconds of processor time (of all of Chromium's
processes). Also how long a fresh page takes to say whether the question that it opens with fits (the answer is part of the
page), to answer a change made at once (Python is being loaded), and to answer another change when Python is loaded.
"""

from __future__ import annotations

import functools
import http.server
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Row, finish, lower_is_better, parser_of, show
from fourfold.site.question import Question, cluster_fields
from fourfold.site.static import build_site
from fourfold.testing.browser import Browser, missing_browser

QUESTIONS: tuple[dict[str, Any], ...] = (
    {"model": "llama-3.1-8b", "preset": "h100-sxm", "nodes": 1, "batch": 64, "seq": 8192},
    {"model": "gpt2", "preset": "rtx-4090", "nodes": 1, "batch": 32},
    {"model": "llama-3.2-1b", "preset": "a100-40g", "nodes": 2, "batch": 64, "fix": "pipe=2"},
    {"model": "gpt2-xl", "preset": "v100-16g", "nodes": 2, "batch": 64},
    {"model": "mistral-7b", "preset": "l40s", "nodes": 1, "batch": 32},
    {"model": "qwen3-8b", "preset": "h200", "nodes": 1, "batch": 16, "moments": "bf16"},
    {"model": "gemma-2-9b", "preset": "a100-80g", "nodes": 2, "batch": 128},
    {"model": "phi-4", "preset": "h100-sxm", "nodes": 2, "devices": 4, "memory": 60, "between": 12.5, "batch": 64},
    {"model": "gpt-neox-20b", "preset": "a100-40g", "nodes": 8, "batch": 512, "precision": "fp32"},
    {"model": "olmo-2-32b", "preset": "b200", "nodes": 4, "batch": 256, "fix": "schedule=wave"},
    {"model": "llama-3.1-70b", "preset": "h100-sxm", "nodes": 8, "batch": 512},
    {"model": "llama-3.1-70b", "preset": "h100-sxm", "nodes": 128, "batch": 1024},
)
"""By field of the page's form."""
QUICK = [0, 1, 2]
HOSTILE = "<img src=x onerror=window.hit=1>"
TINY = '{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 99, "n_positions": 64}'
PLAN = "return window.answered ? JSON.stringify(window.answered.plan) : ''"
CATCH = "const show = FourfoldReport.show; FourfoldReport.show = (r, d, o) => { window.answered = d; show(r, d, o); };"


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--questions", type=int, nargs="+", metavar="N", help="these alone, from 0")
    parser.add_argument("--pyodide", type=Path, metavar="FILE", default=os.environ.get("FOURFOLD_PYODIDE"))
    args = parser.parse_args()
    numbers = args.questions or (QUICK if args.quick else range(len(QUESTIONS)))
    missing = missing_browser() or ("needs npm" if not args.pyodide and shutil.which("npm") is None else "")
    if missing:
        print(f"skipped: {missing}")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_site(folder / "site", Path(args.pyodide) if args.pyodide else None)
        handler = functools.partial(_Quiet, directory=str(folder / "site"))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                rows, wrong = run(folder, f"http://127.0.0.1:{server.server_address[1]}/", numbers)
            finally:
                server.shutdown()
                thread.join()
    show("The planner's page and the command line", rows)
    finish("site", rows, args.json)
    if wrong:
        sys.exit("\n".join(wrong))


def run(folder: Path, address: str, numbers: Sequence[int]) -> tuple[list[Row], list[str]]:
    """Ask these questions; returns rows and what was wrong."""
    rows: list[Row] = []
    wrong: list[str] = []
    with Browser(folder, timeout=300) as page:
        page.open(address)
        page.run("window.began = performance.now()")
        first = page.wait("return document.getElementById('fit-word').textContent && performance.now() / 1000")
        page.run(CATCH)
        loading = _changed(page, 2)  # the first change waits until Python is loaded
        again = _changed(page, 4)
        page.wait("return document.getElementById('progress').hidden")
        for fields in (QUESTIONS[n] for n in numbers):
            case = " ".join(f"{v}" for v in fields.values())
            page.run("window.answered = null")
            seconds, spent = _asked(page, fields)
            mine = json.loads(page.run(PLAN) or "{}")
            theirs, took, theirs_spent = _command(folder, fields)
            for plan in (mine, theirs):
                plan.get("certificate", {}).pop("seconds", None)
            other = _difference(theirs, mine)
            if other:
                wrong.append(f"{case}: not the plan of the command line: {other}")
            rows.append(lower_is_better(case, "command", "seconds", seconds, took))
            rows.append(lower_is_better(case, "command", "of processors", spent, theirs_spent))
            how = "ANOTHER PLAN" if other else "same plan"
            both = f"{seconds:.1f} s ({spent:.1f} s of processors), command {took:.1f} s ({theirs_spent:.1f} s)"
            print(f"{case}: {how}, {both}", flush=True)
        rows.append(lower_is_better("will it fit, page just opened", "a second", "seconds", first, 1.0))
        rows.append(
            lower_is_better("will it fit, a change while Python loads", "ten seconds", "seconds", loading, 10.0)
        )
        rows.append(lower_is_better("will it fit, after a change", "a second", "seconds", again, 1.0))
        wrong += _conduct(page)
        wrong += [f"console: {message}" for message in page.errors()]
    wrong += [f"asked for {a}" for a in page.requests() if not a.startswith(address)]
    return rows, wrong


def _changed(page: Browser, count: int) -> float:
    """Seconds from a change of the number of nodes to the new verdict."""
    script = """
      const fit = document.getElementById("fit-text"), was = fit.textContent, nodes = document.getElementById("nodes");
      const began = performance.now();
      nodes.value = arguments[0]; nodes.dispatchEvent(new Event("input", { bubbles: true }));
      return new Promise(done => { const id = setInterval(() => {
        if (fit.textContent !== was) { clearInterval(id); done((performance.now() - began) / 1000); } }, 10); });
    """
    return page.run(script, count)


def _conduct(page: Browser) -> list[str]:
    """What a person may do wrong, and a cancelled search; returns what was not as it should be."""
    fill = "const [id, value] = arguments, e = document.getElementById(id); e.value = value;"
    fill += "e.dispatchEvent(new Event('input', { bubbles: true }))"
    go, hidden = "document.getElementById('go').click()", "return document.getElementById('progress').hidden"
    wrong = []
    page.open(page.run("return location.href.split('#')[0]"))
    page.wait("return document.getElementById('fit-word').textContent")
    page.run(fill, "name", HOSTILE)
    page.run(fill, "seq", "64")
    page.run(fill, "model", "paste a config.json")
    for config, batch, expected in (
        ("{", "8", "config.json: not valid JSON"),
        ('{"model_type": "mamba"}', "8", "config.json: model_type 'mamba' is not supported"),
        (TINY, "0", "The batch = 0 must be a whole number of at least 1."),
        (TINY, "8", ""),
    ):
        page.run(fill, "config", config)
        page.run(fill, "batch", batch)
        page.run(go)
        page.wait(hidden)
        said = page.run("const e = document.getElementById('error'); return e.hidden ? '' : e.textContent")
        if not said.startswith(expected) or bool(said) != bool(expected):
            wrong.append(f"{config[:30]} {batch}: answered with {said!r}")
    title = page.run("const e = document.querySelector('#report h2'); return e ? e.textContent : ''")
    if page.run("return window.hit") or not title.startswith(HOSTILE):
        wrong.append(f"the name {HOSTILE} was shown as {title}")
    for name, value in (("model", "llama-3.1-405b"), ("nodes", "512"), ("batch", "4096"), ("seq", "4096")):
        page.run(fill, name, value)
    page.run(go)
    page.wait("return document.getElementById('progress-text').textContent.includes('layouts')")
    page.run("document.getElementById('cancel').click()")
    page.wait(hidden, timeout=5)
    for name, value in (("model", "gpt2"), ("nodes", "1"), ("batch", "8"), ("seq", "64"), ("fix", "mode=keep")):
        page.run(fill, name, value)
    page.run(go)
    page.wait("const e = document.querySelector('#report h2'); return e && e.textContent.startsWith('gpt2')")
    print(
        "conduct: "
        + ("; ".join(wrong) or "errors in the planner's words, a hostile name shown as text, cancelled and asked again")
    )
    return wrong


def _asked(page: Browser, fields: dict[str, Any]) -> tuple[float, float]:
    """Open the question's link in the page; returns seconds until the report is there, and those of processors."""
    link = urllib.parse.urlencode(fields)
    script = """
      const began = performance.now(), error = document.getElementById("error");
      error.hidden = true; location.hash = arguments[0];
      return new Promise(done => { const id = setInterval(() => {
        if (window.answered || !error.hidden) { clearInterval(id); done((performance.now() - began) / 1000); } }, 20); });
    """
    before = page.processor_seconds()
    seconds = page.run(script, f"#{link}")
    spent = page.processor_seconds() - before
    page.wait("return document.getElementById('progress').hidden")
    return seconds, spent


def _command(folder: Path, fields: dict[str, Any]) -> tuple[dict[str, Any], float, float]:
    """The plan of the command line, its seconds, and those of processors."""
    models = json.loads(Path(sys.modules[Question.__module__].__file__ or "").with_name("models.json").read_text())
    (folder / f"{fields['model']}.json").write_text(json.dumps(models[fields["model"]]))
    words = [sys.executable, "-m", "fourfold", "plan", f"{fields['model']}.json", "--json"]
    names = {
        "nodes": "--nodes",
        "batch": "--global-batch",
        "seq": "--seq-len",
        "moments": "--moments",
        "precision": "--precision",
    }
    words += [w for field, flag in names.items() if field in fields for w in (flag, str(fields[field]))]
    words += ["--fix", *fields["fix"].split()] if "fix" in fields else []
    described = {k: fields[k] for k in ("devices", "memory", "between") if k in fields}
    words += ["--cluster", _cluster_file(folder, fields, described) if described else fields["preset"]]
    began, before = time.perf_counter(), _children()
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    return json.loads(done.stdout), time.perf_counter() - began, _children() - before


def _children() -> float:
    """Processor seconds of the commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cluster_file(folder: Path, fields: dict[str, Any], described: dict[str, Any]) -> str:
    from fourfold import schema
    from fourfold.site.question import Described

    memory = {"memory": f"{described.pop('memory')}GiB"} if "memory" in described else {}
    data = cluster_fields(Described(preset=fields["preset"], nodes=fields["nodes"], **described, **memory))
    (folder / "cluster.toml").write_text(schema.dump_toml({k: v for k, v in data.items() if k != "name"}))
    return "cluster.toml"


def _difference(a: Any, b: Any, where: str = "") -> str:
    """Where two plans differ; empty where they do not. Sums of floats have other last digits from Python 3.12 on."""
    if isinstance(a, dict) and isinstance(b, dict):
        found = (_difference(a.get(k), b.get(k), f"{where}.{k}") for k in sorted({*a, *b}))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        found = (_difference(x, y, f"{where}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    else:
        numbers = all(isinstance(x, float | int) for x in (a, b))
        same = math.isclose(a, b, rel_tol=1e-6) if numbers else a == b
        return "" if same else f"{where}: {str(a)[:80]} and {str(b)[:80]}"
    return next(filter(None, found), "")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    main()
