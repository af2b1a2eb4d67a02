"""The report of a plan and the planner's page: what they show, what a browser makes of them, and what the server refuses."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from fourfold.cli import main
from fourfold.plan import Plan
from fourfold.planner.api import judge, make_plan, uniform_plans
from fourfold.planner.problem import parse_fixes
from fourfold.schema import format_bytes, format_seconds
from fourfold.site.question import Described, Question, ask, cluster_fields, problem_of
from fourfold.site.static import package_zip
from fourfold.testing.browser import Browser, missing_browser
from fourfold.view.plan_report import report_data, write_report

SMALL: dict[str, Any] = {"model": "gpt2", "cluster": {"preset": "a100-40g"}, "batch": 16, "fix": "mode=keep"}
"""A question that is answered in a second."""
HOSTILE = "</script><img src=x onerror=window.hit=1><script>window.hit=1</script>"
needs_browser = pytest.mark.skipif(bool(missing_browser()), reason=missing_browser() or "-")


def answered(**changes: Any) -> dict[str, Any]:
    return json.loads(_answered(json.dumps(SMALL | changes)))


@cache
def _answered(question: str) -> str:
    return ask("plan", question)


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text(), re.S)
    assert found
    return json.loads(found[1])


# ---- what is in a report ----


def test_a_report_adds_up() -> None:
    data = answered(fix="pipe=2 col=2 schedule=wave waves=2")
    plan = Plan.from_dict(data["plan"])
    assert plan.predicted is not None
    assert sum(data["parts"].values()) == pytest.approx(data["predicted"]["seconds"], rel=1e-4)
    for rank in data["memory"]["ranks"]:
        assert sum(rank.get(part, 0) for part in data["memory"]["parts"]) == pytest.approx(rank["bytes"], abs=8)
    units = data["units"]
    assert [u["name"] for u in units] == [
        "embed",
        *(f"blocks.{i}.{x}" for i in range(12) for x in ("attn", "mlp")),
        "head",
    ]
    assert sum(u["parameters"] for u in units) == data["question"]["parameters"]
    for u in units:
        rule = plan.rule_for(u["name"])
        assert (u["mode"], u["recompute"], u["within"]) == (rule.mode, rule.recompute, rule.within)
    # two waves over two ranks: eight stages down and up again
    assert units[0]["rank"] == units[-1]["rank"] == 0
    assert len({u["stage"] for u in units}) == 8
    best = {"kind": "found", "seconds": data["predicted"]["seconds"], "bytes": data["predicted"]["peak_bytes"]}
    assert any(best.items() <= point.items() for point in data["points"])
    assert data["lower_bound"] <= data["predicted"]["seconds"] <= min(a["seconds"] for a in data["alternatives"])


def test_the_mesh_is_drawn_over_the_links_that_it_uses() -> None:
    data = answered(
        fix="pipe=2 data=2 col=4 micro_batch_size=1 schedule=1f1b", cluster={"preset": "a100-40g", "nodes": 2}
    )
    axes = {a["name"]: a for a in data["mesh"]["axes"]}
    assert {n: (a["degree"], a["stride"], a["links"]) for n, a in axes.items()} == {
        "col": (4, 1, [0]),
        "data": (2, 4, [0]),
        "pipe": (2, 8, [1]),
    }
    assert [level["name"] for level in data["mesh"]["levels"]] == ["NVLink", "InfiniBand"]


def test_texts_of_a_report_are_the_plan() -> None:
    data = answered()
    texts = {t["name"]: t["text"] for t in data["texts"]}
    assert json.loads(texts["plan.json"]) == data["plan"]
    assert "--training.global_batch_size 16" in texts["torchtitan"]
    assert "--global-batch-size 16" in texts["megatron"]
    assert (
        texts["command"]
        == "fourfold plan gpt2.json --cluster a100-40g --nodes 1 --global-batch 16 --fix mode=keep -o plan.json"
    )


def test_the_page_plans_as_the_command_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files that it offers and the command that it shows give its plan; numbers of a described cluster, too."""
    cluster = {"preset": "a100-40g", "devices": 4, "memory": "20GiB", "tflops": 200, "inside": 100, "between": 5}
    data = answered(cluster=cluster, seq_len=512)
    for text in data["texts"]:
        if text["file"]:
            (tmp_path / text["file"]).write_text(text["text"])
    words = data["texts"][0]["text"].split()
    words = [str(tmp_path / w) if re.search(r"\.(json|toml)$", w) else w for w in words[1:]]
    assert main([*words, "--json"]) == 0
    theirs = json.loads(capsys.readouterr().out)
    for plan in (theirs, data["plan"]):
        del plan["certificate"]["seconds"]
    assert theirs == data["plan"]


def test_uniform_plans_are_plain_and_judged() -> None:
    problem = problem_of(Question(model="llama-3.1-8b", batch=64, seq_len=8192))
    plans = list(uniform_plans(problem, 30))
    assert len(plans) == 30 == len({json.dumps(p.to_dict()) for p in plans})
    assert all(len(p.unit) == 1 and p.mesh.ranks == 8 for p in plans)
    whole = judge(plans[3], problem).predicted or {}
    assert whole["not_deterministic"] < whole["seconds"]  # not asked of thirty plans: it takes as long as all the rest
    assert plans[3].predicted == {k: v for k, v in whole.items() if k != "not_deterministic"}
    fitting = [p for p in plans if p.predicted and not p.predicted["misfit"]]
    assert 0 < len(fitting) < 30
    best = make_plan(problem.spec, problem.cluster, global_batch=64, fix="mode=zero3 pipe=1 col=1")
    assert best.predicted is not None
    mine = [p for p in fitting if p.unit[0].mode == "zero3" and p.mesh.data == 8 and p.memory.optimizer == "device"]
    assert best.predicted["seconds"] <= min((p.predicted or {})["seconds"] for p in mine) * 1.0001


def test_uniform_plans_obey_what_was_fixed() -> None:
    """They are listed with the plans and the lower bound of the constrained search."""
    problem = problem_of(Question(model="gpt2", cluster=Described(preset="a100-40g", nodes=2), batch=32))
    for fix, count in (
        ("pipe=4 col=2 schedule=wave waves=1", 20),
        ("mode=zero3 recompute=full micro_batch_size=2", 10),
        ("row=2", 0),
    ):
        wanted = parse_fixes(fix.split())
        best = make_plan(problem.spec, problem.cluster, global_batch=32, fix=fix)
        assert best.certificate is not None
        plans = list(uniform_plans(problem, 1000, wanted))
        assert len(plans) >= count
        for p in plans:
            assert wanted.allows(**p.mesh.degrees, mode=p.unit[0].mode, recompute=p.unit[0].recompute)
            assert wanted.allows(micro_batch_size=p.micro_batch_size(32), schedule=p.pipeline.schedule)
            assert p.predicted is not None
            if not p.predicted["misfit"]:
                assert p.predicted["seconds"] >= best.certificate["lower_bound"] * 0.99999


def test_a_judged_plan_that_does_not_fit() -> None:
    problem = problem_of(Question(model="llama-3.1-8b", batch=64, seq_len=8192))
    plan = judge(Plan.from_dict({"mesh": {"data": 8}, "precision": {"compute": "bf16"}}), problem)
    data = report_data(plan, problem)
    assert "too much" in data["misfit"]
    assert {t["name"] for t in data["texts"]} == {"plan.json", "plan.toml"}, "what does not fit is not exported"


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / HOSTILE.replace("/", "\u2215")
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 99, "n_positions": 64})
    )
    page = tmp_path / "report.html"
    command = ["plan", str(folder), "--cluster", "rtx-4090", "--global-batch", "4", "--html", str(page)]
    assert main([*command, "--what-if", "memory=x2", "--fix", "mode=zero3"]) == 0
    assert f"report: {page}" in capsys.readouterr().out
    data = data_of(page)
    assert data["question"]["model"] == folder.name
    assert data["notes"][0].startswith("what if memory=x2: ")
    assert "<img" not in page.read_text()
    assert len([p for p in data["points"] if p["kind"] == "found"]) >= len(data["alternatives"])
    assert main([*command, "--top", "2"]) == 0
    assert "\n 2 " in (shown := capsys.readouterr().out)
    assert "\n 3 " not in shown, "the page has all layouts, the table those that were asked for"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the model is missing"),
        (["configs/gpt-tiny.toml"], "--cluster is missing"),
        (["configs/gpt-tiny.toml", "--cluster", "h200", "--port", "80"], "it is the port of --serve"),
        (["configs/gpt-tiny.toml", "--serve"], "MODEL: not with --serve"),
        (["--serve", "--port", "70000"], "must be from 0 to 65535"),
        (["configs/gpt-tiny.toml", "--cluster", "h200", "--html", "plan.json"], "a report is saved as .html or .htm"),
    ],
)
def test_refusals(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


# ---- questions ----


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"config": '{"model_type": '}, "config.json: not valid JSON"),
        ({"config": "[1]"}, "the top level must be a table"),
        ({"config": '{"model_type": "mamba"}'}, "model_type 'mamba' is not supported; known: gpt2"),
        ({"config": '{"model_type": "mixtral"}'}, "a mixture of experts is not supported"),
        ({}, "no model: choose one"),
        ({"model": "gpt5"}, "unknown model 'gpt5'; did you mean 'gpt2'?"),
        ({"model": "gpt2", "batch": 0}, "must be a whole number of at least 1"),
        ({"model": "gpt2", "batch": 1.5}, "batch"),
        ({"model": "gpt2", "cluster": {"preset": "/etc/hostname.toml"}}, "unknown cluster '/etc/hostname.toml'"),
        ({"model": "gpt2", "cluster": {"preset": "local"}}, "describe yours instead"),
        ({"model": "gpt2", "cluster": {"nodes": 10**9}}, "at most 1000000 are supported"),
        ({"model": "gpt2", "cluster": {"memory": "-1GiB"}}, "is not a size"),
        ({"model": "gpt2", "fix": "col=x"}, "whole number of at least 1"),
        ({"model": "gpt2", "batch": 3, "fix": "data=8"}, "3"),
        ({"model": "gpt2", "file": "/etc/passwd"}, "unknown field 'file'"),
        ({"model": "llama-3.1-405b", "cluster": {"preset": "rtx-4090"}, "batch": 1}, "no plan fits"),
    ],
)
def test_bad_questions_are_answered_with_the_planners_sentence(question: dict[str, Any], message: str) -> None:
    answer = json.loads(ask("plan", json.dumps(question)))
    assert list(answer) == ["error"]
    assert message in answer["error"]


def test_a_plan_in_a_question_names_no_file(tmp_path: Path) -> None:
    """Elsewhere a schedule may be a file: here it would be one of the server's machine."""
    (tmp_path / "s.csv").write_text("nothing")
    plan = {"mesh": {"pipe": 2}, "pipeline": {"schedule": str(tmp_path / "s.csv")}}
    answer = json.loads(ask("glance", json.dumps(SMALL | {"plan": plan})))
    assert answer["given"]["error"].startswith("pipeline.schedule; choose one of")


def test_a_glance_says_whether_it_fits() -> None:
    def glance(**question: Any) -> dict[str, Any]:
        return json.loads(ask("glance", json.dumps(question)))

    assert glance(model="llama-3.1-8b", batch=64)["fits"] is True
    small = glance(model="llama-3.1-405b", batch=64)
    assert (small["fits"], small["parameters"]) == (False, 405853388800)
    plan = answered()["plan"]
    given = glance(**SMALL, plan=plan, what_if={"nodes": "2"})["given"]
    assert given["seconds"] < plan["predicted"]["seconds"]
    assert "too much" in glance(**SMALL, plan=plan, what_if={"memory": "1.8GiB"})["given"]["misfit"]
    assert cluster_fields(Described(preset="h200", devices=4))["name"] == "cluster"
    assert cluster_fields(Described(preset="h200")) == {"preset": "h200", "nodes": 1, "name": "h200"}


def test_what_the_browser_gets_plans_without_the_rest(tmp_path: Path) -> None:
    """The archive for Pyodide, in an interpreter that has nothing else: no torch, no rich, no tyro."""
    (tmp_path / "fourfold.zip").write_bytes(package_zip())
    script = f"import sys; sys.path.insert(0, {str(tmp_path / 'fourfold.zip')!r})\n"
    script += "from fourfold.site.question import ask\nimport fourfold\nassert '.zip' in fourfold.__file__\n"
    script += f"print(ask('plan', {json.dumps(SMALL)!r}))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found, here = json.loads(done.stdout), answered()
    assert found["plan"]["predicted"] == here["plan"]["predicted"]


# ---- the server ----


class Served:
    """`fourfold plan --serve` in a process of its own."""

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "fourfold", "plan", "--serve"]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found, line
        self.port, self.address = int(found[1]), found[0]

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with contextlib.closing(connection):
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, names)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def ask(self, kind: str, question: dict[str, Any], **headers: str) -> tuple[int, dict[str, Any]]:
        given = {"Content_Type": "application/json"} | headers
        status, _, body = self.request("POST", f"/ask/{kind}", json.dumps(question).encode(), **given)
        last = json.loads(body.splitlines()[-1])
        return status, last.get("answer", last)

    def busy(self) -> int:
        """Its processes, the spare one included."""
        return len(psutil.Process(self.process.pid).children())

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(tmp_path_factory.mktemp("served"))
    yield found
    found.close()


def test_the_server_answers_as_the_planner_does(served: Served) -> None:
    status, answer = served.ask("plan", SMALL)
    assert status == 200
    assert answer["plan"]["predicted"] == answered()["plan"]["predicted"]
    assert served.ask("glance", {"config": "{"}) == (200, json.loads(ask("glance", '{"config": "{"}')))
    assert "control character" in served.ask("plan", {"model": "a\nb"})[1]["error"]
    config = json.dumps(
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 99, "n_positions": 64}, indent=2
    )
    assert served.ask("glance", {"config": config, "batch": 8})[1]["fits"] is True


def test_a_port_that_is_taken(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--serve", "--port", str(served.port)]) == 2
    assert f"--port {served.port} cannot be used (Address already in use)" in " ".join(capsys.readouterr().err.split())


def test_only_pages_of_this_server_may_ask(served: Served) -> None:
    status, headers, page = served.request("GET", "/")
    assert status == 200
    assert b"Fourfold planner" in page
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    for host in (
        "attacker.example",
        f"attacker.example:{served.port}",
        "127.0.0.1",
        f"127.0.0.1.attacker.example:{served.port}",
    ):
        assert served.request("GET", "/", Host=host)[0] == 421, "a name that an attacker's DNS points here"
        assert served.ask("plan", SMALL, Host=host)[0] == 421
    assert served.request("GET", "/", Host=f"localhost:{served.port}")[0] == 200
    for origin in ("http://attacker.example", "null", f"http://localhost:{served.port + 1}"):
        assert served.ask("plan", SMALL, Origin=origin)[0] == 403
    assert served.ask("plan", SMALL, Sec_Fetch_Site="cross-site")[0] == 403
    assert served.ask("plan", SMALL, Content_Type="text/plain")[0] == 415, "a form of another page can send this"
    assert served.ask("glance", SMALL, Origin=f"http://127.0.0.1:{served.port}")[0] == 200


def test_it_reads_no_files_and_no_long_questions(served: Served) -> None:
    for path in (
        "/../server.py",
        "/%2e%2e/server.py",
        "//etc/passwd",
        "/worker.js",
        "/server.py",
        "/planner.html",
        "/ask/plan",
    ):
        assert served.request("GET", path)[0] == 404, path
    assert served.ask("shutdown", SMALL)[0] == 404
    assert served.ask("plan", {"config": "x" * 300_000})[0] == 413
    for length in ("-1", "1e3", "", "9" * 20):
        head = f"POST /ask/plan HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", served.port), 20) as s:
            s.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert s.recv(100).split()[1] in (b"411", b"413")


def test_searches_are_few_and_end_with_their_client(served: Served) -> None:
    slow = {"model": "llama-3.1-405b", "cluster": {"nodes": 512}, "batch": 4096}
    body = json.dumps(slow).encode()
    clients = [http.client.HTTPConnection("127.0.0.1", served.port, timeout=60) for _ in range(2)]
    for client in clients:
        client.request("POST", "/ask/plan", body, {"Content-Type": "application/json"})
        assert (
            client.getresponse().readline().strip() in (b"", b"{") or True
        )  # a sign of life: the question is being answered
    status, answer = served.ask("plan", SMALL)
    assert status == 429
    assert "2 questions of this kind are being answered already" in answer["error"]
    assert served.ask("glance", SMALL)[0] == 200, "whether it fits is still answered"
    for client in clients:
        client.close()
    deadline = time.monotonic() + 30
    while served.busy() > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert served.busy() == 1, "the client left, and its search continues"


# ---- in a browser ----

TIP = "return document.querySelector('.ff-tip').textContent"


@needs_browser
@pytest.mark.timeout(240)
def test_a_browser_shows_the_report(tmp_path: Path) -> None:
    problem = problem_of(Question(model="gpt2", cluster=Described(preset="a100-40g", nodes=2), batch=32))
    plan = make_plan(problem.spec, problem.cluster, global_batch=32, fix="pipe=2 col=2 row=1 schedule=1f1b")
    data = report_data(
        plan, problem, tried=plan.alternatives or (), uniform=uniform_plans(problem, 20), notes=[HOSTILE]
    )
    for part in (data, data["question"]):
        part["model" if part is not data else "title"] = HOSTILE
    data["units"][0]["name"] = data["alternatives"][0]["name"] = data["texts"][0]["text"] = HOSTILE
    write_report(tmp_path / "r.html", data)
    with Browser(tmp_path, timeout=100) as page:
        page.open((tmp_path / "r.html").as_uri())
        page.wait("return document.querySelectorAll('svg[tabindex]').length >= 5")
        assert page.run("return document.querySelector('h1').textContent") == HOSTILE
        cards = page.run("return [...document.querySelectorAll('.card b')].map(x => x.textContent)")
        assert cards[0] == format_seconds(data["predicted"]["seconds"])
        assert cards[3] == format_bytes(data["predicted"]["peak_bytes"])
        # every picture is reached by Tab and explains itself by arrow keys
        for picture in range(page.run("return document.querySelectorAll('svg[tabindex]').length")):
            page.run("document.querySelectorAll('svg[tabindex]')[arguments[0]].focus()", picture)
            page.keys("\ue014")
            assert page.run(TIP), picture
        page.keys("\ue00c")
        assert not page.run(TIP)
        buttons = page.run(
            "return [...document.querySelectorAll('[aria-label=\"axis of the mesh\"] button')].map(x => x.textContent)"
        )
        assert buttons == ["col 2 · NVLink", "data 4 · NVLink", "pipe 2 · InfiniBand"]
        for dark in (False, True):
            page.dark(dark)
            for width, phone in ((1280, False), (360, True)):
                page.size(width, 800, phone=phone)
                page.wait("return document.querySelector('svg[tabindex]').clientWidth <= innerWidth")
                assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 27)"
        assert not page.run("return window.hit")
        assert not page.errors()
    assert not page.requests()


@needs_browser
@pytest.mark.timeout(300)
def test_a_browser_asks_the_server(tmp_path: Path, served: Served) -> None:
    with Browser(tmp_path, timeout=120) as page:

        def text(place: str) -> str:
            return page.run("return document.getElementById(arguments[0]).textContent", place)

        def fill(place: str, value: str) -> None:
            script = "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            page.run(script + "e.dispatchEvent(new Event('input', { bubbles: true }))", place, value)

        page.open(served.address)
        page.wait("return document.getElementById('fit-word').textContent")
        assert text("fit-word") == "Yes."
        # a link holds the question: it is asked at once
        page.open(f"{served.address}#model=gpt2&preset=a100-40g&nodes=1&batch=16&fix=mode%3Dkeep&if-memory=20GiB")
        page.wait("return document.getElementById('if-best').textContent")
        shown = page.run("return document.querySelector('#report .card b').textContent")
        assert shown == format_seconds(answered()["predicted"]["seconds"])
        assert "The fastest plan then" in text("if-best")
        assert "if-memory=20GiB" in page.run("return location.hash")
        # a pasted model with a hostile name; then broken JSON, an unknown type, an impossible batch
        config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 99, "n_positions": 64}
        fill("model", "paste a config.json")
        fill("name", HOSTILE)
        fill("config", json.dumps(config))
        page.run("document.getElementById('nodes').focus()")
        page.keys("\ue007")  # Enter asks
        page.wait("return document.querySelector('#report h2').textContent.startsWith(arguments[0])", HOSTILE[:20])
        assert page.run("return document.querySelector('#report h2').textContent").startswith(HOSTILE[:80])
        for name, value, sentence in (
            ("config", "", "Paste the contents of the model's config.json."),
            ("config", "{", "config.json: not valid JSON"),
            ("config", '{"model_type": "mamba"}', "config.json: model_type 'mamba' is not supported"),
            ("config", json.dumps(config), ""),
            ("batch", "0", "The batch = 0 must be a whole number of at least 1."),
        ):
            fill(name, value)
            page.run("document.getElementById('go').click()")
            page.wait("return document.getElementById('progress').hidden")
            hidden = page.run("return document.getElementById('error').hidden")
            assert (hidden, text("error")[: len(sentence)]) == (not sentence, sentence)
        # cancel a long search
        fill("model", "llama-3.1-405b")
        fill("nodes", "512")
        fill("batch", "4096")
        page.run("document.getElementById('go').click()")
        page.wait("return document.getElementById('progress-text').textContent.includes('layouts')")
        page.run("document.getElementById('cancel').click()")
        page.wait("return document.getElementById('progress').hidden")
        page.size(360, 740, phone=True)
        assert page.run("return document.documentElement.scrollWidth") <= 360
        assert not page.run("return window.hit")
        assert not page.errors()
    assert {address.split("/")[2] for address in page.requests()} == {f"127.0.0.1:{served.port}"}
