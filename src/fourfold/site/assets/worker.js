// The planner in Pyodide, in a web worker: answers questions with fourfold/site/question.py, one after another.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const here = new URL("./", import.meta.url), progress = { id: 0 };
async function start() {
  const [python, sources] = await Promise.all([
    loadPyodide({ indexURL: new URL("pyodide/", here).href }),
    fetch(new URL("fourfold.zip", here)).then(r => { if (!r.ok) throw new Error(`fourfold.zip: ${r.status}`); return r.arrayBuffer(); }),
  ]);
  python.unpackArchive(sources, "zip", { extractDir: "/fourfold" });
  python.globals.set("tell", text => postMessage({ id: progress.id, progress: JSON.parse(text) }));
  python.runPython("import sys; sys.path.insert(0, '/fourfold'); from fourfold.site.question import ask");
  const ask = python.runPython("lambda kind, text: ask(kind, text, tell)");
  postMessage({ ready: true });
  return ask;
}
const ready = start();
ready.catch(e => postMessage({ failed: String(e && e.message || e) }));
onmessage = async ({ data: { id, kind, text } }) => {
  const ask = await ready;
  progress.id = id;
  try {
    postMessage({ id, answer: JSON.parse(ask(kind, text)) });
  } catch (e) {
    postMessage({ id, answer: { error: `the planner failed on this question: ${String(e && e.message || e).trim().split("\n").pop()}` } });
  }
};
