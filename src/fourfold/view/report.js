"use strict";
// Draws the report of a plan (view/plan_report.py) from its data. Text from users goes through textContent alone.
// Used by report.html, which holds it inline, and by the planner's page.
const FourfoldReport = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  // Okabe-Ito colours; a letter, a number or a hatch repeats what a colour says. [name, fill, text on it]
  const PARTS = {
    compute: ["compute", "#0072B2", "#fff"], recompute: ["recomputation", "#56B4E9", "#000"], grid: ["exposed collectives of the grid", "#CC79A7", "#000"],
    exposed: ["exposed communication and copies", "#E69F00", "#000"], bubble: ["pipeline bubble", "hatch", "#000"], update: ["optimizer update", "#009E73", "#000"],
  };
  const HELD = {
    parameters: ["parameters", "#0072B2", "#fff"], gathered: ["gathered parameters", "#56B4E9", "#000"], gradients: ["gradients", "#E69F00", "#000"],
    optimizer: ["optimizer state", "#009E73", "#000"], activations: ["activations", "#CC79A7", "#000"], workspace: ["workspace", "#F0E442", "#000"],
    messages: ["messages", "#D55E00", "#000"],
  };
  const MODES = {
    replicate: ["replicate: every replica holds all of it", "#E69F00", "#000", "R"], zero2: ["zero2: sharded, gathered before each forward", "#56B4E9", "#000", "2"],
    zero3: ["zero3: sharded, gathered before each forward and backward", "#0072B2", "#fff", "3"], keep: ["keep: sharded, gathered once a step", "#009E73", "#000", "K"],
  };
  const AGAIN = { none: ["nothing recomputed", ""], selective: ["recompute all but matmuls", "s"], full: ["recompute all", "f"], "per-slice": ["recompute slice by slice", "p"] };
  const GROUPS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8a9098"];

  // ---- elements ----

  function make(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === undefined || value === null || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== "") node.append(child);
    return node;
  }
  const el = (name, attributes, ...children) => make(document.createElement(name), attributes, children);
  const svg = (name, attributes, ...children) => make(document.createElementNS(SVG, name), attributes, children);

  // ---- numbers, as the command line writes them ----

  function digits(value, count) {
    const text = value.toPrecision(count);
    return /e/.test(text) ? String(Math.round(value)) : text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  }
  function seconds(s, count = 4) {
    for (const [unit, size, least] of [["days", 86400, 172800], ["h", 3600, 7200], ["min", 60, 600], ["s", 1, 1], ["ms", 1e-3, 1e-3]])
      if (Math.abs(s) >= least * (1 - 5e-5)) return `${digits(s / size, count)} ${unit}`;
    return s ? `${digits(s * 1e6, count)} µs` : "0 s";
  }
  function bytes(n, places = 2) {
    for (const [unit, size] of [["PiB", 2 ** 50], ["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]])
      if (Math.abs(n) >= size) return `${(n / size).toFixed(places)} ${unit}`;
    return `${n.toFixed(0)} B`;
  }
  const count = n => Math.round(n).toLocaleString("en-US");
  const percent = (x, places = 1) => `${(100 * x).toFixed(places)} %`;
  const parameters = n => n >= 1e9 ? `${digits(n / 1e9, 3)} B` : `${digits(n / 1e6, 3)} M`;

  // ---- tooltips: by pointer and by focus ----

  const tip = el("div", { class: "ff-tip", "aria-hidden": "true" });
  function placeTip(text, x, y) {
    if (!tip.isConnected) document.body.append(tip);
    tip.textContent = text;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + "px";
    tip.style.top = (y + box.height + 24 > innerHeight ? Math.max(6, y - box.height - 12) : y + 14) + "px";
  }
  const hideTip = () => { tip.textContent = ""; };
  let byPointer = false;  // scrolling moves what a pointer is at; focus scrolls by itself
  addEventListener("scroll", () => { if (byPointer) hideTip(); }, { passive: true });
  addEventListener("keydown", e => { if (e.key === "Escape") hideTip(); });

  // Shapes of a picture that explain themselves: pointer and tap, or focus and arrow keys. items: [{ node, x, y, text }]
  function explainable(picture, items, onPick) {
    let at = -1;
    const show = (i, x, y) => {
      at = i; byPointer = x !== undefined;
      const item = items[i], box = picture.getBoundingClientRect();
      placeTip(item.text, x ?? box.left + item.x * box.width / picture.viewBox.baseVal.width, y ?? box.top + item.y * box.height / picture.viewBox.baseVal.height);
      if (onPick) onPick(i);
    };
    items.forEach((item, i) => {
      item.node.addEventListener("pointermove", e => show(i, e.clientX, e.clientY));
      item.node.addEventListener("pointerdown", e => show(i, e.clientX, e.clientY));
      item.node.addEventListener("pointerleave", hideTip);
    });
    if (!items.length) return;
    picture.setAttribute("tabindex", "0");
    picture.addEventListener("blur", () => { hideTip(); if (onPick) onPick(-1); at = -1; });
    picture.addEventListener("keydown", e => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[e.key];
      const to = e.key === "Home" ? 0 : e.key === "End" ? items.length - 1 : by ? (at < 0 ? (by > 0 ? 0 : items.length - 1) : (at + by + items.length) % items.length) : null;
      if (to === null) return;
      e.preventDefault();
      show(to);
      live.textContent = items[to].text;
    });
  }
  const live = el("div", { role: "status", "aria-live": "polite" });
  Object.assign(live.style, { position: "absolute", width: "1px", height: "1px", overflow: "hidden", clipPath: "inset(50%)" });

  // ---- pieces of pictures ----

  let hatches = 0;
  function hatch(colour = "var(--hatch)", id = `ff-hatch-${++hatches}`) {
    const lines = svg("path", { d: "M-1,1 l2,-2 M0,6 l6,-6 M5,7 l2,-2", stroke: colour, "stroke-width": 1.6 });
    return { id, node: svg("defs", {}, svg("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse" }, svg("rect", { width: 6, height: 6, fill: "var(--soft)" }), lines)) };
  }
  function swatch(fill) {
    const h = fill === "hatch" ? hatch() : null;
    return svg("svg", { width: 13, height: 13, "aria-hidden": "true" }, h && h.node, svg("rect", { width: 13, height: 13, rx: 2, fill: h ? `url(#${h.id})` : fill, stroke: "var(--line)" }));
  }
  const legend = entries => el("ul", { class: "legend" }, entries.map(([fill, name, value]) => el("li", {}, swatch(fill), name, value ? [" ", el("b", {}, value)] : "")));
  function ticks(from, to, about) {
    const raw = (to - from) / about, unit = 10 ** Math.floor(Math.log10(raw)), by = [1, 2, 5, 10].map(n => n * unit).find(n => n >= raw);
    const out = [];
    for (let t = Math.ceil(from / by - 1e-9) * by; t <= to + by * 1e-9; t += by) out.push(t);
    return out;
  }
  function table(head, rows, { text = [0], wrap = [], chosen = -1 } = {}) {
    const cell = (tag, value, i) => el(tag, { class: [text.includes(i) && "text", tag === "td" && wrap.includes(i) && "wrap"].filter(Boolean).join(" ") || null, scope: tag === "th" ? "col" : null }, value);
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "table" }, el("table", {}, el("thead", {}, el("tr", {}, head.map((h, i) => cell("th", h, i)))),
      el("tbody", {}, rows.map((row, n) => el("tr", { class: n === chosen ? "chosen" : null }, row.map((value, i) => cell("td", value, i)))))));
  }
  const section = (title, ...children) => el("section", {}, el("h2", { class: "part" }, title), children);

  // Drawn for the width of its box, and again when that changes.
  function responsive(draw) {
    const box = el("div", {});
    let width = 0;
    box.again = () => { if (width) box.replaceChildren(draw(width)); };
    new ResizeObserver(() => {
      const now = Math.floor(box.clientWidth);
      if (now > 0 && Math.abs(now - width) > 1) { width = now; box.replaceChildren(draw(now)); }
    }).observe(box);
    return box;
  }

  // ---- the parts of the report ----

  function headline(data, options) {
    const p = data.predicted, q = data.question, full = p.peak_bytes / p.usable_bytes;
    const about = `${q.model}, ${parameters(q.parameters)} parameters; ${count(q.global_batch)} × ${count(q.seq_len)} tokens a step in ${q.precision}; ${data.mesh.ranks} × ${q.device} (${q.cluster})`;
    const meter = el("div", { class: "meter" }), bar = el("i", { class: full > 1 ? "over" : null });
    bar.style.width = `${Math.min(100, 100 * full)}%`;
    meter.append(bar);
    const card = (value, name, ...more) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, name), more);
    const tag = options.heading || "h2", plan = data.alternatives[0], micro = plan && /, (\d+) × (\d+)/.exec(plan.name);
    return [
      el("div", { class: "top-line" }, el(tag, { class: tag === "h2" ? "top" : null }, data.title), options.theme ? themeButton() : null),
      el("p", { class: "dim" }, about),
      plan ? el("p", { class: "chosen" }, el("b", {}, `Plan: ${plan.name}`), `; units: ${plan.units}.`, micro ? ` ${micro[0].slice(2)} means ${micro[1]} micro-batch${micro[1] === "1" ? "" : "es"} of ${micro[2]} sequence${micro[2] === "1" ? "" : "s"} on every rank.` : "") : null,
      data.misfit ? el("p", { class: "misfit" }, `Does not fit: ${data.misfit}`) : null,
      el("div", { class: "cards" }, card(seconds(p.seconds), "per step"), card(count(p.tokens_per_second), "tokens/s"), card(percent(p.mfu), "MFU"),
        card(bytes(p.peak_bytes), `of ${bytes(p.usable_bytes)} on the fullest rank`, meter)),
      data.notes.map(note => el("p", { class: "note" }, note)),
    ];
  }
  function themeButton() {
    const root = document.documentElement;
    try { const kept = localStorage.getItem("fourfold-theme"); if (kept) root.dataset.theme = kept; } catch { /* a file:// page may have no storage */ }
    return el("button", { type: "button", onclick: () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("fourfold-theme", root.dataset.theme); } catch { /* see above */ }
    } }, "light / dark");
  }

  function stepTime(data) {
    const total = data.predicted.seconds, shown = Object.entries(data.parts).filter(([, s]) => s > 0);
    const picture = responsive(width => {
      const h = hatch(), root = svg("svg", { viewBox: `0 0 ${width} 40`, width, role: "img", "aria-label": "Parts of a step: " + shown.map(([k, s]) => `${PARTS[k][0]} ${seconds(s, 3)}`).join(", ") }, h.node);
      let x = 0; const items = [];
      for (const [key, s] of shown) {
        const w = s / total * width, [name, fill, on] = PARTS[key];
        const node = svg("rect", { x, y: 0, width: Math.max(w - (w > 3 ? 1.5 : 0), 0.8), height: 40, fill: fill === "hatch" ? `url(#${h.id})` : fill });
        root.append(node);
        const label = `${percent(s / total, 0)}`;
        if (w > 44) { const t = svg("text", { x: x + w / 2, y: 25, "text-anchor": "middle" }, w > 8 * (name.length + 5) ? `${name} ${label}` : label); t.style.fill = fill === "hatch" ? "var(--fg)" : on; t.style.pointerEvents = "none"; root.append(t); }
        items.push({ node, x: x + w / 2, y: 30, text: `${name}: ${seconds(s, 3)}, ${percent(s / total)} of the step` });
        x += w;
      }
      explainable(root, items);
      return root;
    });
    return section("Where the step's time goes", picture, legend(shown.map(([k, s]) => [PARTS[k][1], PARTS[k][0], `${seconds(s, 3)}, ${percent(s / total)}`])));
  }

  function words(data) {
    const box = el("div", { class: "words" });
    let block = [];
    const flush = () => { if (block.length) box.append(block.length > 1 ? el("pre", { tabindex: "0" }, block.join("\n")) : el("p", {}, block[0])); block = []; };
    for (const line of data.words.slice(data.misfit ? 4 : 3)) {  // the first lines are the headline and the parts of the step
      if (line.startsWith("  ")) { block.push(line.slice(2)); continue; }
      flush();
      const [, lead, rest] = /^([a-z -]{3,24}): ([\s\S]*)$/.exec(line) || [null, "", line];
      box.append(el("p", {}, lead ? el("b", {}, lead[0].toUpperCase() + lead.slice(1) + ": ") : "", lead ? rest : rest[0].toUpperCase() + rest.slice(1)));
    }
    flush();
    if (data.question.source) box.append(el("p", { class: "dim" }, `The cluster's numbers: ${data.question.source}.`));
    return section("In words", box);
  }

  function frontier(points) {
    const out = [];
    for (const p of [...points].sort((a, b) => a.bytes - b.bytes || a.seconds - b.seconds)) if (!out.length || p.seconds < out[out.length - 1].seconds) out.push(p);
    return out;
  }
  function tried(data) {
    const chosen = { kind: "chosen", name: (data.alternatives[0] || { name: data.mesh.words }).name, units: (data.alternatives[0] || { units: "" }).units, seconds: data.predicted.seconds, bytes: data.predicted.peak_bytes };
    const same = p => p.kind === "found" && Math.abs(p.seconds - chosen.seconds) < 1e-9 * chosen.seconds && p.bytes === chosen.bytes;
    const all = [...data.points.filter(p => !same(p)), chosen];
    const limit = data.predicted.usable_bytes, widest = Math.max(1.5 * limit, 1.15 * chosen.bytes), slowest = 2.5 * chosen.seconds;
    const shown = all.filter(p => p.bytes <= widest && p.seconds <= slowest), left = all.length - shown.length;
    if (shown.length < 2) return null;
    const found = data.points.filter(p => p.kind === "found").length, hand = data.points.length - found;
    const edge = frontier(shown.filter(p => p.bytes <= limit));
    const describe = p => `${p.name}\n${p.units}\n${seconds(p.seconds)} a step, ${bytes(p.bytes)}${p.bytes > limit ? ": does not fit" : ""}\n${{ chosen: "the chosen plan", found: "a plan of the search", uniform: "one mode and one recomputation for all units" }[p.kind]}`;
    const picture = responsive(width => {
      const small = width < 560, height = small ? 300 : 380, left = small ? 46 : 62, bottom = 40, top = 14, right = 10;
      const minX = 0, maxX = Math.max(limit * 1.06, ...shown.map(p => p.bytes * 1.03));
      const lows = [...shown.map(p => p.seconds), ...(data.lower_bound ? [data.lower_bound] : [])], span = Math.max(...lows) - Math.min(...lows) || chosen.seconds * 0.1;
      const minY = Math.max(0, Math.min(...lows) - 0.08 * span), maxY = Math.max(...lows) + 0.06 * span;
      const X = b => left + (b - minX) / (maxX - minX) * (width - left - right), Y = s => top + (maxY - s) / (maxY - minY) * (height - top - bottom);
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": `Step time against memory of ${shown.length} plans. The chosen one: ${seconds(chosen.seconds)}, ${bytes(chosen.bytes)} of ${bytes(limit)}. Arrow keys go from plan to plan.` });
      const gib = 2 ** 30, unit = maxX > 4 * gib ? gib : 2 ** 20;
      for (const t of ticks(minX / unit, maxX / unit, width / 110)) {
        root.append(svg("line", { x1: X(t * unit), x2: X(t * unit), y1: top, y2: height - bottom, stroke: "var(--line)", "stroke-width": 0.7 }), svg("text", { x: X(t * unit), y: height - bottom + 16, "text-anchor": "middle", class: "dim" }, String(+t.toPrecision(6))));
      }
      for (const t of ticks(minY, maxY, height / 60)) root.append(svg("line", { x1: left, x2: width - right, y1: Y(t), y2: Y(t), stroke: "var(--line)", "stroke-width": 0.7 }), svg("text", { x: left - 6, y: Y(t) + 4, "text-anchor": "end", class: "dim" }, small ? digits(t, 3) : seconds(t, 3)));
      root.append(svg("text", { x: (left + width) / 2, y: height - 6, "text-anchor": "middle", class: "dim" }, `memory of the fullest rank, ${unit === gib ? "GiB" : "MiB"}`));
      root.append(svg("text", { x: 2, y: top - 2, class: "dim" }, "step"));
      root.append(svg("rect", { x: X(limit), y: top, width: Math.max(0, width - right - X(limit)), height: height - top - bottom, fill: "var(--bad-soft)" }), svg("line", { x1: X(limit), x2: X(limit), y1: top, y2: height - bottom, stroke: "var(--bad)", "stroke-width": 1.5 }));
      const limitText = svg("text", { x: X(limit) - 5, y: top + 12, "text-anchor": "end" }, `fits up to ${bytes(limit)}`); limitText.style.fill = "var(--bad)"; root.append(limitText);
      if (data.lower_bound) root.append(svg("line", { x1: left, x2: width - right, y1: Y(data.lower_bound), y2: Y(data.lower_bound), stroke: "var(--good)", "stroke-dasharray": "5 4" }), svg("text", { x: left + 6, y: Y(data.lower_bound) + 15, class: "halo" }, small ? `lower bound ${seconds(data.lower_bound)}` : `no plan takes less than ${seconds(data.lower_bound)} (planner's model)`));
      let path = "";
      edge.forEach((p, i) => { path += i ? `H${X(p.bytes)}V${Y(p.seconds)}` : `M${X(p.bytes)},${Y(p.seconds)}`; });
      root.append(svg("path", { d: path, fill: "none", stroke: "var(--accent)", "stroke-width": 1.6 }));
      const order = { uniform: 0, found: 1, chosen: 2 }, items = [];
      for (const p of [...shown].sort((a, b) => order[a.kind] - order[b.kind])) {
        const x = X(p.bytes), y = Y(p.seconds), over = p.bytes > limit;
        const node = p.kind === "uniform" ? svg("rect", { x: x - 3.5, y: y - 3.5, width: 7, height: 7, fill: over ? "none" : "#E69F00", stroke: "#B87E00", transform: `rotate(45 ${x} ${y})` })
          : p.kind === "found" ? svg("circle", { cx: x, cy: y, r: 4.5, fill: "#56B4E9", stroke: "#0072B2" })
          : svg("path", { d: star(x, y, 11), fill: "#D55E00", stroke: "var(--bg)", "stroke-width": 1.2 });
        root.append(node);
        items.push({ node, x, y, seconds: p.seconds, text: describe(p) });
      }
      items.sort((a, b) => a.seconds - b.seconds);
      const ring = svg("circle", { r: 9, fill: "none", stroke: "var(--fg)", "stroke-width": 2, visibility: "hidden", "pointer-events": "none" });
      root.append(ring);
      explainable(root, items, i => { if (i < 0) ring.setAttribute("visibility", "hidden"); else { ring.setAttribute("cx", items[i].x); ring.setAttribute("cy", items[i].y); ring.setAttribute("visibility", "visible"); } });
      return root;
    });
    const key = el("ul", { class: "legend" },
      el("li", {}, svg("svg", { width: 15, height: 13, "aria-hidden": "true" }, svg("path", { d: star(7.5, 7, 6.5), fill: "#D55E00" })), "chosen"),
      found ? el("li", {}, svg("svg", { width: 13, height: 13, "aria-hidden": "true" }, svg("circle", { cx: 6.5, cy: 6.5, r: 5, fill: "#56B4E9", stroke: "#0072B2" })), "plans of the search, unit by unit ", el("b", {}, String(found))) : null,
      hand ? el("li", {}, svg("svg", { width: 13, height: 13, "aria-hidden": "true" }, svg("rect", { x: 3, y: 3, width: 7, height: 7, fill: "#E69F00", stroke: "#B87E00", transform: "rotate(45 6.5 6.5)" })), "plans with one mode and one recomputation for all units ", el("b", {}, String(hand))) : null,
      el("li", {}, svg("svg", { width: 18, height: 13, "aria-hidden": "true" }, svg("path", { d: "M0,3H9V10H18", fill: "none", stroke: "var(--accent)", "stroke-width": 1.6 })), "frontier: no plan here is faster in less memory"));
    const rows = [...all].sort((a, b) => a.seconds - b.seconds).map(p => [p.name, p.units, seconds(p.seconds), bytes(p.bytes), p.bytes > limit ? "no" : "yes"]);
    const listing = el("details", {}, el("summary", {}, `All ${all.length} as a table`), table(["plan", "units", "step", "memory", "fits"], rows, { text: [0, 1], wrap: [1], chosen: rows.findIndex(r => r[2] === seconds(chosen.seconds) && r[3] === bytes(chosen.bytes)) }));
    return section("The plans that were tried", picture, key, left ? el("p", { class: "dim" }, `${left} that need more than ${bytes(widest)} or take longer than ${seconds(slowest)} are in the table only.`) : null, listing);
  }
  function star(x, y, r) {
    let d = "";
    for (let i = 0; i < 10; i++) { const a = Math.PI * (i / 5 - 0.5), s = i % 2 ? 0.45 * r : r; d += `${i ? "L" : "M"}${(x + s * Math.cos(a)).toFixed(2)},${(y + s * Math.sin(a)).toFixed(2)}`; }
    return d + "Z";
  }

  // ---- the mesh on the cluster ----

  const coordinate = (axis, rank) => Math.floor(rank / axis.stride) % axis.degree;
  const peers = (axis, rank) => Array.from({ length: axis.degree }, (_, i) => rank + (i - coordinate(axis, rank)) * axis.stride);
  const onColour = fill => fill === "#0072B2" ? "#fff" : "#000";
  function mesh(data) {
    const m = data.mesh, nodes = Math.min(m.nodes, Math.max(1, Math.floor(1024 / m.devices))), devices = nodes * m.devices;
    let axis = m.axes[0] || null;
    const names = a => a.links.map(i => m.levels[i] ? m.levels[i].name : "no link").join(" and ");
    const between = (a, b) => (m.levels.find(x => Math.floor(a / x.ranks) === Math.floor(b / x.ranks)) || m.levels[m.levels.length - 1] || { name: "no link" }).name;
    const colourOf = rank => {
      if (rank >= m.ranks) return null;
      if (!axis) return GROUPS[0];
      const first = rank - coordinate(axis, rank) * axis.stride;  // groups are numbered by their first rank
      return GROUPS[(Math.floor(first / (axis.stride * axis.degree)) * axis.stride + first % axis.stride) % GROUPS.length];
    };
    const tell = rank => {
      if (rank >= m.ranks) return `device ${rank}: not used by this plan`;
      const where = m.axes.length ? m.axes.slice().reverse().map(a => `${a.name} ${coordinate(a, rank)}`).join(", ") : "the only rank";
      const lines = [`rank ${rank}, node ${Math.floor(rank / m.devices)}: ${where}`];
      for (const a of m.axes) {
        if (a.name === "pipe") {
          const next = peers(a, rank).filter(r => Math.abs(coordinate(a, r) - coordinate(a, rank)) === 1);
          lines.push(`pipe: with ${next.map(r => `rank ${r} over ${between(r, rank)}`).join(" and ")}`);
        } else {
          const others = peers(a, rank).filter(r => r !== rank);
          lines.push(`${a.name}: with ${others.length > 1 ? "ranks" : "rank"} ${listed(others)} over ${names(a)}`);
        }
      }
      return lines.join("\n");
    };
    const picture = responsive(width => {
      const cell = devices > 256 ? 13 : devices > 64 ? 20 : 34, gap = 3, pad = 7, head = 18;
      const columns = Math.min(m.devices, Math.max(1, Math.floor((width - 2 * pad) / (cell + gap))), m.devices > 8 ? 12 : 8);
      const boxW = columns * (cell + gap) - gap + 2 * pad, boxH = Math.ceil(m.devices / columns) * (cell + gap) - gap + 2 * pad + head;
      const across = Math.max(1, Math.floor((width + 10) / (boxW + 10))), height = Math.ceil(nodes / across) * (boxH + 10);
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": `${m.nodes} nodes of ${m.devices} devices. Arrow keys go from rank to rank.` });
      const items = [];
      for (let rank = 0; rank < devices; rank++) {
        const n = Math.floor(rank / m.devices), d = rank % m.devices, x0 = (n % across) * (boxW + 10), y0 = Math.floor(n / across) * (boxH + 10);
        if (d === 0) root.append(svg("rect", { x: x0 + 0.5, y: y0 + 0.5, width: boxW - 1, height: boxH - 1, rx: 6, fill: "none", stroke: "var(--line)" }), svg("text", { x: x0 + pad, y: y0 + 16, class: "dim" }, boxW > 60 ? `node ${n}` : String(n)));
        const x = x0 + pad + (d % columns) * (cell + gap), y = y0 + head + pad + Math.floor(d / columns) * (cell + gap), fill = colourOf(rank);
        const node = svg("rect", { x, y, width: cell, height: cell, rx: 4, fill: fill || "transparent", stroke: fill ? "none" : "var(--line)" });
        root.append(node);
        if (cell >= 20) {
          const text = svg("text", { x: x + cell / 2, y: y + cell / 2 + 4, "text-anchor": "middle" }, String(rank));
          Object.assign(text.style, { pointerEvents: "none", fontSize: String(rank).length > 3 ? "8px" : cell < 30 ? "10px" : "12px", fill: fill ? onColour(fill) : "var(--dim)" });
          root.append(text);
        }
        items.push({ node, x: x + cell / 2, y: y + cell, text: tell(rank) });
      }
      const mark = rank => {
        const group = new Set(rank < 0 ? [] : axis && rank < m.ranks ? peers(axis, rank) : [rank]);
        items.forEach(({ node }, r) => { node.setAttribute("stroke", group.has(r) ? "var(--fg)" : r < m.ranks ? "none" : "var(--line)"); node.setAttribute("stroke-width", group.has(r) ? 3 : 1); });
      };
      explainable(root, items, mark);
      root.addEventListener("pointerleave", () => mark(-1));
      return root;
    });
    const about = el("p", {}), buttons = el("div", { class: "row", role: "group", "aria-label": "axis of the mesh" });
    const choose = a => {
      axis = a;
      for (const button of buttons.children) button.setAttribute("aria-pressed", String(button.value === (a ? a.name : "")));
      const groups = a ? m.ranks / a.degree : 0, speed = a ? a.links.map(i => m.levels[i] ? `${m.levels[i].name} (${digits(m.levels[i].bandwidth / 1e9, 3)} GB/s for each device)` : "no link").join(" and ") : "";
      about.textContent = a ? `${a.traffic[0].toUpperCase()}${a.traffic.slice(1)}: ${count(groups)} ${groups === 1 ? "group" : "groups"} of ${a.degree} ranks, ${a.stride === 1 ? "next to each other" : `${a.stride} apart`}, over ${speed}. `
        + `Ranks of one colour are one group${groups > GROUPS.length ? "; colours repeat" : ""}.` : "One rank: nothing is communicated.";
      picture.again();
    };
    buttons.append(...m.axes.map(a => el("button", { type: "button", value: a.name, onclick: () => choose(a) }, `${a.name} ${a.degree} · ${names(a)}`)));
    choose(axis);
    return section("The mesh on the cluster", el("p", { class: "dim" }, `${m.words} ${m.ranks === 1 ? "rank" : "ranks"} on ${m.nodes} × ${m.devices} devices. Choose an axis; point at a rank, or use arrow keys, for what it talks to.`), buttons, about, picture,
      nodes < m.nodes ? el("p", { class: "dim" }, `The first ${nodes} of ${count(m.nodes)} nodes are shown; the others are like them.`) : null);
  }
  const listed = list => (list.length > 8 ? [...list.slice(0, 5), "…", list[list.length - 1]] : list).join(", ");

  // ---- memory ----

  function memory(data) {
    const { parts, ranks } = data.memory, limit = data.predicted.usable_bytes, most = Math.max(limit, ...ranks.map(r => r.bytes)) * 1.02;
    const used = parts.filter(name => ranks.some(r => r[name])), many = ranks.length > 1;
    const picture = responsive(width => {
      const left = many ? 62 : 0, bar = ranks.length > 24 ? 12 : ranks.length > 8 ? 18 : 28, step = bar + 4, height = ranks.length * step + 20, X = b => left + b / most * (width - left - 2);
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": `Peak memory of ${ranks.length === 1 ? "a rank" : `${ranks.length} ranks of the pipeline`} by part. Arrow keys go from part to part.` });
      const items = [];
      ranks.forEach((r, i) => {
        const y = i * step; let x = 0;
        if (many && bar >= 12) root.append(svg("text", { x: left - 8, y: y + bar / 2 + 4, "text-anchor": "end", class: "dim" }, `pipe ${r.rank}`));
        for (const name of used) {
          if (!r[name]) continue;
          const [title, fill, on] = HELD[name], w = X(x + r[name]) - X(x);
          const node = svg("rect", { x: X(x), y, width: Math.max(0.6, w - (w > 3 ? 1 : 0)), height: bar, fill });
          root.append(node);
          if (w > 62 && bar >= 18) { const t = svg("text", { x: X(x) + w / 2, y: y + bar / 2 + 4, "text-anchor": "middle" }, bytes(r[name], 1)); t.style.fill = on; t.style.pointerEvents = "none"; root.append(t); }
          items.push({ node, x: X(x) + w / 2, y: y + bar, text: `${many ? `pipeline rank ${r.rank}: ` : ""}${title} ${bytes(r[name])}\n${bytes(r.bytes)} at its peak (${r.at})` });
          x += r[name];
        }
      });
      root.append(svg("line", { x1: X(limit), x2: X(limit), y1: -2, y2: height - 16, stroke: "var(--bad)", "stroke-width": 2 }));
      const text = svg("text", { x: X(limit), y: height - 3, "text-anchor": "end" }, `fits up to ${bytes(limit)}`); text.style.fill = "var(--bad)"; root.append(text);
      explainable(root, items);
      return root;
    });
    const peak = ranks.reduce((a, b) => b.bytes > a.bytes ? b : a), host = ranks.some(r => r.host);
    const head = ["rank", "peak", "at", ...used.map(n => HELD[n][0]), ...(host ? ["on the host"] : [])];
    const rows = ranks.map(r => [many ? `pipe ${r.rank}` : "every rank", bytes(r.bytes), r.at, ...used.map(n => bytes(r[n] || 0)), ...(host ? [bytes(r.host)] : [])]);
    return section(many ? "Memory of every rank of the pipeline" : "Memory of every rank", many ? el("p", { class: "dim" }, `Ranks with the same place in the pipeline hold the same. The fullest is pipe ${peak.rank}.`) : el("p", { class: "dim" }, `All ${count(data.mesh.ranks)} ranks hold the same.`),
      picture, legend(used.map(n => [HELD[n][1], HELD[n][0], bytes(peak[n] || 0)])), el("details", {}, el("summary", {}, "As a table"), table(head, rows, { chosen: ranks.indexOf(peak) })));
  }

  // ---- units ----

  function units(data) {
    const stages = [];
    for (const u of data.units) { if (!stages.length || stages[stages.length - 1][0].stage !== u.stage) stages.push([]); stages[stages.length - 1].push(u); }
    const modes = Object.keys(MODES).filter(k => data.units.some(u => u.mode === k)), again = Object.keys(AGAIN).filter(k => k !== "none" && data.units.some(u => u.recompute === k));
    const split = data.units.some(u => u.split > 1);
    const tell = u => [`${u.name}: ${parameters(u.parameters)} parameters`, `mode ${u.mode}${u.within ? ` within ${u.within} ranks` : ""}; gradients reduced once per ${u.reduce}`, AGAIN[u.recompute][0] + (u.split > 1 ? `; split into ${u.split} slices` : ""), stages.length > 1 ? `stage ${u.stage}, pipeline rank ${u.rank}` : ""].filter(Boolean).join("\n");
    const picture = responsive(width => {
      const cell = data.units.length > 160 ? 13 : 18, tall = cell + (again.length ? 9 : 0), gap = 2, head = stages.length > 1 ? 16 : 0, between = 12;
      const nodes = [], items = [];
      let x = 0, y = 0, line = 0;
      for (const list of stages) {
        const w = list.length * (cell + gap);
        if (x && x + Math.min(w, width) > width) { x = 0; y += line + 10; line = 0; }
        let dx = 0, dy = 0;
        if (head) nodes.push(svg("text", { x, y: y + 12, class: "dim" }, w > 90 ? `stage ${list[0].stage} · pipe ${list[0].rank}` : w > 40 ? `stage ${list[0].stage}` : String(list[0].stage)));
        for (const u of list) {
          if (x + dx + cell > width) { dx = -x; dy += tall + 4; }
          const [, fill, on, letter] = MODES[u.mode], cx = x + dx, cy = y + head + dy;
          const node = svg("g", {}, svg("rect", { x: cx, y: cy, width: cell, height: cell, fill }), svg("text", { x: cx + cell / 2, y: cy + cell / 2 + 4, "text-anchor": "middle" }, letter));
          node.lastChild.style.fill = on; node.lastChild.style.fontSize = cell < 16 ? "10px" : "11px";
          if (u.recompute !== "none") {
            const share = { selective: 0.5, full: 1, "per-slice": 0.75 }[u.recompute];
            node.append(svg("rect", { x: cx, y: cy + cell + 2, width: cell * share, height: 5, fill: "var(--fg)" }));
          }
          if (u.split > 1) node.append(svg("path", { d: `M${cx},${cy + cell} L${cx + cell},${cy}`, stroke: on, "stroke-width": 1.2 }));
          nodes.push(node);
          items.push({ node, x: cx + cell / 2, y: cy + cell, text: tell(u) });
          dx += cell + gap;
        }
        line = Math.max(line, head + dy + tall);
        x = dx < 0 ? width : x + dx + between;
        if (dy) { x = width; }
      }
      const height = y + line + 4;
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": `${data.units.length} units with their modes. Arrow keys go from unit to unit.` }, nodes);
      explainable(root, items);
      return root;
    });
    const key = legend(modes.map(k => [MODES[k][1], `${MODES[k][3]} · ${MODES[k][0]}`, String(data.units.filter(u => u.mode === k).length)]));
    for (const k of again) {
      const share = { selective: 0.5, full: 1, "per-slice": 0.75 }[k];
      key.append(el("li", {}, svg("svg", { width: 14, height: 9, "aria-hidden": "true" }, svg("rect", { y: 3, width: 14 * share, height: 5, fill: "var(--fg)" })), `${AGAIN[k][0]} `, el("b", {}, String(data.units.filter(u => u.recompute === k).length))));
    }
    if (split) key.append(el("li", {}, "a slash: split into slices"));
    const rows = [];
    for (const u of data.units) {
      const row = [u.name, stages.length > 1 ? String(u.stage) : "", u.mode, u.reduce, u.within ? String(u.within) : "all", u.recompute, String(u.split)], last = rows[rows.length - 1];
      if (last && last.slice(1).join() === row.slice(1).join()) last[0] = `${last[0].split(" … ")[0]} … ${u.name}`; else rows.push(row);
    }
    const keep = [0, 1, 2, 3, 4, 5, 6].filter(i => i !== 1 || stages.length > 1);
    return section("Units and their modes", el("p", { class: "dim" }, "In the order of the forward: the embedding, attention and MLP of every layer, the head."), picture, key,
      el("details", {}, el("summary", {}, "As a table"), table(keep.map(i => ["unit", "stage", "mode", "reduced once per", "sharded within", "recompute", "slices"][i]), rows.map(r => keep.map(i => r[i])), { text: [0, 2, 3, 5] })));
  }

  function alternatives(data) {
    if (data.alternatives.length < 2) return null;
    const best = data.alternatives[0].seconds;
    const rows = data.alternatives.map((a, i) => [String(i + 1), a.name, a.units, seconds(a.seconds), i ? `+${percent(a.seconds / best - 1)}` : "", percent(a.mfu), bytes(a.bytes), seconds(a.exposed + a.grid, 3), seconds(a.bubble, 3)]);
    return section("Alternatives", el("p", { class: "dim" }, "“16 × 1” are 16 micro-batches of one sequence on every rank."), table(["", "plan", "units", "step", "", "MFU", "memory", "network", "bubble"], rows, { text: [1, 2], wrap: [1, 2], chosen: 0 }));
  }

  // ---- files to copy ----

  async function copy(text, button) {
    let done = false;
    try { await navigator.clipboard.writeText(text); done = true; } catch {
      const area = el("textarea", { readonly: true }); area.value = text; area.style.position = "fixed"; document.body.append(area); area.select();
      try { done = document.execCommand("copy"); } catch { done = false; }
      area.remove();
    }
    const was = button.textContent; button.textContent = done ? "copied" : "select the text and copy it";
    setTimeout(() => { button.textContent = was; }, 1600);
  }
  function download(name, text) {
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
    document.body.append(link); link.click(); link.remove(); setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }
  function texts(data) {
    const pre = el("pre", { class: "file", tabindex: "0" }), tabs = el("div", { class: "row", role: "group", "aria-label": "file" });
    let at = data.texts[0];
    const save = el("button", { type: "button", onclick: () => download(at.file, at.text) }, "download");
    const show = t => {
      at = t; pre.textContent = t.text; save.classList.toggle("hidden", !t.file);
      for (const b of tabs.children) b.setAttribute("aria-pressed", String(b.value === t.name));
    };
    tabs.append(...data.texts.map(t => el("button", { type: "button", value: t.name, onclick: () => show(t) }, t.name)));
    show(at);
    const use = data.misfit ? "" : "Save plan.json and run it with fourfold train --plan plan.json. Lines that begin with “# lost” say what the other system cannot do.";
    return section("To copy", use ? el("p", { class: "dim" }, use) : null, tabs, pre, el("div", { class: "row" }, el("button", { type: "button", onclick: e => copy(at.text, e.currentTarget) }, "copy"), save));
  }

  function show(root, data, options = {}) {
    hideTip();
    root.classList.add("ff");
    root.replaceChildren(...[headline(data, options), stepTime(data), words(data), tried(data), mesh(data), memory(data), units(data), alternatives(data), texts(data),
      el("p", { class: "dim" }, `Predicted by fourfold ${data.version}; nothing was run.`), live].flat(Infinity).filter(Boolean));
  }
  return { show, copy, themeButton, el, svg, seconds, bytes, count, percent };
})();
