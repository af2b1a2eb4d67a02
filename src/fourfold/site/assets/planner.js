"use strict";
// The page: a question (form, address), "will it fit?" after every change, a search on request, what-if sliders below its answer.
// Answers come from an engine: Pyodide in workers of this page, or the server that served it.
{
  const $ = id => document.getElementById(id), { seconds, bytes, count, percent, el } = FourfoldReport;
  const GIB = 2 ** 30, PASTE = "paste a config.json";

  // ---- engines: ask(kind, question, { progress, signal }) -> answer ----

  class Cancelled extends Error {}

  class ServerEngine {
    about = "The server on this machine plans; nothing leaves it.";
    async ask(kind, question, { progress, signal } = {}) {
      let response;
      try {
        for (let tries = 0; tries < 20; tries++) {  // a cancelled question may take a moment to end there
          response = await fetch(`ask/${kind}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question), signal });
          if (response.status !== 429 || tries === 19) break;
          await new Promise(resolve => setTimeout(resolve, 250));
        }
        if (!response.ok) return await response.json();
        const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) return { error: "the server ended before it answered" };
          const lines = (rest + value).split("\n");
          rest = lines.pop();
          for (const line of lines) {
            if (!line) continue;
            const said = JSON.parse(line);
            if (said.answer) return said.answer;
            if (said.progress && progress) progress(said.progress);
          }
        }
      } catch (e) {
        if (signal && signal.aborted) throw new Cancelled();
        return { error: `the server does not answer; is \`fourfold plan --serve\` still running? (${e.message})` };
      }
    }
  }

  // One worker that answers one question at a time. Python cannot be interrupted: a question is cancelled by ending its worker.
  class Lane {
    constructor() { this.number = 0; this.start(); }
    start() {
      this.worker = new Worker("worker.js", { type: "module" });
      this.asked = null;
      this.ready = new Promise((resolve, reject) => { this.loaded = resolve; this.failed = reject; });
      this.ready.catch(() => {});
      this.worker.onerror = e => this.failed(new Error(e.message || "the worker could not be started"));
      this.worker.onmessage = ({ data }) => {
        if (data.ready) this.loaded();
        else if (data.failed) this.failed(new Error(data.failed));
        else if (this.asked && data.id === this.asked.id) {
          if (data.progress) this.asked.progress(data.progress);
          else { const { resolve } = this.asked; this.asked = null; resolve(data.answer); }
        }
      };
    }
    async ask(kind, question, { progress = () => {}, signal } = {}) {
      try { await this.ready; } catch (e) { return { error: `Python could not be loaded: ${e.message}` }; }
      while (this.asked) await this.asked.done;
      if (signal && signal.aborted) throw new Cancelled();
      const id = ++this.number;
      let resolve, reject;
      const done = new Promise((a, b) => { resolve = a; reject = b; });
      done.catch(() => {});
      this.asked = { id, progress, resolve, done: done.catch(() => {}) };
      if (signal) signal.addEventListener("abort", () => {
        if (!this.asked || this.asked.id !== id) return;
        this.asked = null;
        this.worker.terminate();
        this.start();
        reject(new Cancelled());
      });
      this.worker.postMessage({ id, kind, text: JSON.stringify(question) });
      return done;
    }
  }

  class PyodideEngine {
    about = "Python plans in your browser; nothing leaves this page.";
    constructor() { this.lanes = { glance: new Lane(), plan: null }; }
    async ask(kind, question, options) {
      // the lane of searches is loaded when the first is: a glance comes first, and files are in the cache then
      this.lanes[kind] = this.lanes[kind] || new Lane();
      return this.lanes[kind].ask(kind, question, kind === "glance" ? { ...options, signal: undefined } : options);
    }
    prepare() { this.lanes.glance.ready.then(() => { this.lanes.plan = this.lanes.plan || new Lane(); }, () => {}); }
  }

  const engine = document.querySelector("meta[name=engine]").content === "server" ? new ServerEngine() : new PyodideEngine();
  $("where").textContent = engine.about;
  $("theme").append(FourfoldReport.themeButton());

  // ---- the question: form, address ----

  // field of the form -> place in the question; numbers, but for texts
  const FIELDS = { nodes: "cluster", devices: "cluster", memory: "cluster", tflops: "cluster", inside: "cluster", between: "cluster", host: "cluster", batch: "", seq: "" };
  const TEXTS = ["precision", "moments", "fix"];
  const DEFAULTS = { model: "llama-3.1-8b", preset: "h100-sxm", nodes: "1", batch: "64", seq: "8192", moments: "fp32" };
  let choices = null;

  function number(id) {
    const input = $(id), text = input.value.trim();
    if (input.validity.badInput) throw new Error(`${label(input)}: not a number`);
    return text === "" ? null : Number(text);
  }
  const label = input => input.closest("label").textContent.trim().replace(/\s+/g, " ");
  function question() {
    const q = { cluster: { preset: $("preset").value } };
    if ($("model").value === PASTE && !$("config").value.trim()) throw new Error("paste the contents of the model's config.json");
    if ($("model").value === PASTE) { q.config = $("config").value; q.name = $("name").value || "model"; } else q.model = $("model").value;
    for (const [id, place] of Object.entries(FIELDS)) {
      const value = number(id);
      if (value === null) { if (id === "nodes") q.cluster.nodes = 1; continue; }
      const name = id === "seq" ? "seq_len" : id;
      (place ? q[place] : q)[name] = id === "memory" || id === "host" ? `${value}GiB` : value;
    }
    if ($("precision").value) q.precision = $("precision").value;
    if ($("moments").value !== "fp32") q.moments = $("moments").value;
    if ($("fix").value.trim()) q.fix = $("fix").value.trim();
    return q;
  }
  const formIds = ["model", "config", "name", "preset", ...Object.keys(FIELDS), ...TEXTS];
  function writeAddress() {
    const parts = new URLSearchParams();
    const pasted = $("model").value === PASTE;
    for (const id of formIds) {
      if (id === "model" && pasted) continue;
      if ((id === "config" || id === "name") && !pasted) continue;
      const value = $(id).value.trim();
      if (value && !(id === "moments" && value === "fp32")) parts.set(id, id === "config" ? compact(value) : value);
    }
    for (const [name, value] of Object.entries(changes())) parts.set(`if-${name}`, value);
    history.replaceState(null, "", `#${parts}`);
  }
  function compact(text) { try { return JSON.stringify(JSON.parse(text)); } catch { return text; } }
  function readAddress() {
    const parts = new URLSearchParams(location.hash.slice(1)), given = [...parts.keys()].length > 0;
    for (const id of formIds) {
      let value = given ? parts.get(id) || "" : DEFAULTS[id] || "";
      if (id === "model") value = parts.has("config") ? PASTE : value || DEFAULTS.model;
      if ((id === "preset" || id === "moments") && !value) value = DEFAULTS[id];
      const node = $(id);
      node.value = value;
      if (node.tagName === "SELECT" && node.value !== value) node.value = DEFAULTS[id] || "";
    }
    $("describe").open = ["devices", "memory", "tflops", "inside", "between", "host"].some(id => $(id).value);
    $("more").open = Boolean($("precision").value || $("fix").value || $("moments").value !== "fp32");
    dress();
    return { given, changes: Object.fromEntries(["memory", "nodes", "bandwidth"].filter(n => parts.has(`if-${n}`)).map(n => [n, parts.get(`if-${n}`)])) };
  }

  // what depends on the choices: placeholders, the number of GPUs, the field for a config.json
  function dress() {
    $("paste").hidden = $("model").value !== PASTE;
    const c = choices.clusters.find(x => x.name === $("preset").value), m = choices.models.find(x => x.name === $("model").value);
    $("seq").placeholder = m ? String(m.seq_len) : "the model's, at most 4096";
    $("devices").placeholder = c.devices;
    $("memory").placeholder = (c.memory / GIB).toFixed(1);
    $("tflops").placeholder = Math.round(c.tflops);
    $("inside").placeholder = c.inside ? c.inside.toFixed(0) : "—";
    $("inside").disabled = !c.inside;
    $("between").placeholder = String(+c.between.toPrecision(3));
    $("host").placeholder = (c.host / GIB).toFixed(0);
    $("inside-label").textContent = c.inside ? `${c.links[0]}: GB/s of a GPU in a node` : "GB/s of a GPU inside a node";
    $("between-label").textContent = `${c.links[c.links.length - 1]}: GB/s of a GPU between nodes`;
    const nodes = Number($("nodes").value) || 1, each = Number($("devices").value) || c.devices;
    $("ranks").textContent = `${nodes} × ${each} = ${count(nodes * each)} × ${c.device}`;
  }

  // ---- will it fit? after every change ----

  let glances = 0, timer = 0;
  async function glance() {
    const mine = ++glances;
    let q;
    try { q = question(); } catch (e) { verdict(null, e.message); return; }
    $("verdict").classList.add("stale");
    const { first } = choices, known = JSON.stringify(sorted(q)) === JSON.stringify(sorted(first.question));
    const answer = known ? first.answer : await engine.ask("glance", q);
    if (mine !== glances) return;
    $("verdict").classList.remove("stale");
    if (answer.error) { verdict(null, answer.error); return; }
    verdict(answer.fits, answer.text);
    if (!$("batch").value) $("batch").placeholder = `${count(answer.batch)}: about 4 million tokens`;
  }
  function sorted(value) {  // the same question has the same text, whatever the order of its fields
    return value && typeof value === "object" ? Object.fromEntries(Object.keys(value).sort().map(k => [k, sorted(value[k])])) : value;
  }
  function verdict(fits, text) {
    const word = $("fit-word");
    word.textContent = fits === true ? "Yes." : fits === false ? "Perhaps not:" : "";
    word.className = fits === true ? "yes" : fits === false ? "no" : "";
    $("fit-text").textContent = fits === true ? `For example ${text}. A search finds faster plans.` : sentence(text);
  }
  const sentence = text => text ? (/^[a-z]+[\s:,]/.test(text) ? text[0].toUpperCase() : text[0]) + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".") : "";
  function changed() {
    dress();
    clearTimeout(timer);
    timer = setTimeout(() => { linked = null; resetWhatIf(); writeAddress(); glance(); if (base) $("report").classList.add("old"); }, 150);
  }

  // ---- the search ----

  let base = null, running = null;
  async function search(q, what) {
    if (running) running.abort();
    const mine = running = new AbortController(), began = performance.now();
    $("error").hidden = true; $("progress").hidden = false; $("cancel").hidden = false;
    $("bar").removeAttribute("value");
    let told = "starting";
    const say = () => { $("progress-text").textContent = `${what}: ${told}, ${Math.round((performance.now() - began) / 1000)} s`; };
    say();
    const clock = setInterval(say, 1000);
    try {
      return await engine.ask("plan", q, { signal: mine.signal, progress: p => {
        if (mine.signal.aborted) return;
        $("bar").max = Math.max(1, p.total); $("bar").value = p.done;
        told = p.best === null ? (p.done === p.total ? "nothing fits, looking for what would fit" : `${count(p.done)} of ${count(p.total)} layouts`) : p.done === p.total ? `improving the best, ${seconds(p.best)} a step` : `${count(p.done)} of ${count(p.total)} layouts, best so far ${seconds(p.best)} a step`;
        say();
      } });
    } catch (e) {
      if (e instanceof Cancelled) return null;
      return { error: String(e.message || e) };
    } finally {
      clearInterval(clock);
      if (running === mine) { running = null; $("progress").hidden = true; $("cancel").hidden = true; }
    }
  }
  async function plan() {
    clearTimeout(timer);
    let q;
    try { q = question(); } catch (e) { fail(e.message); return; }
    writeAddress();
    glance();
    if (innerWidth < 820) $("verdict").scrollIntoView({ block: "start" });  // on a phone the form is above
    const answer = await search(q, "searching");
    if (!answer) return;
    if (answer.error) { base = null; $("report").replaceChildren(); $("what-if").hidden = true; fail(answer.error); return; }
    base = { q, answer };
    show(answer);
    openWhatIf();
    if (innerWidth < 820) $("report").scrollIntoView({ block: "start" });
  }
  function fail(text) { $("error").textContent = sentence(text); $("error").hidden = false; }
  function show(answer) {
    $("report").classList.remove("old");
    FourfoldReport.show($("report"), answer, { heading: "h2" });
    document.title = `${answer.title} · Fourfold planner`;
  }

  // ---- what if ----

  const MEMORY = [0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2, 3, 4], RATES = [0.125, 0.25, 0.5, 0.75, 1, 1.5, 2, 4, 8];
  const sliders = { memory: { values: MEMORY, at: 6 }, nodes: { values: [1], at: 0 }, bandwidth: { values: RATES, at: 4 } };
  let changedAnswer = null, linked = null;  // linked: changes of the address that wait for the first answer
  function changes() {
    if (linked) return linked;
    const out = {};
    if (!base || $("what-if").hidden) return out;
    for (const [name, s] of Object.entries(sliders)) {
      const i = Number($(`if-${name}`).value);
      if (i === s.at) continue;
      out[name] = name === "memory" ? `${gib(s.values[i])}GiB` : name === "nodes" ? String(s.values[i]) : `x${s.values[i]}`;
    }
    return out;
  }
  function gib(factor) { const value = factor * base.answer.question.memory / GIB; return +value.toFixed(value < 16 ? 1 : 0); }
  function textOf(name, i) {
    const value = sliders[name].values[i];
    if (name === "memory") return `${gib(value)} GiB`;
    return name === "nodes" ? count(value) : `× ${value}`;
  }
  function openWhatIf() {
    const nodes = base.answer.question.nodes, all = new Set([nodes]);
    for (let n = 1; n <= Math.max(8, 8 * nodes) && n <= 4096; n *= 2) all.add(n);
    sliders.nodes.values = [...all].sort((a, b) => a - b);
    sliders.nodes.at = sliders.nodes.values.indexOf(nodes);
    for (const [name, s] of Object.entries(sliders)) Object.assign($(`if-${name}`), { min: 0, max: s.values.length - 1, step: 1 });
    $("what-if").hidden = false;
    resetWhatIf();
  }
  function resetWhatIf() {
    changedAnswer = null; whatIfs++;
    if (!base) return;
    for (const [name, s] of Object.entries(sliders)) { $(`if-${name}`).value = s.at; label_(name); }
    for (const id of ["if-given", "if-best"]) $(id).textContent = "";
    $("if-show").hidden = $("if-reset").hidden = true;
  }
  function label_(name) {
    const text = textOf(name, Number($(`if-${name}`).value));
    $(`if-${name}-text`).textContent = text;
    $(`if-${name}`).setAttribute("aria-valuetext", text);
  }
  let whatIfs = 0, whatIfTimer = 0;
  const changesText = c => Object.entries(c).map(([k, v]) => `${k} ${v.replace(/^x/, "× ").replace("GiB", " GiB")}`).join(", ");
  async function tryWhatIf() {
    const mine = ++whatIfs, c = changes();
    $("if-reset").hidden = !Object.keys(c).length;
    if (!Object.keys(c).length) { resetWhatIf(); show(base.answer); writeAddress(); return; }
    const answer = await engine.ask("glance", { ...base.q, what_if: c, plan: withoutReport(base.answer.plan) });
    if (mine !== whatIfs) return;
    const given = answer.error ? { error: answer.error } : answer.given, was = base.answer.predicted.seconds;
    $("if-given").textContent = given.error ? `With ${changesText(c)} the plan below is not possible: ${sentence(given.error)}`
      : given.misfit ? `With ${changesText(c)} the plan below does not fit: ${sentence(given.misfit)}`
      : `With ${changesText(c)} the plan below takes ${seconds(given.seconds)} a step (${signed(given.seconds / was - 1)}) and ${bytes(given.peak_bytes)} of ${bytes(given.usable_bytes)}.`;
  }
  async function searchWhatIf() {
    const c = changes(), mine = whatIfs;
    if (!Object.keys(c).length) return;
    writeAddress();
    $("if-best").textContent = "";
    const answer = await search({ ...base.q, what_if: c }, `searching with ${changesText(c)}`);
    if (!answer || mine !== whatIfs) return;
    if (answer.error) { $("if-best").textContent = sentence(answer.error); $("if-show").hidden = true; return; }
    changedAnswer = answer;
    const was = base.answer.predicted.seconds, now = answer.predicted.seconds;
    $("if-best").textContent = `The fastest plan then: ${answer.alternatives[0].name}, ${answer.alternatives[0].units}: ${seconds(now)} a step (${signed(now / was - 1)}).`;
    $("if-show").textContent = "Show this plan"; $("if-show").hidden = false;
  }
  const signed = x => `${x > 0 ? "+" : x < 0 ? "−" : "±"}${percent(Math.abs(x))}`;
  const withoutReport = p => { const out = { ...p }; for (const name of ["predicted", "certificate", "alternatives"]) delete out[name]; return out; };
  for (const name of Object.keys(sliders)) {
    $(`if-${name}`).addEventListener("input", () => { label_(name); $("if-show").hidden = true; $("if-best").textContent = ""; clearTimeout(whatIfTimer); whatIfTimer = setTimeout(tryWhatIf, 60); });
    $(`if-${name}`).addEventListener("change", () => { clearTimeout(whatIfTimer); whatIfTimer = setTimeout(() => { tryWhatIf(); searchWhatIf(); }, 250); });
  }
  $("if-reset").addEventListener("click", () => { if (running) running.abort(); resetWhatIf(); show(base.answer); writeAddress(); });
  $("if-show").addEventListener("click", () => {
    const other = $("if-show").textContent === "Show this plan";
    show(other ? changedAnswer : base.answer);
    $("if-show").textContent = other ? "Show the first plan" : "Show this plan";
  });

  // ---- start ----

  $("question").addEventListener("input", changed);
  $("question").addEventListener("submit", e => { e.preventDefault(); plan(); });
  $("cancel").addEventListener("click", () => { if (running) running.abort(); $("go").focus(); });
  addEventListener("keydown", e => { if (e.key === "Escape" && running) running.abort(); });
  $("link").addEventListener("click", e => { writeAddress(); FourfoldReport.copy(location.href, e.currentTarget); });
  async function follow() {
    const { given, changes: wanted } = readAddress();
    if (!given) { glance(); return; }
    linked = Object.keys(wanted).length ? wanted : null;
    await plan();
    if (linked !== wanted) return;
    linked = null;
    if (base) { moveTo(wanted); await tryWhatIf(); await searchWhatIf(); }
  }
  function moveTo(wanted) {
    for (const [name, s] of Object.entries(sliders)) {
      if (!(name in wanted)) continue;
      const value = name === "memory" ? parseFloat(wanted[name]) * GIB / base.answer.question.memory : parseFloat(wanted[name].replace("x", ""));
      if (!(value > 0)) continue;
      $(`if-${name}`).value = s.values.reduce((best, v, i) => Math.abs(Math.log(v / value)) < Math.abs(Math.log(s.values[best] / value)) ? i : best, 0);
      label_(name);
    }
  }
  addEventListener("hashchange", follow);
  fetch("choices.json").then(r => r.json()).then(found => {
    choices = found;
    $("model").append(...found.models.map(m => el("option", { value: m.name }, `${m.name} (${m.parameters >= 1e9 ? (m.parameters / 1e9).toPrecision(3) + " B" : Math.round(m.parameters / 1e6) + " M"})`)), el("option", { value: PASTE }, PASTE));
    $("preset").append(...found.clusters.map(c => el("option", { value: c.name }, `${c.device} · ${c.name}, ${c.devices} a node`)));
    follow();
    if (engine.prepare) engine.prepare();
  }).catch(e => fail(`the page could not be loaded: ${e.message}`));
}
